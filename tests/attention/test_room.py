"""Tiles leave room to messages that are on their way and long. (fast tier)"""

from typing import Any

import pytest

from megatron_burst import Mask
from megatron_burst.kernels import KernelInput
from megatron_burst.tools.one_rank import EmptyKernel
from tests.fake_ring import count


class Noting(EmptyKernel):
    """Notes of every forward whether it leaves room."""

    def __init__(self) -> None:
        self.noted: list[bool] = []

    def forward(self, tile: KernelInput) -> Any:
        self.noted.append(tile.leaves_room)
        return super().forward(tile)


@pytest.mark.parametrize(
    ("tokens", "nodes", "leave_room"),
    # The messages' time over that of the tiles is 4.4, 0.27 and 0.02.
    [(2048, 4, True), (16 * 2048, 4, True), (128 * 1024, 1, False)],
)
def test_tiles_leave_room_where_messages_are_long_and_on_their_way(
    tokens: int, nodes: int, leave_room: bool
) -> None:
    kernel = Noting()
    call = count(8, nodes, "kv", Mask.causal(), tokens=tokens, kernel=kernel).call
    assert call.leaves_room is leave_room
    steps = [len(calls) for calls in call.forward_launches]
    assert len(kernel.noted) == sum(steps)
    last = steps[-1]  # nothing is on its way any more
    assert kernel.noted == [leave_room] * sum(steps[:-1]) + [False] * last
