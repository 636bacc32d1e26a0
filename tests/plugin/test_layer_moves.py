"""Layers of one model in several layouts: where rows move, and that layers see theirs. (fast tier)

The layers are stand-ins, float64: attention that reads positions, a scan that adds up what came
before on contiguous shards, and one of single rows.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst import BurstConfig
from megatron_burst.plans.visibility.layout import (
    Layout,
    contiguous,
    segmented_zigzag,
    striped,
    zigzag,
)
from tests.plugin.contexts import Context, group_of
from tests.tier import in_turn
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.core.packed_seq_params")
from megatron_burst.plugin.hooks.layer_layouts import (  # noqa: E402
    moves,
    over_tensor_ranks,
    sides,
)
from megatron_burst.plugin.hooks.layer_moves import LayerMoves, layer_kinds  # noqa: E402
from megatron_burst.plugin.hooks.row_exchange import carry, find_moves  # noqa: E402
from tests.plugin.test_row_exchange import carried  # noqa: E402


@pytest.mark.parametrize(
    ("kinds", "expected", "times"),
    [
        ("", "a", 0),
        ("*-*E", "aaaaa", 0),
        ("M*-", "asaa", 2),
        ("G*EG", "asaas", 4),
        ("-MG*-", "aassaa", 2),
        ("M-+-ME", "assaass", 4),
        ("*M-/G*M/G*M", "aassasasasas", 10),  # every depth of MTP begins and ends in attention's
    ],
)
def test_rows_move_at_borders_of_the_pattern_alone(kinds: str, expected: str, times: int) -> None:
    assert "".join(sides(kinds)) == expected and moves(sides(kinds)) == times


def test_the_kinds_of_all_stages() -> None:
    """Of a GPTModel, too, some of whose layers are gated delta nets."""
    config = SimpleNamespace(num_layers=4, experimental_attention_variant=None)
    assert layer_kinds(config, "M*|-G/*-/*-") == "M*-G/*-/*-"
    assert layer_kinds(config, None) == "****"
    config.experimental_attention_variant, config.linear_attention_freq = "dsa", 2
    assert layer_kinds(config, None) == "****", "it has no layout of its own"
    for name in ("gated_delta_net", "gdn"):  # as main calls it
        config.experimental_attention_variant = name
        assert layer_kinds(config, None) == "G*G*"


def layouts(ranks: int, unit: int) -> list[Layout]:
    """Those of 4P units of so many tokens, one uneven."""
    tokens = 4 * ranks * unit
    pieces = list(range(0, tokens + 1, unit))
    # Rank r has the units r, r + P, ... in falling order.
    uneven = tuple(
        tuple(range(pieces[i], pieces[i + 1]) for i in range(rank, 4 * ranks, ranks))[::-1]
        for rank in range(ranks)
    )
    return [
        zigzag(tokens, ranks),
        contiguous(tokens, ranks),
        striped(tokens, ranks),
        segmented_zigzag((tokens // 2,) * 2, ranks),
        Layout(uneven),
    ]


@pytest.mark.parametrize(("ranks", "unit"), in_turn(range(1, 9), (1, 3)))
def test_every_layout_becomes_every_other(ranks: int, unit: int) -> None:
    """Also where tensor-parallel ranks hold parts of a rank's rows."""
    for spread in (1, 2):
        found = [over_tensor_ranks(each, spread) for each in layouts(ranks, unit)]
        x = torch.arange(found[0].tokens)
        for held in found:
            here = [held.shard(x, rank, 0) for rank in range(held.ranks)]
            for wanted in found:
                plan = [find_moves(held, wanted, rank) for rank in range(held.ranks)]
                for rank, rows in enumerate(carried(plan, here)):
                    assert torch.equal(rows, wanted.shard(x, rank, 0))
                    assert (plan[rank].rows_sent(rank) == 0) == (
                        set(held.positions(rank).tolist()) == set(wanted.positions(rank).tolist())
                    )


