"""Stands in for CUDA's streams and finds what nothing orders, without a device.

Tensors are fake ones, or the CPU's. What torch does with them is noted on the current stream;
streams and events say what comes before what, by vector clocks. An AssertionError says which
operation may run too early, or whose memory may be given away too early.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_NO_WORK = torch.ops.aten.empty.memory_format, torch.ops.prim.device.default

type Clock = Counter["Stream"]  # how much of what each stream does has come before


class Stream:
    """A queue of work; its clock says what is through when the next piece begins."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.clock: Clock = Counter()

    def wait_stream(self, other: "Stream") -> None:
        self.clock |= other.clock

    def wait_event(self, event: "Event") -> None:
        self.clock |= event.clock

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event


class Event:
    """A point in a queue of work."""

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = Counter()

    def record(self, stream: Stream) -> None:
        self.clock = Counter(stream.clock)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait, which orders no stream here, though it would."""


@dataclass
class _Memory:
    """Who made a storage, and when each stream last wrote and read it."""

    owner: Stream
    on_device: bool
    written: Clock = field(default_factory=Counter)
    read: Clock = field(default_factory=Counter)
    recorded: set[Stream] = field(default_factory=set)  # by `record_stream`


class Streams(TorchDispatchMode):
    """Notes what runs on which stream. `made` are the streams beside the default one.

    Args:
        card: the device whose streams these are; tensors of any other are in the host's memory.
    """

    def __init__(self, card: str = "cuda") -> None:
        super().__init__()
        self._card = card
        self.current = self.default = Stream()
        self.made: list[Stream] = []
        self.copies: list[str] = []  # to the host and to the device, in order
        self._memory: dict[int, _Memory] = {}
        self._freed_early = False

    @contextlib.contextmanager
    def recording(self, *, fakes: bool = True) -> Iterator["Streams"]:
        """Replace torch's streams; tensors on "cuda" are fake, or with `fakes` off left alone."""
        mode = FakeTensorMode() if fakes else contextlib.nullcontext()
        with pytest.MonkeyPatch.context() as patch, mode, self:
            patch.setattr(torch.cuda, "Stream", self._make)
            patch.setattr(torch.cuda, "Event", Event)
            patch.setattr(torch.cuda, "stream", self._switched)
            patch.setattr(torch.cuda, "current_stream", lambda _=None: self.current)
            patch.setattr(Tensor, "record_stream", lambda x, stream: self._record(x, stream))
            yield self
        assert not self._freed_early, "memory is given away while a stream may still use it"

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.is_view or function in _NO_WORK:
            for x in tree_iter(result):
                if isinstance(x, Tensor):
                    self._of(x)
            return result
        said = zip(args, function._schema.arguments, strict=False)
        written = [x for x, a in said if _is_written(a) and isinstance(x, Tensor)]
        read = [x for x in args if isinstance(x, Tensor) and not any(x is w for w in written)]
        if not written:
            written = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        self._run(str(function), [*map(self._of, read)], [*map(self._of, written)])
        return result

    def _run(self, name: str, read: list[_Memory], written: list[_Memory]) -> None:
        stream = self.current
        for memory in (*read, *written):
            assert memory.written <= stream.clock, f"{name} may run before what it needs is written"
        for memory in written:
            assert memory.read <= stream.clock, f"{name} may overwrite what is still being read"
        stream.clock[stream] += 1
        for memory in read:
            memory.read[stream] = stream.clock[stream]
        for memory in written:
            memory.written = Counter({stream: stream.clock[stream]})
        if read and written and read[0].on_device != written[0].on_device:
            self.copies.append("to the host" if read[0].on_device else "to the device")

    def _of(self, x: Tensor) -> _Memory:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            # Until now it may have been another tensor's of this stream.
            read = Counter({self.current: self.current.clock[self.current]})
            on_device = x.device.type == self._card
            self._memory[key] = _Memory(
                self.current, on_device, read=read if on_device else Counter()
            )
            weakref.finalize(storage, self._free, key)
        return self._memory[key]

    def _free(self, key: int) -> None:
        """The owner's next tensor may get it; pinned memory is given away by events of its own."""
        memory = self._memory.pop(key)
        used = memory.read | memory.written
        others = {s for s in used if memory.owner.clock[s] < used[s]} - memory.recorded
        if memory.on_device and others - {memory.owner}:
            self._freed_early = True

    def _make(self, device: torch.device | None = None) -> Stream:
        self.made.append(Stream(device))
        return self.made[-1]

    @contextlib.contextmanager
    def _switched(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _record(self, x: Tensor, stream: Stream) -> None:
        self._of(x).recorded.add(stream)


def _is_written(argument: Any) -> bool:
    return bool(argument.alias_info and argument.alias_info.is_write)
