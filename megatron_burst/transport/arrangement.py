"""Where what lies in memory for some steps of a pass has its place: at one time each its own."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNIT = 256  # bytes, of which a place is a multiple


class Stay(NamedTuple):
    """So many bytes that are needed from the begin of a step to the end of another."""

    begin: int
    end: int
    size: int


def arrange(stays: Sequence[Stay]) -> tuple[list[int], int]:
    """Return where each stay begins, and the bytes of all.

    The largest first, each in the first gap that fits between those of its time.
    """
    places, order = [0] * len(stays), sorted(stays, key=lambda stay: (-stay.size, stay.begin))
    numbers = sorted(range(len(stays)), key=lambda n: (-stays[n].size, stays[n].begin))
    begins, ends = (np.array([stay[i] for stay in order], np.int64) for i in (0, 1))
    starts, stops = (np.zeros(len(stays), np.int64) for _ in range(2))
    for done, stay in enumerate(order):
        meanwhile = (begins[:done] <= stay.end) & (ends[:done] >= stay.begin)
        taken = sorted(zip(starts[:done][meanwhile], stops[:done][meanwhile], strict=True))
        place = 0
        for start, stop in taken:
            if place + stay.size <= start:
                break
            place = max(place, int(stop))
        starts[done], stops[done] = place, place - (-stay.size // UNIT) * UNIT
        places[numbers[done]] = place
    return places, int(stops.max(initial=0))