def test_tensor_ranks_hold_the_rows_of_their_rank_in_order() -> None:
    layout = zigzag(24, 2)
    for ranks in (1, 2, 3, 4, 6):
        cut = over_tensor_ranks(layout, ranks)
        for rank in range(2):
            own = [cut.positions(rank * ranks + part) for part in range(ranks)]
            assert torch.equal(torch.cat(own), layout.positions(rank))
            assert len({*map(len, own)}) == 1


# Layers that need their layout, and a stage of them.


class Layer(torch.nn.Module):
    """Returns hidden states [rows, 1, width] plus what its kind makes of them."""

    def __init__(self, kind: str, number: int, mine: dict[str, Tensor], group: Any) -> None:
        super().__init__()
        self.kind, self.layer_number, self._mine, self._group = kind, number, mine, group
        weight = torch.randn(3, 3, dtype=torch.float64, generator=torch.manual_seed(number))
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden_states: Tensor, packed_seq_params: Any = None) -> Tensor:
        mixed = (hidden_states @ self.weight).tanh()
        if self.kind in self._mine:  # this token and all before it in the sequence
            mixed = _causal_sum(mixed, self._mine[self.kind], self._group)
        return hidden_states + mixed


def _causal_sum(x: Tensor, positions: Tensor, group: Any) -> Tensor:
    """A sum over the rows of all ranks that stand at these positions of theirs and no others."""
    if group is None:
        return x.cumsum(0)
    every = _Gather.apply(x, group)
    places = [torch.empty_like(positions) for _ in range(group.size())]
    dist.all_gather(places, positions.contiguous(), group)
    seen = positions.unsqueeze(1) >= torch.cat(places)
    return (seen.to(x.dtype) @ every.flatten(1)).view(x.shape)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.rows = group, len(x)
        every = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(every, x.contiguous(), group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.rows)[ctx.group.rank()], None


class Stack(torch.nn.Module):
    def __init__(self, layers: list[Layer], recompute: bool) -> None:
        super().__init__()
        self.layers, self._recompute = torch.nn.ModuleList(layers), recompute

    def forward(self, hidden: Tensor, packed_seq_params: Any = None) -> Tensor:
        for layer in self.layers:
            if self._recompute:
                hidden = torch.utils.checkpoint.checkpoint(
                    layer, hidden_states=hidden, use_reentrant=False, packed_seq_params=None
                )
            else:
                hidden = layer(hidden_states=hidden, packed_seq_params=packed_seq_params)
        return hidden


TOKENS = 48


def stage_of(
    pattern: str, spread: int = 1, part: int = 0, group: Any = None, stack: Stack | None = None
) -> Any:
    """A pipeline stage whose rows are spread over so many tensor-parallel ranks."""
    return SimpleNamespace(
        decoder=stack or Stack([], False),
        hybrid_layer_pattern=pattern,
        config=SimpleNamespace(sequence_parallel=spread > 1, tensor_model_parallel_size=spread),
        pg_collection=SimpleNamespace(tp_cp=group, tp=group_of(spread, part)),
        post_process=True,
    )


def _trained(
    pattern: str, mine: dict[str, Tensor], hidden: Tensor, over: Any = None, recompute: bool = False
) -> tuple[Tensor, ...]:
    """Run both stages; return output and the gradients of input and weights."""
    kinds, cut = pattern.replace("|", ""), pattern.find("|")
    group = None if over is None else over.group
    layers = [Layer(kind, 1 + i, mine, group) for i, kind in enumerate(kinds)]
    parts = [layers[:cut], layers[cut:]] if cut >= 0 else [layers]
    x = out = hidden.clone().requires_grad_()
    for number, part in enumerate(parts, start=1):
        stack = Stack(part, recompute)
        if over is not None:
            stage = stage_of(pattern, over.spread, over.part, over.group, stack)
            stage.post_process = number == len(parts)
            LayerMoves(stage, over.context, contiguous)
        out = stack(out)
    (out * torch.arange(3.0, dtype=torch.float64)).cos().sum().backward()
    return out.detach(), x.grad, *(layer.weight.grad for layer in layers)


