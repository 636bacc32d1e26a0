"""Compares every call of a context over its ranks, before a message or while it goes on.

Of each call a rank sends 16 bytes, a digest of what it was asked for and of what it chose or why it
could not, in an all-gather on a gloo group of its own. Where the digests differ the ranks tell each
other in words. Over gloo, and for a call that is new to a rank, that is waited for before the first
message. On NCCL, whose host never waits, a call that was met before goes on at once, and is looked
at when the next pass begins.
"""

import datetime
import hashlib
import time
from collections import deque

import torch
import torch.distributed as dist

from megatron_burst.transport.errors import CommunicationError
from megatron_burst.transport.objects import Texts, disagreement

_BYTES = 16  # of a digest
_SOON = 5.0  # seconds for the words of ranks of which some may never come
_LATER = 60.0  # the same of ranks that will, when they come to their next call
_END = "\x1f"  # of what was asked, in a text


class Said:
    """What a rank says of a call; made once a kind of call.

    Args:
        request: what it was asked for.
        outcome: what it will do, or why it cannot.
        has_failed: whether it cannot.
    """

    def __init__(self, request: str, outcome: str, has_failed: bool = False) -> None:
        self.request, self.outcome, self.has_failed = request, outcome, has_failed
        whole = _END.join((request, outcome, str(has_failed)))
        self.digest = hashlib.blake2b(whole.encode(), digest_size=_BYTES).digest()
        self.tensor = torch.frombuffer(bytearray(self.digest), dtype=torch.uint8)

    def text(self, number: int) -> str:
        """Return it in words, for others."""
        # What is long comes last: a text may be cut.
        return _END.join((f"call {number} of {self.request}", "!" * self.has_failed, self.outcome))


class _Exchange:
    """The digests of all ranks, on their way."""

    work: dist.Work
    said: Said
    number: int

    def __init__(self, ranks: int) -> None:
        every = torch.empty(ranks, _BYTES, dtype=torch.uint8, device="cpu")
        self.rows, self._bytes, self._ranks = [list(every)], every.numpy(), ranks

    @property
    def agrees(self) -> bool:
        """Whether all ranks say the same."""
        return self._bytes.tobytes() == self.said.digest * self._ranks


class Agreement:
    """What the ranks of a gloo group, which nobody else uses, say of their calls."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._group, self._seconds = group, timeout_seconds
        self._number = 0  # of calls
        self._pending: deque[_Exchange] = deque()
        self._free: list[_Exchange] = []
        self._failure: Texts | None = None  # what this rank says of its own, and others of theirs
        self._options = dist.distributed_c10d.AllgatherOptions()
        # Longer than ours: what gloo ends closes the connections by which ranks tell why.
        self._options.timeout = datetime.timedelta(seconds=timeout_seconds + 2 * _LATER)
        self._error: Exception | None = None  # the first that was seen too late

    def compare(self, said: Said, *, waits: bool) -> None:
        """Say what this rank does in its next call, and hear the others; see the file's text.

        Raises:
            ValueError: they do or were asked for something else, or cannot.
            CommunicationError: a rank did not come in time, or failed before.
        """
        self.look()
        self._number += 1
        self._post(said)
        if waits:
            seconds = min(_SOON, self._seconds) if said.has_failed else self._seconds
            while self._pending:
                is_last = len(self._pending) == 1
                self._settle(self._pending.popleft(), seconds, is_in_time=is_last)

    def look(self) -> None:
        """Raise what `compare` raises of calls before, as far as it is known by now."""
        if self._error is not None:
            raise self._error
        while self._pending and self._pending[0].work.is_completed():
            self._settle(self._pending.popleft(), self._seconds, is_in_time=False)

    @property
    def is_over(self) -> bool:
        """Whether messages of a call that failed, or of different ones, have gone."""
        return self._error is not None

    def tell(self, failure: str) -> None:
        """Tell the others, whenever they come to compare, that this rank does not go on."""
        text = f"it failed in call {self._number}, {failure}"
        if self._error is None:
            self._post(Said(text, "", True))
            self._error = CommunicationError(
                f"rank {dist.get_rank()}: this context can send nothing since {text}; end all "
                "ranks, or make a new context on all of them"
            )
            self._failure = Texts(self._group, text)

    def hear(self) -> str:
        """Return, after `tell`, in lines what the others say that have failed: first the causes."""
        texts = self._failure.collect(min(_SOON, self._seconds)) if self._failure else {}
        said = [(rank, text or "it says nothing") for rank, text in texts.items()]
        said.sort(key=lambda one: CommunicationError.__name__ in one[1])
        ours = dist.get_rank()
        return "".join(f"\n  rank {r}: {text.split(_END)[0]}" for r, text in said if r != ours)

    @torch.inference_mode(False)  # its tensors are used again outside
    def _post(self, said: Said) -> None:
        new = self._free.pop() if self._free else _Exchange(self._group.size())
        new.said, new.number = said, self._number
        new.work = self._group.allgather(new.rows, [said.tensor], self._options)
        self._pending.append(new)

    def _settle(self, one: _Exchange, seconds: float, *, is_in_time: bool) -> None:
        begun = time.monotonic()
        try:
            one.work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            self._error = self._missing(one, time.monotonic() - begun, error)
            raise self._error from error
        if one.agrees:
            self._free.append(one)
            return
        difference = _difference(self._swapped(one, min(_LATER, self._seconds)))
        if not is_in_time or isinstance(difference, CommunicationError):
            self._error = difference  # messages of that call have gone
        raise difference

    def _swapped(self, one: _Exchange, seconds: float) -> dict[int, str | None]:
        return Texts(self._group, one.said.text(one.number)).collect(seconds)

    def _missing(self, one: _Exchange, seconds: float, why: Exception) -> CommunicationError:
        """Return what says who is not there; `seconds` were waited, less where one is gone."""
        texts = self._swapped(one, min(_SOON, self._seconds))
        who = ", ".join(str(rank) for rank, said in texts.items() if said is None)
        call = one.said.text(one.number).split(_END)[0]
        limit = "is gone" if seconds < self._seconds else f"did not come within {self._seconds:g} s"
        return CommunicationError(
            f"rank {dist.get_rank()}, attention {call}: could not compare it with the other ranks: "
            + (f"rank {who} {limit}" if who else str(why))
        )


def _difference(texts: dict[int, str | None]) -> Exception:
    """Return the error that says how calls differ, the same on all ranks."""
    said = {rank: (texts[rank] or "it says nothing").split(_END) for rank in sorted(texts)}
    requests = {rank: words[0] for rank, words in said.items()}
    if any(len(words) == 1 for words in said.values()):
        listed = "\n".join(f"  rank {rank}: {text}" for rank, text in requests.items())
        return CommunicationError(f"not all context-parallel ranks go on:\n{listed}")
    failures = {rank: f": it cannot: {words[2]}" for rank, words in said.items() if words[1]}
    values = {rank: request + failures.get(rank, "") for rank, request in requests.items()}
    if len(set(requests.values())) > 1:
        what = "what attention is asked for"
    elif failures:
        what = "whether attention is possible"
    else:
        what, values = "how to attend", {rank: words[2] for rank, words in said.items()}
    return ValueError(disagreement(what, values.items()))
