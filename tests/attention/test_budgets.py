"""What a rank does beside its attention kernels, as docs/budgets.md says. (few fast, all slow)"""

from typing import Any

import budgets  # noqa: E402
import pages  # noqa: E402
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from megatron_burst import Mask
from megatron_burst.kernels import KernelInput
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.tools.one_rank import EmptyKernel
from tests.counting import Counting, HostRead
from tests.fake_ring import check_order, count
from tests.tier import slow_if

ROWS = pages.read_csv(budgets.PAGE)
FAST = {"kv of 2 causal", "kv / 2 causal", "mesh causal", "kv window", "query documents"}
# By nodes and ring, of as many kv heads as query heads, causal: the largest are the numbers of
# `ring_attention`, as those under other masks are, where all goes straight to who needs it.
PROMISED = {
    (1, "kv"): (7.03, 18.0),
    (1, "query"): (7.03, 17.08),
    (2, "kv"): (9.03, 24.0),
    (2, "query"): (9.03, 22.65),
    (4, "kv"): (9.03, 32.0),
    (4, "query"): (9.03, 27.15),
}
SPARSE = {"kv": (17.02, 32.5), "query": (17.02, 25.23)}


def numbered() -> list[object]:
    """The rows by number; slow but for some on one node."""

    def is_fast(case: budgets.Case) -> bool:
        return case.ranks == 8 and case.heads == "4:4" and f"{case.ring} {case.mask}" in FAST

    return [
        pytest.param(n, id="-".join(map(str, case)), marks=[pytest.mark.slow] * (not is_fast(case)))
        for n, case in enumerate(budgets.cases())
    ]


@pytest.mark.parametrize("number", numbered())
def test_a_rank_does_no_more_than_the_page_says(number: int) -> None:
    case, said = budgets.cases()[number], ROWS[number]
    found = budgets.row(case, budgets.counted(case))
    for name, value in found.items():
        if name in case._fields:
            assert value == said[name]
        elif not name.endswith("at_the_peak"):
            assert float(value) <= float(said[name]) + 0.01, (name, "run scripts/docs/budgets.py")


def test_the_page_is_made_of_the_table() -> None:
    page = budgets.PAGE.read_text()
    assert pages.filled(page, budgets.parts(ROWS)) == page


def test_the_table_keeps_what_the_docstring_promises() -> None:
    for row in ROWS:
        if row["heads"] == "4:4" and row["ring"] in ("kv", "query"):
            forward, backward = SPARSE[row["ring"]]
            if row["mask"] == "causal":
                forward, backward = PROMISED[int(row["nodes"]), row["ring"]]
            assert float(row["forward_peak"]) <= forward
            assert float(row["backward_peak"]) <= backward


def test_heads_in_chunks_keep_to_24_q_between_nodes() -> None:
    peaks = {r["ring"]: float(r["backward_peak"]) for r in ROWS if r["nodes"] == "4"}
    assert peaks["kv / 4"] < peaks["kv / 2"] <= 24 and peaks["query / 2"] <= 20


@pytest.mark.parametrize("ring", slow_if({"query"}, ["kv", "query", "mesh"]))
def test_all_ranks_post_their_messages_in_an_order_that_gets_through(ring: str) -> None:
    case = budgets.Case(4, 2 if ring != "mesh" else 1, "4:4", ring, "causal")
    batches = [budgets.counted(case, rank).batches for rank in range(4)]
    assert all(batches)
    check_order(batches)
    for wrong in (batches[1][::-1], batches[1][:-1]):
        with pytest.raises(AssertionError, match="nobody can go on"):
            check_order([batches[0], wrong, *batches[2:]])


class Impolite(EmptyKernel):
    """Makes the host wait."""

    def __init__(self, way: str) -> None:
        self.way = way

    def forward(self, tile: KernelInput) -> Any:
        if self.way == "item":
            tile.q.sum().item()
        elif self.way == "nonzero":
            tile.q.nonzero()
        else:
            tile.q.cpu()
        return super().forward(tile)


@pytest.mark.parametrize("way", ["item", "nonzero", "copy"])
def test_a_read_by_the_host_is_noticed(way: str) -> None:
    errors = HostRead, DataDependentOutputException, DynamicOutputShapeException
    with pytest.raises(errors):
        count(2, 1, "kv", Mask.causal(), kernel=Impolite(way))


@torch.library.custom_op("burst_tests::scaled", mutates_args=("total",))
def scaled(total: Tensor, x: Tensor, factor: float) -> None:
    total.add_(x, alpha=factor)


def test_kernels_and_bytes_by_hand() -> None:
    total, x = torch.zeros(6, 8), torch.ones(3, 8)
    with Counting((total, x)) as counting:
        total[:3] += x  # the copy of a slice to itself does nothing
        scaled(total[3:], x, 2.0)
        wide = x.to(torch.float64)
        x.expand(4, 3, 8).sum(0)
        x.view(8, 3).transpose(0, 1)
        torch.empty_like(x)
    assert counting.kernels == {"add_": 1, "scaled": 1, "_to_copy": 1, "sum": 1}
    of_x = x.nbytes
    assert counting.bytes == {
        "add_": 3 * of_x,
        "scaled": 3 * of_x,
        "_to_copy": 3 * of_x,
        "sum": 2 * of_x,
    }
    assert counting.now == wide.nbytes and counting.peak == wide.nbytes + 1 * of_x


@pytest.mark.parametrize("nodes", [1, 2])
def test_blocks_of_many_lengths_arrive_in_the_same_buffers(nodes: int) -> None:
    tokens = budgets.TOKENS * 8
    mask = Mask.causal(documents=(0, tokens // 8 + 100, tokens // 2 + 300, tokens))
    found = count(8, nodes, "kv", mask, memory_limit=0)  # a ring: it is held to none
    lengths = {r.item.packed for r in found.call.forward_plan.receives}
    assert len(lengths) > 2, "the case is of many lengths"
    assert (
        found.forward.peak <= PROMISED[nodes, "kv"][0]
        and found.backward.peak <= (36.5, 19.5)[nodes - 1]
    )


def test_a_direct_exchange_holds_the_rows_that_its_rank_needs() -> None:
    tokens = budgets.TOKENS
    found = count(8, 1, "kv", Mask.causal(documents=tuple(range(0, 8 * tokens + 1, 2 * tokens))))
    items = [receive.item for receive in found.call.forward_plan.receives]
    assert items and all(item.kind is Kind.KV and item.part for item in items)
    items += [send.item for send in found.call.forward_plan.sends]  # copied to be one message
    needed = sum(item.packed.length for item in items if item.packed) / tokens
    assert found.forward.peak <= 3.1 + 2 * needed
