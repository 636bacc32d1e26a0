"""Which tokens each rank holds: zigzag and contiguous, shard and unshard. (fast tier)"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst import BurstConfig
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.plans.visibility.layout import (
    Layout,
    contiguous,
    segmented_zigzag,
    striped,
    zigzag,
)
from tests.tier import examples

MAKERS = {
    "zigzag": zigzag,
    "segmented zigzag": lambda tokens, ranks: segmented_zigzag([tokens // 2] * 2, ranks),
    "contiguous": contiguous,
    "striped": striped,
}
SEGMENTED = BurstConfig(layout="segmented-zigzag")


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        (zigzag(16, 4), [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        (segmented_zigzag([8, 4], 2), [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
        (striped(6, 2), [[0, 2, 4], [1, 3, 5]]),
        (contiguous(9, 3), [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ],
    ids=["zigzag", "segmented zigzag", "striped", "contiguous"],
)
def test_who_holds_which_positions(layout: Layout, held: list[list[int]]) -> None:
    assert [layout.positions(rank).tolist() for rank in range(layout.ranks)] == held
    assert (layout.ranks, layout.local_tokens) == (len(held), len(held[0]))


@pytest.mark.parametrize(("local", "count"), [(8192, 8), (4096, 4), (2048, 2), (16, 2), (12288, 8)])
def test_as_many_segments_as_leave_a_chunk_512_rows(local: int, count: int) -> None:
    assert make_layout(SEGMENTED, 4 * local, 4) == segmented_zigzag([4 * local // count] * count, 4)
    with pytest.raises(ValueError, match="2 segments, each divisible by 2 x 4 ranks = 8"):
        make_layout(SEGMENTED, 4 * 8 + 4, 4)


def test_a_rank_alone_holds_any_number() -> None:
    assert zigzag(33, 1) == segmented_zigzag([20, 13], 1) == Layout(((range(33),),))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_one_rank_holds_everything_in_one_interval(make: Callable[[int, int], Layout]) -> None:
    assert make(8, 1).shards == ((range(8),),)


def test_local_rows_follow_each_other_in_the_order_of_the_intervals() -> None:
    assert zigzag(24, 4).local_rows(1) == (Interval(0, 3), Interval(3, 6))
    assert Layout(((range(4, 5), range(3)),)).local_rows(0) == (Interval(0, 1), Interval(1, 4))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@examples(60)
@given(ranks=st.integers(1, 12), chunk=st.integers(1, 7), dim=st.integers(0, 2), data=st.data())
def test_shards_are_the_rows_at_the_positions_and_join_to_the_whole(
    make: Callable[[int, int], Layout], ranks: int, chunk: int, dim: int, data: st.DataObject
) -> None:
    tokens = 4 * ranks * chunk
    layout = make(tokens, ranks)
    shape = [data.draw(st.integers(1, 3)) for _ in range(3)]
    shape[dim] = tokens
    x = torch.randn(shape)
    shards = [layout.shard(x, rank, dim) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, x.index_select(dim, layout.positions(rank)))
        assert shard.shape[dim] == layout.local_tokens == tokens // ranks
    assert torch.equal(layout.unshard(shards, dim), x)
    everything = torch.cat([layout.positions(rank) for rank in range(ranks)])
    assert everything.sort().values.tolist() == list(range(tokens))


@pytest.mark.parametrize(
    ("make", "tokens", "ranks", "message"),
    [
        (zigzag, 12, 4, r"2 x 4 ranks = 8, got 12 tokens; change --seq-length or --context-paral"),
        (zigzag, 7, 2, r"2 x 2 ranks = 4, got 7 tokens"),
        (zigzag, 0, 2, r"got 0 tokens"),
        (contiguous, 7, 2, r"7 tokens divisible by 2 ranks"),
        (contiguous, 0, 2, r"0 tokens divisible by 2 ranks"),
        (striped, 7, 2, r"striped needs 7 tokens divisible by 2 ranks"),
        (MAKERS["segmented zigzag"], 8, 4, r"2 segments, each divisible by 2 x 4 ranks = 8, got 4"),
        (partial(make_layout, SEGMENTED), 9, 2, r"2 x 2 ranks = 4, got 9 tokens"),
    ],
)
def test_a_sequence_that_does_not_divide_is_refused_with_its_numbers(
    make: Callable[[int, int], Layout], tokens: int, ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tokens, ranks)


@pytest.mark.parametrize(
    "shards",
    [
        ((range(4),), (range(2, 6),)),
        ((range(4),), (range(4, 6),)),
        ((range(4),), (range(6, 10),)),
        ((range(2), range(4, 8, 2)), (range(2, 4), range(5, 8, 2))),
        ((range(3, -1, -1),), (range(7, 3, -1),)),
    ],
    ids=["twice", "unequal", "beyond the end", "two steps", "backwards"],
)
def test_a_layout_that_is_none_is_refused(shards: tuple[tuple[range, ...], ...]) -> None:
    with pytest.raises(ValueError, match="each token to one rank, .* begin with .range"):
        Layout(shards).check()


def test_a_tensor_of_another_length_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"expected 8 tokens along dim 1, got \(8, 6\)"):
        zigzag(8, 2).shard(torch.zeros(8, 6), 0, dim=1)
