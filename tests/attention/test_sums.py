"""Sums of gradients: exact, in float32, and what arrives is read at once. (fast tier)"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_burst.attention.launches import RowTable, own_parts
from megatron_burst.attention.sums import Sums, WireDtypes
from megatron_burst.plans.schedules.plan import Channel, Item, Kind, Part, Plan, Receive, Step
from megatron_burst.plans.visibility.interval import Interval
from tests.tier import examples

RANK = 1
TOKENS = 6
SHAPE = (2, TOKENS, 3, 4)
OWN, VISITOR = Item(Kind.D_KV, RANK), Item(Kind.D_KV, 0)
ALL_ROWS, SOME_ROWS = Interval(0, TOKENS), Interval(2, 5)


def make_sums(dtype: torch.dtype = torch.float32, wire_dtype: torch.dtype | None = None) -> Sums:
    like, wire = torch.empty(SHAPE, dtype=dtype), WireDtypes(dtype, wire_dtype)
    return Sums(RANK, {Kind.D_QUERY: (like,), Kind.D_KV: (like, like)}, wire)


def partial(rows: Interval, value: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    shape = (SHAPE[0], rows.length, *SHAPE[2:])
    return (torch.full(shape, value, dtype=dtype), torch.full(shape, -value, dtype=dtype))


def hand_on(sums: Sums, item: Item) -> tuple[Tensor, ...]:
    into = tuple(torch.full(form.shape, torch.nan, dtype=form.dtype) for form in sums.forms(item))
    sums.hand_on(item, into)
    return into


def values(total: tuple[Tensor, ...]) -> list[float]:
    """Of each row, given that a row is all one value and the second tensor its negative."""
    first, second = total
    assert torch.equal(first, -second)
    rows = first.transpose(0, 1).flatten(1)
    assert torch.equal(rows.amin(1), rows.amax(1))
    return rows[:, 0].tolist()


def test_a_single_partial_of_all_rows_stays_as_it_came() -> None:
    sums = make_sums(torch.bfloat16)
    block = partial(ALL_ROWS, 3.0, torch.bfloat16)
    sums.add(OWN, ALL_ROWS, block)
    assert sums.total(OWN) is block


@pytest.mark.parametrize("item", [OWN, VISITOR])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_sums_of_bfloat16_are_float32(item: Item, wire_dtype: torch.dtype | None) -> None:
    # 1 + 2^-9 is no bfloat16; nine bits more need a float32 on every way into a sum.
    sums = make_sums(torch.bfloat16, wire_dtype)
    small = 2.0**-9
    sums.take(item, partial(ALL_ROWS, 1.0, wire_dtype or torch.float32), {})
    sums.take(item, partial(ALL_ROWS, small, wire_dtype or torch.float32), {})
    sums.add(item, ALL_ROWS, partial(ALL_ROWS, small, torch.bfloat16))
    sums.add(item, ALL_ROWS, partial(ALL_ROWS, small, torch.bfloat16))
    total = sums.total(item)
    assert values(total) == [1 + 3 * small] * TOKENS
    assert {t.dtype for t in total} == {torch.float32}
    assert {t.dtype for t in hand_on(sums, item)} == {wire_dtype or torch.float32}


def test_what_one_kernel_call_returned_travels_as_it_is_and_is_added_to_the_sum() -> None:
    sums, item = make_sums(torch.bfloat16), VISITOR._replace(kind=Kind.PARTIAL_D_KV)
    block = partial(ALL_ROWS, 3.0, torch.bfloat16)
    sums.add(VISITOR, ALL_ROWS, block)
    sent = hand_on(sums, item)
    assert all(map(torch.equal, sent, block)) and sent[0].dtype == torch.bfloat16
    sums.take(item, sent, {})
    sums.take(item, partial(ALL_ROWS, 2.0**-9, torch.bfloat16), {})
    total = hand_on(sums, VISITOR)
    assert (values(total), total[0].dtype) == ([3 + 2.0**-9] * TOKENS, torch.float32)


@pytest.mark.parametrize(
    ("wire_dtype", "arrives_as"), [(None, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_what_arrives_has_the_shape_of_the_item_and_the_dtype_on_the_wire(
    wire_dtype: torch.dtype | None, arrives_as: torch.dtype
) -> None:
    sums = make_sums(torch.bfloat16, wire_dtype)
    for kind, tensors in ((Kind.D_QUERY, 1), (Kind.D_KV, 2)):
        for sent, dtype in ((kind, arrives_as), (kind.partial, torch.bfloat16)):
            assert sums.forms(Item(sent, 0)) == [(SHAPE, dtype)] * tensors


@pytest.mark.parametrize("part", [(SOME_ROWS,), (Interval(0, 1), Interval(3, 5))], ids=str)
def test_a_part_arrives_at_home_where_it_belongs(part: Part) -> None:
    sums, item = make_sums(), OWN._replace(part=part)
    assert sums.forms(item)[0].shape[1] == 3
    plan = Plan(RANK, (Step((Receive(item, 0, Channel.GRADIENT_WITHIN, 0),)),))
    parts = own_parts([plan], torch.device("cpu"))
    for value in (1.0, 10.0):
        sums.take(item, partial(Interval(0, 3), value), parts)
    its = [any(start <= row < stop for start, stop in part) for row in range(TOKENS)]
    assert values(sums.total(OWN)) == [11 * is_its for is_its in its]


EVENTS = st.tuples(
    st.sampled_from(["add", "add in another order", "take", "hand on"]),
    st.integers(0, 2),  # whose
    st.integers(0, TOKENS - 1),
    st.integers(1, TOKENS),
)


@examples(150)
@given(events=st.lists(EVENTS, max_size=12))
def test_in_any_order_nothing_is_lost_or_counted_twice(
    events: list[tuple[str, int, int, int]],
) -> None:
    """Of three ranks' queries; what has arrived is read at once, for its buffer is free again."""
    sums = make_sums(torch.float64)
    items = [Item(Kind.D_QUERY, owner) for owner in range(3)]
    given_, found = (torch.zeros(3, *SHAPE, dtype=torch.float64) for _ in range(2))
    for what, owner, start, length in events:
        item = items[owner]
        rows = ALL_ROWS if what == "take" else Interval(start, min(start + length, TOKENS))
        block = torch.randn(SHAPE, dtype=torch.float64)[:, rows.as_slice].clone()
        if what == "hand on":
            found[owner] += hand_on(sums, item)[0]
            continue
        given_[owner][:, rows.as_slice] += block
        if what == "add":
            sums.add(item, rows, (block,))
        elif what == "take":
            sums.take(item, (block,), {})
            block.fill_(torch.nan)
        else:
            sums.add(item, RowTable(torch.arange(*rows).flip(0)), (block.flip(1),))
    for item, handed, expected in zip(items, found, given_, strict=True):
        torch.testing.assert_close(handed + sums.total(item)[0], expected, rtol=0, atol=1e-12)
