"""Calls of a step under documents and block masks, on fake CUDA tensors. (fast tier)"""

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst import Mask
from megatron_burst.attention.launches import RowTable
from megatron_burst.attention.sums import PartialOutputs
from megatron_burst.kernels import KERNELS, Kernel, KernelInput
from megatron_burst.plans.balance.balanced import balanced
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.plans.visibility.layout import Layout, segmented_zigzag, zigzag
from megatron_burst.tools.one_rank import EmptyKernel
from tests.fake_ring import count
from tests.plans.simulator import tiles_of
from tests.tier import slow_if

RINGS: dict[str, dict[str, Any]] = {
    "kv": {"nodes": 1, "backward_ring": "kv"},
    "query": {"nodes": 1, "backward_ring": "query"},
    "double": {"nodes": 4, "backward_ring": "kv"},
    "mesh": {"nodes": 4, "backward_ring": "query", "topology": "mesh"},
}
LAYOUTS: dict[str, Callable[[int, int, Mask], Layout]] = {
    "zigzag": lambda tokens, ranks, _: zigzag(tokens, ranks),
    "balanced": lambda tokens, ranks, mask: balanced(mask, tokens, [0] * ranks).layout,
    "16 segments": lambda tokens, ranks, _: segmented_zigzag([tokens // 16] * 16, ranks),
}
DIRECT = [*product(["direct kv"], LAYOUTS), ("direct query", "16 segments")]


class Counted:
    """A kernel whose calls are counted."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.calls = kernel, Counter[str]()

    def forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        self.calls["forward"] += 1
        return self.kernel.forward(tile)

    def backward(self, tile: KernelInput, *finished: Tensor) -> Any:
        self.calls["backward"] += 1
        gradients = self.kernel.backward(tile, *finished)
        assert [x.shape for x in gradients] == [x.shape for x in tile.qkv]
        return gradients


def thousand_documents(tokens: int) -> Mask:
    cuts = random.Random(0).sample(range(1, tokens), 999)
    return Mask.causal(documents=(0, *sorted(cuts), tokens))


PLACES = [*product(RINGS, ["zigzag"]), *DIRECT]
EVERY = [*product([8, 64], PLACES)]
OF_MANY = (("direct kv", "balanced"),)  # that 64 ranks try in the fast tier


@pytest.mark.parametrize(
    "case", slow_if({*product([64], PLACES)} - {*product([64], OF_MANY)}, EVERY), ids=str
)
def test_a_step_of_a_thousand_documents_takes_few_calls(
    case: tuple[int, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, (ring, layout) = case
    is_direct, way = ring.startswith("direct"), ring.removeprefix("direct ")
    monkeypatch.setattr(Direct, "worth", math.inf if is_direct else 0.0)
    monkeypatch.setattr(Direct, "worth_in_all", 0.0)
    kernel = Counted(KERNELS["aten_flash"] if way == "kv" else EmptyKernel())
    mask = thousand_documents(1024 * ranks)
    made = LAYOUTS[layout](1024 * ranks, ranks, mask)
    call = count(ranks=ranks, mask=mask, kernel=kernel, layout=made, **RINGS[way]).call
    forward, backward = (
        [*map(len, calls)] for calls in (call.forward_launches, call.backward_launches)
    )
    assert max(forward) <= 2 and max(backward) <= 3
    assert kernel.calls == {"forward": sum(forward), "backward": sum(backward)}
    tiles = max(len(tiles_of(step)) for step in call.forward_plan.steps)
    assert tiles > 1000 // ranks - 10, "the case is of many tiles"
    sent = {(send.peer, send.item.kind) for send in call.backward_plan.sends}
    if is_direct:
        assert not any(step.receives for step in call.forward_plan.steps[1:])
        assert len(sent) == len(call.backward_plan.sends), "one message for a pair of ranks"


def test_rows_of_a_table_are_merged_like_slices() -> None:
    generator = torch.Generator().manual_seed(0)
    q, rows = torch.empty(2, 9, 4, 8), torch.tensor([7, 0, 3, 4])
    item = Item(Kind.OUTPUT, 0)
    by_table, by_slices = PartialOutputs(0, q, 8), PartialOutputs(0, q, 8)
    for _ in range(2):
        out = torch.randn(2, 4, 4, 8, generator=generator)
        lse = torch.randn(2, 4, 4, generator=generator)
        by_table.add(item, RowTable(rows), (out, lse))
        for i, row in enumerate(rows.tolist()):
            some = out[:, i : i + 1], lse[:, :, i : i + 1]
            by_slices.add(item, Interval(row, row + 1), some)
    torch.testing.assert_close(by_table.finish(), by_slices.finish())
    assert by_table.finish()[1].isneginf().sum() == 2 * 4 * 5
