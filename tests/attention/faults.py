"""Errors put into attention over ranks for a while, for what is to find them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_burst.attention.sums import Sums
from megatron_burst.plans.choice.head_parallel import HeadGroups
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.transport.comm import Transfers


@contextmanager
def replaced(holder: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(holder, name)
    setattr(holder, name, make(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


def swapped_chunk(original: Callable[..., Layout]) -> Callable[..., Layout]:
    """Rank 1's two chunks in the wrong order."""

    def ring_layout(self: HeadGroups, layout: Layout) -> Layout:
        shards = list(original(self, layout).shards)
        shards[1] = shards[1][::-1]
        return Layout(tuple(shards))

    return ring_layout


def stale_buffer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever arrives is what arrived the time before, if there was one."""

    def land(self: Transfers, number: int) -> Any:
        last: dict[str, Any] = self.__dict__.setdefault("last", {})
        landed = original(self, number)
        for item, block in landed:
            key, new = f"{item.kind} {block[0].shape}", [x.clone() for x in block]
            for x, old in zip(block, last.get(key, block), strict=True):
                x.copy_(old)
            last[key] = new
        return landed

    return land


def lost_gradient(original: Callable[..., None]) -> Callable[..., None]:
    """What comes home from another rank is not added."""

    def take(self: Sums, item: Any, *arrived: Any) -> None:
        if item.owner != self._rank:
            original(self, item, *arrived)

    return take


@contextmanager
def no_fault() -> Iterator[None]:
    yield
