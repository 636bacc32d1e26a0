"""The relation of a tile against the same mask written out as a matrix of booleans. (fast tier)"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.layout import Interval
from megatron_burst.mask import Mask, Relation
from tests.oracle import visible_pairs

TOKENS = 24
MASKS = {"causal": Mask.causal(), "full": Mask.full()}


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    start = draw(st.integers(0, TOKENS - 1))
    return Interval(start, draw(st.integers(start + 1, TOKENS)))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@given(query=intervals(), key=intervals())
def test_relation_describes_the_submatrix_or_says_that_it_cannot(
    mask: Mask, query: Interval, key: Interval
) -> None:
    visible = visible_pairs(TOKENS, mask.is_causal)[query.rows, key.rows]
    try:
        relation = mask.relation(query, key)
    except ValueError as error:
        # Only a tile that is neither of the three: partly visible, but no causal square.
        assert visible.any() and not visible.all() and query != key
        assert str(query) in str(error) and str(key) in str(error)
        return
    expected = {
        Relation.FULL: torch.ones_like(visible),
        Relation.EMPTY: torch.zeros_like(visible),
        Relation.CAUSAL: torch.ones_like(visible).tril(),
    }
    assert torch.equal(visible, expected[relation])
    if relation is Relation.CAUSAL:
        assert query.length == key.length


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@given(cuts=st.lists(st.integers(1, TOKENS - 1), unique=True, max_size=6))
def test_no_two_intervals_of_a_partition_are_refused(mask: Mask, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), TOKENS]
    parts = [Interval(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    for query in parts:
        for key in parts:
            mask.relation(query, key)


def test_neighbours_under_a_causal_mask() -> None:
    before, after = Interval(0, 4), Interval(4, 8)
    assert Mask.causal().relation(after, before) is Relation.FULL
    assert Mask.causal().relation(before, after) is Relation.EMPTY
    assert Mask.causal().relation(after, after) is Relation.CAUSAL
    assert {Mask.full().relation(q, k) for q in (before, after) for k in (before, after)} == {
        Relation.FULL
    }


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 30])
def test_pairs_counts_the_visible_pairs(mask: Mask, tokens: int) -> None:
    assert mask.pairs(tokens) == int(visible_pairs(tokens, mask.is_causal).sum())
