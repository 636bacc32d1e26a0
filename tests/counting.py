"""What operations do on fake CUDA tensors: kernels, bytes, live memory, reads by the host."""

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter

from megatron_burst.tools.live_bytes import LiveBytes

ATTENTION = ("_flash_attention", "_cudnn_attention")  # in the name of an operation
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class HostRead(AssertionError):
    """An operation on tensors of two devices: the host waits, or it is an error on a GPU."""


class Counting(LiveBytes):
    """Counts the kernels beside attention, an operation that changes or makes a tensor as one.

    Their bytes are what an operation reads and writes of its arguments and results, each once; of a
    custom operation, too. What reads values on the host raises an error: torch's own for `item`
    and `nonzero`, `HostRead` for copies.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.most: Counter[str] = Counter()  # bytes at the peak, by the file that made them
        self._made: dict[int, tuple[str, int]] = {}
        super().__init__(existing)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        read, reads = [*_tensors((args, kwargs))], 0
        result = super().__torch_dispatch__(function, types, args, kwargs)
        made, name = [*_tensors(result)], function.overloadpacket.__name__
        if function.namespace == "c10d":
            return result
        if len({t.device.type for t in (*read, *made) if t.ndim}) > 1:
            raise HostRead(f"{function} of {[(t.device.type, t.shape) for t in (*read, *made)]}")
        changed = [*_changed(function, args, kwargs)]
        known = {t.untyped_storage()._cdata for t in read}
        made = [t for t in made if t.untyped_storage()._cdata not in known]
        if name in NO_KERNEL or name.startswith(ATTENTION) or not made + changed:
            return result
        if name == "copy_":  # what it changes it does not read
            read = read[1:]
            if _place(read[0]) == _place(changed[0]) and read[0].is_contiguous():
                return result  # x[i] += y ends in a copy of x[i] to itself, which CUDA leaves out
        elif name in ("zero_", "fill_"):
            read = []
        elif function.namespace == "megatron_burst":
            read, changed = _of_ours(function, args)
        reads = sum({_place(t): _touched(t) for t in read}.values())
        self.kernels[name] += 1
        self.bytes[name] += reads + sum(map(_touched, made + changed))
        return result

    def _count(self, storage: Any) -> None:
        before = self.peak
        if storage._cdata not in self._seen:
            self._made[storage._cdata] = _caller(), storage.nbytes()
        super()._count(storage)
        if self.peak > before:
            self.most.clear()
            for made_by, size in self._made.values():
                self.most[made_by] += size

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._made.pop(key, None)


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (value for value in tree_iter(tree) if isinstance(value, Tensor))


def _of_ours(function: Any, args: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return what an operator of the package reads, and writes, by the rule of `operator`."""
    named = {a.name: t for a, t in zip(function._schema.arguments, args, strict=True)}
    if (index := named.get("index")) is not None:
        for name in ("total_BSHD", "total_lse_BHS"):  # these rows alone
            if name in named:
                named[name] = named[name].narrow(name.rindex("S") - name.rindex("B"), 0, len(index))
    changed = [named[a.name] for a in function._schema.arguments if a.alias_info is not None]
    read = [t for name, t in named.items() if isinstance(t, Tensor) and name[:4] != "out_"]
    return read, changed


def _changed(function: Any, args: Any, kwargs: Any) -> Iterable[Tensor]:
    """Return the arguments that the operation says that it writes to."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else (kwargs or {}).get(argument.name)
            yield from _tensors(given)


def _place(t: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return t.untyped_storage()._cdata, int(t.storage_offset()), (*t.shape, *t.stride())


def _touched(t: Tensor) -> int:
    """Return the bytes of its elements; of what is expanded, once."""
    sizes = (size for size, stride in zip(t.shape, t.stride(), strict=True) if stride)
    count = t.element_size()
    for size in sizes:
        count *= size
    return count


def _caller() -> str:
    """Return the file, of the package or the tests, whose line made a tensor; not who counts."""
    frame: Any = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_ours = "megatron_burst" in path.parts or path.stem == "fake_ring"
        if is_ours and path.stem != "live_bytes":
            return path.stem
        frame = frame.f_back
    return "torch"
