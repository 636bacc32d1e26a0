"""How much the host does in a hop, as calls of functions: the same on every machine. (fast tier)

Seconds: scripts/bench/host_time.py.
"""

import sys
from collections.abc import Callable
from typing import Any

import host_time
import pytest
import torch


def calls(run: Callable[[], object]) -> int:
    """Count calls, of Python and C functions, after two runs that find what is kept."""
    run(), run()
    counted = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


MOST = 230, 460  # forward and backward: half of what it was when every call named its messages


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("ring", ["kv", "query"])
def test_a_hop_takes_few_calls(ranks: int, ring: str) -> None:
    with host_time.one_rank(ranks, ring) as one, torch.no_grad():
        forward, backward = (calls(way) / (ranks - 1) for way in (one.forward, one.backward))
    assert forward < MOST[0] and backward < MOST[1], "see docs/design/rings.md"


@pytest.mark.parametrize("ring", ["kv", "query"])
def test_nothing_that_outlives_a_pass_lies_in_the_memory_of_messages(ring: str) -> None:
    with host_time.one_rank(8, ring) as one, torch.no_grad():
        found = [*one.forward(), *one.backward(), *one.tensors]
        rooms = [*one.call.communicator.memory._rooms.values()]
    lent = {room.piece.untyped_storage()._cdata for room in rooms}
    assert len(lent) == 2
    assert lent.isdisjoint(t.untyped_storage()._cdata for t in found if t is not None)
