"""Calls that run twice, the second time for the early rows alone. (fast tier)"""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron_burst import BurstConfig, Mask, ring_attention
from megatron_burst.attention.saved import AttentionMemory
from megatron_burst.kernels import KernelInput
from megatron_burst.kernels.cpu import CpuKernel
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.choice.planning import choose
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, flat_grid
from megatron_burst.plans.visibility.layout import (
    Layout,
    boundary,
    contiguous,
    first_saved_row,
    in_order,
    segmented_zigzag,
    striped,
    zigzag,
)
from tests.attention.cases import choice_of
from tests.plans.masks import LAYOUTS, Masking
from tests.plans.simulator import bytes_sent, tiles_of
from tests.tier import examples, one_in
from tests.workers import Team, WorkerPool

FRACTIONS = (0.0, 0.25, 0.5, 0.6, 1.0)
HEADS, KV_HEADS, DIM, LOCAL = 4, 2, 6, 12
MASKINGS = {
    "causal": Masking(),
    "window": Masking(window=7),
    "documents": Masking(documents=(0, 5, 29, 30)),
    "full": Masking(False),
}


def masking_of(name: str, tokens: int) -> Masking:
    masking = MASKINGS[name]
    if masking.documents is None:
        return masking
    bounds = (*(b for b in masking.documents if b < tokens), tokens)
    return replace(masking, documents=bounds)


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, tokens, h, DIM, generator=generator).to(dtype) for h in heads]


def twice(
    team: Team, config: dict[str, Any], masking: str, fraction: float, sink: bool = False
) -> dict[str, Any]:
    """Run a call once as usual and once in two passes; return how far apart they are."""
    context = team.context(BurstConfig(**config))
    tokens = LOCAL * context.ranks
    q, k, v, dout = (context.shard(x, dim=1) for x in inputs(tokens))
    options: dict[str, Any] = {"mask": masking_of(masking, tokens).mask, "return_lse": True}
    offset = torch.linspace(-1, 1, HEADS).requires_grad_() if sink else None

    def gradients(memory: AttentionMemory | None) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = ring_attention(*leaves, context, memory=memory, sink=offset, **options)
        wanted = [*leaves, offset] if offset is not None else leaves
        return [out, lse, *torch.autograd.grad(out, wanted, dout)]

    expected = gradients(None)
    memory = AttentionMemory(fraction)
    with torch.no_grad():
        ring_attention(q, k, v, context, memory=memory, sink=offset, **options)
    kept = memory.saved
    assert kept is not None
    before, bytes_before = Counter(calls), context.bytes_sent
    found = gradients(memory)
    sent = context.bytes_sent - bytes_before
    assert memory.saved is None
    return {
        "bit equal": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "apart": max(
            ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).nan_to_num(torch.inf).item()
            for a, b in zip(found, expected, strict=True)
            if not b.isinf().any()
        ),
        "kept": sum(x.nbytes for x in kept.tensors),
        "sent": sent,
        "pairs": calls["pairs"] - before["pairs"],
    }


calls: Counter[str] = Counter()


def counted(team: Team, *arguments: Any) -> dict[str, Any]:
    """`twice`, with the pairs that forward kernel calls compute counted."""
    forward = CpuKernel._forward  # of one tile

    def counting(self: CpuKernel, tile: KernelInput) -> Any:
        calls["pairs"] += tile.band.pairs(tile.q.shape[1], tile.k.shape[1])
        return forward(self, tile)

    CpuKernel._forward = counting  # type: ignore[method-assign]
    try:
        return twice(team, *arguments)
    finally:
        CpuKernel._forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("backward", "masking", "fraction"),
    one_in(17, itertools.product(("query", "kv"), MASKINGS, FRACTIONS)),
)
def test_two_passes_equal_one(
    workers: WorkerPool, backward: str, masking: str, fraction: float
) -> None:
    for ranks, more in (
        (1, {}),
        (2, {}),
        (4, {"topology": "flat"}),
        (4, {"topology": "double", "ranks_per_node": 2}),
        (4, {"layout": "segmented-zigzag"}),
        (4, {"head_parallel_size": 2}),
    ):
        config = {"backward": backward, **more}
        for reply in workers.run(ranks, twice, config, masking, fraction, ranks == 2):
            assert reply["apart"] < 2e-6, (config, reply)
            if fraction in (0.0, 1.0):  # the same kernels on the same rows
                assert reply["bit equal"], (config, reply)


