"""What `ring_attention` promises about memory, in live bytes. (fast tier; 32 ranks slow)"""

import pytest

from megatron_burst import Mask
from megatron_burst.plans.plan import Kind
from tests.fake_ring import peaks

# By grid and backward ring, in multiples of q: the numbers of the docstring.
PROMISED = {
    (8, 1, "kv"): (8.1, 20.6),
    (8, 1, "query"): (8.1, 18.2),
    (32, 1, "kv"): (8.1, 20.6),
    (32, 1, "query"): (8.1, 18.2),
    (8, 2, "kv"): (11.2, 38.6),
    (8, 2, "query"): (11.2, 29.2),
    (32, 4, "kv"): (11.2, 38.6),
    (32, 4, "query"): (11.2, 29.2),
}
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] > 8)) for case in PROMISED]
TOKENS = 1024  # of a rank


@pytest.mark.parametrize(("ranks", "nodes", "ring"), CASES)
def test_a_ring_holds_what_its_docstring_says(ranks: int, nodes: int, ring: str) -> None:
    found = peaks(ranks, nodes, ring, Mask.causal(), tokens=TOKENS)
    forward, backward = PROMISED[ranks, nodes, ring]
    assert found.forward <= forward and found.backward <= backward
    if ranks == 32:  # the numbers are no more than they need be
        assert found.forward > forward - 0.15 and found.backward > backward - 0.15


@pytest.mark.parametrize(
    ("ranks", "nodes"), [(8, 1), (8, 2), pytest.param(32, 4, marks=pytest.mark.slow)]
)
def test_under_documents_it_holds_no_more(ranks: int, nodes: int) -> None:
    """Blocks of many lengths arrive one after the other in the same buffers."""
    tokens = TOKENS * ranks
    mask = Mask.causal(documents=(0, tokens // 8 + 100, tokens // 2 + 300, tokens))
    found = peaks(ranks, nodes, "kv", mask, tokens=TOKENS)
    lengths = {r.item.part and r.item.part.length for r in found.call.forward_plan.receives}
    assert len(lengths) > 2, "the case is of many lengths"
    forward, backward = PROMISED[ranks, nodes, "kv"]
    assert found.forward <= forward and found.backward <= backward


def test_a_direct_exchange_holds_the_rows_that_its_rank_needs() -> None:
    mask = Mask.causal(documents=tuple(range(0, 8 * TOKENS + 1, 2 * TOKENS)))
    found = peaks(8, 1, "kv", mask, tokens=TOKENS)
    items = [receive.item for receive in found.call.forward_plan.receives]
    assert items and all(item.kind is Kind.KV and item.part for item in items)
    needed = sum(item.part.length for item in items if item.part) / TOKENS
    assert found.forward <= 4.1 + 2 * needed
