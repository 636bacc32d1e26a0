"""Documents dealt whole: tokens come out even, few are cut. (fast tier)"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_burst.plans.balance.whole_documents import deal_whole
from tests.tier import examples


def stock(lengths: list[int]) -> NDArray[np.int64]:
    """Documents of these lengths, the longest first, as `deal_whole` gets them."""
    tokens = np.array(sorted(lengths, reverse=True), np.int64)
    return np.stack([np.arange(len(tokens)), tokens, tokens + 1, 0 * tokens])


def tokens_of(held: list[NDArray[np.int64]]) -> list[list[int]]:
    return [sorted(some[1].tolist()) for some in held]


def test_each_gets_a_long_one_and_short_ones() -> None:
    held = deal_whole(stock([2, 9, 1, 9, 4, 2, 1, 4]), [16, 16], slack=64, cuts=0)
    assert held and tokens_of(held) == [[1, 2, 4, 9], [1, 2, 4, 9]]


def test_more_room_gets_more() -> None:
    held = deal_whole(stock([8, 8, 8]), [8, 16], slack=64, cuts=0)
    assert held and tokens_of(held) == [[8], [8, 8]]


def test_one_with_more_work_than_its_own_is_shared_evenly() -> None:
    held = deal_whole(stock([16, 4, 4, 4, 4]), [16, 16], slack=64, cuts=1)
    assert held and tokens_of(held) == [[4, 4, 8], [4, 4, 8]]


@pytest.mark.parametrize(("is_even", "shares"), [(True, [60, 60]), (False, [63, 57])])
def test_of_two_one_takes_half_or_what_it_can(is_even: bool, shares: list[int]) -> None:
    items = stock([120, 90, *[1] * 90])
    held = deal_whole(items, [100] * 3, slack=64, cuts=1, is_even=is_even)
    assert held
    assert [tokens for some in held for item, tokens in some[:2].T.tolist() if item == 0] == shares


@pytest.mark.parametrize("cuts", [0, 1])
def test_none_where_too_many_would_be_cut(cuts: int) -> None:
    """Three documents on two ranks: one is cut."""
    assert (deal_whole(stock([8, 8, 8]), [12, 12], slack=64, cuts=cuts) is None) is (cuts == 0)


@examples(200)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60),
    ranks=st.integers(2, 8),
    slack=st.sampled_from([8, 64]),
    is_even=st.booleans(),
)
def test_nothing_is_lost_and_tokens_are_even(
    lengths: list[int], ranks: int, slack: int, is_even: bool
) -> None:
    items = stock([*lengths, -sum(lengths) % ranks + ranks])
    room = [int(items[1].sum()) // ranks] * ranks
    if held := deal_whole(items, room, slack, cuts=4, is_even=is_even):
        assert [int(some[1].sum()) for some in held] == room
        whole = Counter[int]()
        for some in held:
            assert len(set(some[0].tolist())) == some.shape[1]
            assert (items[2, some[0]] == some[2]).all()
            whole.update(dict(zip(*some[:2].tolist(), strict=True)))
        assert whole == Counter(dict(enumerate(items[1].tolist())))