GRIDS = [flat_grid(4), Grid(((0, 1), (2, 3)))]


@pytest.mark.parametrize(
    ("fraction", "grid", "masking"),
    one_in(4, itertools.product(FRACTIONS, GRIDS, ("causal", "window", "documents"))),
    ids=str,
)
def test_what_runs_again_and_what_is_kept_is_the_policys(
    workers: WorkerPool, fraction: float, grid: Grid, masking: str
) -> None:
    place = {"topology": "flat"} if grid.nodes == 1 else {"topology": "double", "ranks_per_node": 2}
    config = BurstConfig(**place)
    tokens, shape = 4 * LOCAL, Shape(LOCAL, HEADS, KV_HEADS, DIM, DIM, 4, 4)
    layout, mask = make_layout(config, tokens, 4), masking_of(masking, tokens).mask
    stop = boundary(layout, fraction)
    early, whole = (
        choice_of(config, Tiling(layout, m), shape)
        for m in (replace(mask, query_stop=stop) if stop < tokens else mask, mask)
    )
    replies = workers.run(4, counted, place, masking, fraction)
    for rank, reply in enumerate(replies):
        again, backward = early.plans(rank)[0], whole.plans(rank)[1]
        assert reply["pairs"] == sum(tile.pairs for tile in tiles_of(again))
        sent = bytes_sent(again, shape.item_bytes(backward=False), LOCAL)
        assert reply["sent"] == sent + bytes_sent(backward, shape.item_bytes(), LOCAL)
        rows = LOCAL - first_saved_row(layout, rank, stop)
        assert reply["kept"] == rows * HEADS * (DIM + 1) * 4
    if fraction == 0.0:
        assert not any(early.plans(rank)[0].sends for rank in range(4))


def test_half_of_a_causal_sequence_is_a_quarter_of_the_work_and_half_of_the_bytes() -> None:
    layout, shape = zigzag(8 * 64, 4), Shape(128, 4, 4, 8, 8, 2, 4)

    def plans(mask: Mask) -> list[Any]:
        choice = choose(BurstConfig(), Tiling(layout, mask), flat_grid(4), shape, [0] * 4)
        return [choice.plans(rank)[0] for rank in range(4)]

    early, whole = plans(Mask(True, query_stop=256)), plans(Mask.causal())
    sizes = shape.item_bytes(backward=False)
    pairs = [sum(tile.pairs for plan in p for tile in tiles_of(plan)) for p in (early, whole)]
    assert pairs[0] / pairs[1] == pytest.approx(0.25, abs=0.01)
    for few, all_ in zip(early, whole, strict=True):
        assert bytes_sent(few, sizes, 128) <= bytes_sent(all_, sizes, 128) / 2


def uneven(layout: Layout, stop: int) -> float:
    tiling = Tiling(layout, Mask(True, query_stop=stop))
    ranks = range(layout.ranks)
    pairs = [sum(int(tiling(q, k).cells.pairs.sum()) for k in ranks) for q in ranks]
    return max(pairs) / min(pairs) if min(pairs) else float("inf")


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_segmented_zigzag_repeats_as_much_on_every_rank(ranks: int, fraction: float) -> None:
    tokens = 64 * 2 * ranks
    config = BurstConfig(layout="segmented-zigzag", recompute_fraction=fraction)
    layout = make_layout(config, tokens, ranks)
    stop = boundary(layout, fraction)
    assert stop == fraction * tokens
    assert uneven(layout, stop) <= 1.1
    assert uneven(zigzag(tokens, ranks), boundary(zigzag(tokens, ranks), fraction)) > 1.2


