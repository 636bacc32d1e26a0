"""Rows of a tensor that follow each other."""

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """Rows of a tensor, from `start` up to but without `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    @property
    def as_slice(self) -> slice:
        """The slice that selects these rows."""
        return slice(self.start, self.stop)

    def shifted(self, by: int) -> "Interval":
        """Return as many rows, that many further on."""
        return Interval(self.start + by, self.stop + by)


def union_of(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals as disjoint ones that do not touch, in order."""
    union: list[Interval] = []
    for interval in sorted(intervals):
        if union and interval.start <= union[-1].stop:
            last = union.pop()
            interval = Interval(last.start, max(last.stop, interval.stop))
        union.append(interval)
    return union