def _patterns(team: Team, spread: int, pattern: str, config: BurstConfig, recompute: bool) -> None:
    """Ranks that hold parts of their rows, as under sequence parallelism, are ranks here."""
    rank, part = divmod(team.rank, spread)
    ranks = team.group.size() // spread
    context = Context(config, ranks, rank)
    context.group = team.group
    attention = over_tensor_ranks(context.layout(TOKENS), spread)
    scans = over_tensor_ranks(contiguous(TOKENS, ranks), spread)
    whole = torch.randn(TOKENS, 1, 3, dtype=torch.float64, generator=torch.manual_seed(0))
    everywhere = torch.arange(TOKENS)
    known = {kind: everywhere for kind in "MG*"}
    expected = _trained(pattern, known, whole)
    places = {
        kind: layout.positions(team.rank)
        for kind, layout in (("M", scans), ("G", scans), ("*", attention))
    }
    over = SimpleNamespace(context=context, group=team.group, spread=spread, part=part)
    mine = attention.shard(whole, team.rank, 0)
    found = _trained(pattern, places, mine, over, recompute)
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if number < 2:
            wanted = attention.shard(wanted, team.rank, 0)
        else:
            dist.all_reduce(got, group=team.group)
        assert (got - wanted).abs().max() < 1e-9 * wanted.abs().max(), (number, pattern)


SEGMENTED = BurstConfig(layout="segmented-zigzag")


@pytest.mark.parametrize(
    ("ranks", "spread", "pattern", "config", "recompute"),
    [
        (2, 1, "M*-", BurstConfig(), False),
        (4, 1, "MG*-", SEGMENTED, True),
        (4, 2, "G*-M", BurstConfig(), True),
        (3, 1, "M-|-*M", BurstConfig(), False),
        (2, 1, "*M|*", SEGMENTED, True),
        (2, 1, "*M|-", BurstConfig(), False),
    ],
)
def test_layers_in_layouts_of_their_own_equal_one_rank(
    workers: WorkerPool, ranks: int, spread: int, pattern: str, config: BurstConfig, recompute: bool
) -> None:
    """Output, and gradients of the input and all weights; `|` parts stages."""
    workers.run(ranks, _patterns, spread, pattern, config, recompute)


def _gradients(team: Team) -> None:
    size = team.group.size()
    for held in layouts(size, 3):
        for wanted in layouts(size, 3):
            plan = find_moves(held, wanted, team.rank)
            x = torch.randn(held.local_tokens, 2, dtype=torch.float64).requires_grad_()
            weights = torch.randn(wanted.tokens, 2, dtype=torch.float64)
            dist.broadcast(weights, group_src=0, group=team.group)
            (carry(x, plan, team.group) * wanted.shard(weights, team.rank, 0)).sum().backward()
            assert torch.equal(x.grad, held.shard(weights, team.rank, 0))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_gradients_go_back_to_the_rank_of_the_row(workers: WorkerPool, ranks: int) -> None:
    workers.run(ranks, _gradients)


def test_a_padding_mask_that_experts_would_misread_is_refused() -> None:
    context = Context(BurstConfig(), 2, 0)
    context.group = group_of(2)
    fine = ("*EM", contiguous), ("MG*E/E", contiguous), ("*ME", zigzag)
    for pattern, layout in fine:
        LayerMoves(stage_of(pattern), context, layout).check(16, None)
    for pattern in ("*ME", "*E/ME"):
        with pytest.raises(ValueError, match=r"experts of the pattern \*.*ME: put an attention la"):
            LayerMoves(stage_of(pattern), context, contiguous).check(16, None)


def test_graphs_that_pass_by_layers_and_ranks_in_another_order_are_refused() -> None:
    context = Context(BurstConfig(), 2, 1)
    context.group = group_of(2, 1)
    stage = stage_of("M*", spread=2, group=group_of(4, 1))
    with pytest.raises(ValueError, match="the ranks of tp_cp are those of tp for each of cp"):
        LayerMoves(stage, context, contiguous)
    stage.config.cuda_graph_impl = "transformer_engine"
    with pytest.raises(ValueError, match="--cuda-graph-impl transformer_engine passes by"):
        LayerMoves(stage, context, contiguous)