@examples(200)
@given(
    layout=st.sampled_from([*LAYOUTS]),
    ranks=st.integers(1, 8),
    chunk=st.integers(1, 6),
    fraction=st.floats(0, 1),
)
def test_the_rows_before_the_boundary_are_the_first(
    layout: str, ranks: int, chunk: int, fraction: float
) -> None:
    made = in_order(LAYOUTS[layout](4 * ranks * chunk, ranks))  # as where a part is recomputed
    stop = boundary(made, fraction)
    assert abs(stop - fraction * made.tokens) <= max(len(r) for s in made.shards for r in s)
    for rank in range(ranks):
        row, positions = first_saved_row(made, rank, stop), made.positions(rank)
        assert (positions[:row] < stop).all() and (positions[row:] >= stop).all()


def test_fractions_become_the_nearest_chunks() -> None:
    layout = zigzag(16, 4)
    stops = [boundary(layout, fraction) for fraction in (0.0, 0.06, 0.07, 0.3, 0.5, 0.99, 1.0)]
    assert stops == [0, 0, 2, 4, 8, 16, 16]
    assert boundary(zigzag(10, 1), 0.33) == 3
    assert boundary(contiguous(12, 3), 0.5) in (4, 8) and boundary(striped(12, 3), 0.5) == 6
    assert boundary(segmented_zigzag([4, 12], 2), 0.25) == 4


def test_rows_in_another_order_are_refused_by_every_rank() -> None:
    layout = Layout(((range(4), range(12, 16)), (range(8, 12), range(4, 8))))
    for rank in range(2):  # the others would wait for it
        with pytest.raises(ValueError, match="rank 1 holds its rows in another order than"):
            first_saved_row(layout, rank, 8)
    stripes = head_groups("aaaa", 2).ring_layout(in_order(striped(32, 4)))
    with pytest.raises(ValueError, match="stripes with a Ulysses degree above 1"):
        first_saved_row(stripes, 0, 16)


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_a_fraction_beyond_0_and_1_is_refused(fraction: float) -> None:
    for make in (AttentionMemory, lambda f: BurstConfig(recompute_fraction=f)):
        with pytest.raises(ValueError, match=f"within 0 and 1, got {fraction}"):
            make(fraction)
    with pytest.raises(TypeError):  # here and now, not in a call that the other ranks take
        AttentionMemory(None)  # type: ignore[arg-type]


def checkpointed(team: Team) -> list[bool]:
    """Whether checkpoints that repeat no kernel call change nothing, of both dtypes."""
    context, equal = team.context(BurstConfig()), list[bool]()
    saved = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    selective = partial(create_selective_checkpoint_contexts, saved)
    attend = partial(ring_attention, context=context, mask=Mask.causal())
    again = partial(checkpoint, use_reentrant=False)
    for dtype in torch.float32, torch.bfloat16:
        q, k, v, dout = (context.shard(x, dim=1) for x in inputs(LOCAL * context.ranks, dtype))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(attend(*leaves), leaves, dout)
        with_memory = partial(attend, memory=AttentionMemory(0.0))
        for out in again(attend, *leaves, context_fn=selective), again(with_memory, *leaves):
            equal += map(torch.equal, torch.autograd.grad(out, leaves, dout), expected)
    with pytest.raises(ValueError, match="a second pass with a memory calls kernels less often"):
        again(with_memory, *leaves, context_fn=selective)
    return equal


def test_checkpoints_of_torch_may_keep_what_attention_made(workers: WorkerPool) -> None:
    """Selective ones what kernels return, in the place of which sums of a ring are made."""
    assert workers.run(2, checkpointed) == [[True] * 12] * 2
