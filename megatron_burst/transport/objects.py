"""What ranks tell each other in Python objects and texts, each a collective call of a group."""

import datetime
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron_burst.transport.backend import is_by_gloo
from megatron_burst.transport.errors import named_errors

_LONGEST = 4096  # bytes of a text
_TAG = 1  # of texts; all else on these groups is a collective


def check_agreement(
    group: dist.ProcessGroup, what: str, value: str, timeout_seconds: float
) -> None:
    """Compare `value` over the ranks of `group`, a collective call; ValueError if they differ."""
    purpose = f"compare {what} with the other ranks"
    values = gather_objects(group, purpose, value, timeout_seconds)
    if len(set(values)) > 1:
        ranks = dist.get_process_group_ranks(group)
        raise ValueError(disagreement(what, zip(ranks, values, strict=True)))


def disagreement(what: str, values: Iterable[tuple[int, str]]) -> str:
    """Say that ranks disagree, with what each of them has."""
    listed = "\n".join(f"  rank {rank}: {value}" for rank, value in values)
    return f"the context-parallel ranks disagree on {what}:\n{listed}"


def gather_objects[T](
    group: dist.ProcessGroup, purpose: str, value: T, timeout_seconds: float
) -> list[T]:
    """Return the values of all ranks of `group`, a collective call; errors name its purpose.

    The time limit is gloo's; on NCCL it is the group's own.
    """
    values: list[T] = [value] * group.size()
    with named_errors("at the start", purpose):
        if is_by_gloo(group, "cpu"):
            texts = Texts(group, "").collect(timeout_seconds)
            if missing := [str(rank) for rank, text in texts.items() if text is None]:
                who = f"rank {', '.join(missing)}"
                raise RuntimeError(f"{who} did not come within {timeout_seconds:g} s")
        dist.all_gather_object(values, value, group=group)
    return values


def of_first_rank[T](
    group: dist.ProcessGroup, purpose: str, make: Callable[[], T], timeout_seconds: float
) -> T:
    """Return what `make` returns on the first rank of `group`, a collective call.

    Raises:
        ValueError: it raised an error there; all ranks raise it.
    """
    made: tuple[T | None, str] = None, ""
    cause: Exception | None = None
    if group.rank() == 0:
        try:
            made = make(), ""
        except Exception as error:
            made, cause = (None, f"{type(error).__name__}: {error}"), error
    value, failure = gather_objects(group, purpose, made, timeout_seconds)[0]
    if failure:
        first = dist.get_process_group_ranks(group)[0]
        raise ValueError(f"could not {purpose}: rank {first} raised {failure}") from cause
    return value  # type: ignore[return-value] # of what `make` returned, be it None


class Texts:
    """Sends every other rank of a gloo group a text and receives its; goes on in the background.

    Not by `monitored_barrier`, in which all others wait for the first rank without a limit.
    """

    def __init__(self, group: dist.ProcessGroup, text: str) -> None:
        self._text, self._rank = text, dist.get_rank()
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != self._rank]
        data = bytearray(text.encode()[:_LONGEST].ljust(_LONGEST, b"\0"))
        mine = torch.frombuffer(data, dtype=torch.uint8)
        self._buffers = {rank: torch.empty_like(mine) for rank in others}
        self._sends = [_posted(dist.isend, mine, rank, group) for rank in others]
        self._receives = [_posted(dist.irecv, self._buffers[r], r, group) for r in others]

    def collect(self, timeout_seconds: float) -> dict[int, str | None]:
        """Return by the job's numbers what each rank says, None of those that do not in time."""
        end = time.monotonic() + timeout_seconds
        texts: dict[int, str | None] = {self._rank: self._text}
        for (rank, x), work in zip(self._buffers.items(), self._receives, strict=True):
            said = x.numpy().tobytes if _is_through(work, end) else None
            texts[rank] = said and said().rstrip(b"\0").decode(errors="replace")
        if None not in texts.values():
            for work in self._sends:
                _is_through(work, end)
        return texts


def _posted(way: Callable[..., Any], *arguments: Any) -> dist.Work | None:
    """Return what is under way, None where the other rank is gone."""
    try:
        work: dist.Work = way(*arguments, _TAG)
    except RuntimeError:
        return None
    return work


def _is_through(work: dist.Work | None, end: float) -> bool:
    left = max(end - time.monotonic(), 0.001)  # gloo takes 0 for no limit
    try:
        return work is not None and work.wait(datetime.timedelta(seconds=left))
    except RuntimeError:  # after the first one gloo ends all that has not arrived
        return False
