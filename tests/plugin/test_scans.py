"""Scans over contiguous shards equal, in float64, their recurrences step by step. (fast tier)"""

import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.plugin.contexts import group_of
from tests.tier import one_in
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.core.packed_seq_params")
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

from megatron_burst import BurstConfig  # noqa: E402
from megatron_burst.plugin.attention.documents import PackedDocuments  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.scans import mixers  # noqa: E402
from megatron_burst.plugin.scans.bytes_sent import ScanShape  # noqa: E402
from megatron_burst.plugin.scans.hand_over import tokens_before  # noqa: E402
from megatron_burst.plugin.scans.layer import OverRanks, layer_apart  # noqa: E402
from megatron_burst.plugin.scans.mixers import DeltaNetOverRanks, MambaOverRanks  # noqa: E402
from megatron_burst.plugin.scans.packages import fla_rule, mamba_scan  # noqa: E402
from megatron_burst.plugin.scans.rank_scan import (  # noqa: E402
    DeltaRule,
    Scanned,
    causal_convolution,
    plain_delta_rule,
    scan_by_decay,
    scan_by_delta_rule,
    with_state_before,
)
from megatron_burst.plugin.scans.recurrence import decaying_memory  # noqa: E402
from megatron_burst.plugin.scans.shards import Shard, shard_of  # noqa: E402

HEADS, GROUPS, KEYS, VALUES, WIDTH, TOKENS = 6, 2, 5, 3, 4, 144
BOUNDS = {
    "one": (0, TOKENS),
    "odd": (0, 1, 2, 7, 35, 39, 70, 75, 76, 101, 143, TOKENS),
    "on borders": (0, 36, 48, 72, 96, 110, TOKENS),
    "over ranks": (0, 3, 140, TOKENS),
}

type Given = list[Tensor]  # q, k, v, log decay, beta, x, weight, bias
type Scan = Callable[[Given, Shard], Scanned]


def given(batch: int) -> Given:
    torch.manual_seed(0)
    shapes = [(GROUPS, KEYS), (GROUPS, KEYS), (HEADS, VALUES), (HEADS,), (HEADS,), (7,)]
    q, k, v, decay, beta, x = (torch.randn(batch, TOKENS, *s).double() for s in shapes)
    decay = -0.02 * F.softplus(decay) - 0.005  # something is left of a state behind several ranks
    decay[:, 52:54] -= 40  # and here nothing
    weight, bias = torch.randn(7, WIDTH).double(), torch.randn(7).double()
    return [q, F.normalize(k, dim=-1), v, decay, (beta - 2).sigmoid(), x, weight, bias]


def step_by_step(tensors: Given, bounds: Sequence[int], *, delta: bool) -> tuple[Tensor, Tensor]:
    """The outputs of the scan and of the convolution, of each document by itself."""
    q, k, v, decay, beta, x, weight, bias = tensors
    q, k = (each.repeat_interleave(HEADS // GROUPS, 2) for each in (q, k))
    out, convolved = [], []
    for start, stop in pairwise(bounds):
        memory = v.new_zeros(len(v), HEADS, KEYS, VALUES)
        for t in range(start, stop):
            memory = decay[:, t, :, None, None].exp() * memory
            new = v[:, t]
            if delta:
                found = (k[:, t].unsqueeze(-1) * memory).sum(2)
                new = beta[:, t].unsqueeze(-1) * (new - found)
            memory = memory + k[:, t].unsqueeze(-1) * new.unsqueeze(2)
            read = (q[:, t].unsqueeze(-1) * memory).sum(2)
            out.append(read * KEYS**-0.5 if delta else read)
            taps = (x[:, s] * weight[:, s - t - 1] for s in range(max(start, t + 1 - WIDTH), t + 1))
            convolved.append(sum(taps, bias))
    return torch.stack(out, 1), torch.stack(convolved, 1)


def by_decay(tensors: Given, shard: Shard) -> Scanned:
    return scan_by_decay(*tensors[:4], shard, chunk=16)


def by_delta(tensors: Given, shard: Shard, rule: DeltaRule = plain_delta_rule) -> Scanned:
    q, k, *others = tensors
    q, k = (each.repeat_interleave(HEADS // GROUPS, 2) for each in (q, k))
    return scan_by_delta_rule(rule, [q, k, *others], shard)


def begin_anew(seq_idx: Tensor) -> list[int]:
    changes = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero()[:, 0] + 1
    return [0, *changes.tolist(), seq_idx.shape[1]]


def mamba_ssm(x, dt, a, b, c, chunk, *, seq_idx, return_final_states, state_dtype=None):
    """The package's kernel, by what its documentation says."""
    assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and return_final_states
    cuts = begin_anew(seq_idx)
    parts = (
        [each[:, i:j] for each in (c, b, dt.unsqueeze(-1) * x, dt * a)] for i, j in pairwise(cuts)
    )
    found = [decaying_memory(*part, chunk=chunk) for part in parts]
    return torch.cat([out for out, _ in found], 1), found[-1][1].mT.to(state_dtype)


def by_mamba_ssm(tensors: Given, shard: Shard) -> Scanned:
    q, k, v, decay, *_ = tensors
    ones = torch.ones(HEADS).double()  # as if dt were -decay, A -1 and x the values over dt
    return mamba_scan(mamba_ssm, 16, [v / -decay.unsqueeze(-1), -decay, -ones, k, q], shard)


def by_fla(tensors: Given, shard: Shard) -> Scanned:
    def kernel(q, k, v, *, g, beta, initial_state, output_final_state, cu_seqlens):
        assert all(each.is_contiguous() for each in (q, k, v, g, beta))
        assert output_final_state == (cu_seqlens is None)
        bounds = () if cu_seqlens is None else tuple(cu_seqlens.tolist())
        return plain_delta_rule([q, k, v, g, beta], initial_state, bounds)

    return by_delta(tensors, shard, fla_rule(kernel))


SCANS: dict[str, Scan] = {
    "decay": by_decay,
    "delta": by_delta,
    "mamba_ssm": by_mamba_ssm,
    "fla": by_fla,
}


def sharded(team: Team, bounds: tuple[int, ...], batch: int, name: str) -> list[Tensor]:
    """This rank's outputs, and the gradients of all that it is given."""
    rank, ranks = team.group.rank(), team.group.size()
    tokens, whole = TOKENS // ranks, given(batch)
    rows = [x[:, rank * tokens : (rank + 1) * tokens] for x in whole[:6]] + whole[6:]
    rows = [x.clone().requires_grad_() for x in rows]
    shard = shard_of(bounds, tokens, rank)
    out = with_state_before(SCANS[name](rows[:5], shard), team.group)
    convolved = causal_convolution(*rows[5:], shard, team.group)
    gradients = torch.autograd.grad(
        loss(out, rank) + loss(convolved, rank), rows, materialize_grads=True
    )
    return [out.detach(), convolved.detach(), *gradients]


def loss(x: Tensor, rank: int) -> Tensor:
    """Weighs every number by where it is in the whole sequence."""
    places = torch.arange(rank * x[0].numel(), (rank + 1) * x[0].numel()).double()
    return (x * places.sin().view(x[0].shape)).sum()


@pytest.mark.parametrize(
    ("ranks", "bounds", "name"), one_in(3, itertools.product([1, 2, 3, 4], BOUNDS, SCANS))
)
def test_shards_equal_the_recurrence(
    workers: WorkerPool, ranks: int, bounds: str, name: str
) -> None:
    batch = 2 if bounds == "one" else 1
    found = workers.run(ranks, sharded, BOUNDS[bounds], batch, name)
    whole = [x.requires_grad_() for x in given(batch)]
    expected = [*step_by_step(whole, BOUNDS[bounds], delta=name in ("delta", "fla"))]
    total = loss(expected[0], 0) + loss(expected[1], 0)
    expected += torch.autograd.grad(total, whole, materialize_grads=True)
    for number, (parts, right) in enumerate(zip(zip(*found, strict=True), expected, strict=True)):
        is_weight = number >= 8
        joined = sum(parts) if is_weight else torch.cat(parts, 1)
        torch.testing.assert_close(joined, right.detach(), rtol=1e-9, atol=1e-9)


def counted(team: Team, delta: bool) -> int:
    """Bytes that this rank sends forward, in float32."""
    ranks, sent = team.group.size(), []
    gather, exchange = dist.all_gather_into_tensor, dist.all_to_all_single

    def gathered(every: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
        sent.append((ranks - 1) * x.numel() * x.element_size())
        gather(every, x, group)

    def exchanged(arrived: Tensor, x: Tensor, *sizes: object) -> None:
        sent.append(x.numel() * x.element_size())
        exchange(arrived, x, *sizes)

    rows = [x[:, : TOKENS // ranks].float() for x in given(1)[:6]]
    weights = [x.float() for x in given(1)[6:]]
    shard = shard_of(None, TOKENS // ranks, team.group.rank())
    with (
        mock.patch.object(dist, "all_gather_into_tensor", gathered),
        mock.patch.object(dist, "all_to_all_single", exchanged),
    ):
        with_state_before((by_delta if delta else by_decay)(rows[:5], shard), team.group)
        causal_convolution(rows[5], *weights, shard, team.group)
    return sum(sent)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_that_are_sent(workers: WorkerPool, ranks: int, delta: bool) -> None:
    transition = HEADS * KEYS**2 if delta else HEADS
    shape = ScanShape(
        heads=HEADS,
        groups=GROUPS,
        shared=0,
        state=HEADS * KEYS * VALUES,
        transition=transition,
        width=WIDTH,
        convolved=7,
        projected=20,
        out=5,
    )
    assert max(workers.run(ranks, counted, delta)) == shape.by_states(ranks, 4)
    tokens = shape.fewer_from(ranks, 4)
    assert shape.by_heads(tokens, ranks, 4) >= shape.by_states(ranks, 4)
    assert shape.by_heads(tokens - 1, ranks, 4) < shape.by_states(ranks, 4)


def test_where_documents_lie_on_a_shard() -> None:
    bounds = (0, 3, 8, 9, 20)
    assert [shard_of(bounds, 5, rank) for rank in range(4)] == [
        Shard((0, 3, 5), 0),
        Shard((0, 3, 4, 5), 2),
        Shard((0, 5), 1),
        Shard((0, 5), 6),
    ]
    assert [shard_of(bounds, 5, rank).is_crossed for rank in range(4)] == [False, False, True, True]
    assert shard_of(None, 5, 2) == Shard((0, 5), 10)
    assert shard_of((0, 5, 10), 5, 1) == Shard((0, 5), 0)


def too_few(team: Team) -> None:
    with pytest.raises(ValueError, match="over 4 tokens needs 3 .* has 2: .* raise --seq-length"):
        tokens_before(torch.zeros(1, 2, 1), 3, team.group)


def test_shards_shorter_than_the_convolution_are_refused(workers: WorkerPool) -> None:
    workers.run(2, too_few)


def a_layer(layout: str, ranks: int) -> Any:
    layer: Any = object.__new__(OverRanks)
    groups = SimpleNamespace(cp=group_of(ranks, ranks - 1))
    layer.pg_collection, layer.layer_number = groups, 3
    layer.shared = SharedState(BurstConfig(layout=layout))
    layer._passes = layout == "contiguous" and ranks > 1
    return layer


def test_a_layer_knows_when_states_are_passed() -> None:
    packed, raw = PackedDocuments(bounds=(0, 3, 8)), PackedSeqParams()
    refused = pytest.raises(ValueError, match="layer 3 passes states .* moves=True")
    alone, zigzag, contiguous = a_layer("zigzag", 1), a_layer("zigzag", 2), a_layer("contiguous", 2)
    assert alone.shard(8, None, None) is zigzag.shard(4, None, None) is None
    assert alone.shard(8, packed, None) == Shard((0, 3, 8), 0)
    with refused:
        zigzag.shard(4, packed, None)
    with refused:
        contiguous.shard(4, None, None)  # nobody moves the tokens
    contiguous.shared.follow_layout()
    assert contiguous.shard(4, None, None) == Shard((0, 4), 4)
    assert contiguous.shard(4, packed, None) == Shard((0, 4), 1)
    for given in ((raw, None), (None, "inference")):
        with refused:
            contiguous.shard(4, *given)


def test_megatrons_layer_is_made_for_one_rank_where_states_are_passed() -> None:
    class Theirs:
        def __init__(self, *, pg_collection: Any) -> None:
            self.ranks = pg_collection.cp.size()

        def forward(self) -> None:
            raise NotImplementedError

    class Ours(OverRanks, Theirs):
        pass

    groups = SimpleNamespace(cp=group_of(2))
    for layout, ranks in (("zigzag", 2), ("contiguous", 1)):
        made: Any = Ours(shared=SharedState(BurstConfig(layout=layout)), pg_collection=groups)
        assert made.ranks == ranks and made.pg_collection is groups


def test_layers_that_would_read_rows_of_another_layout_are_named() -> None:
    class Ours(OverRanks, torch.nn.Module):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    def stack(*mixers: torch.nn.Module) -> Any:
        layers = [torch.nn.Module() for _ in mixers]
        for number, (layer, mixer) in enumerate(zip(layers, mixers, strict=True), start=2):
            layer.layer_number, layer.mixer = number, mixer
        return SimpleNamespace(layers=layers)

    own = torch.nn.Linear(1, 1)
    main, depth = (stack(Ours(), own, Ours()), "-M*G"), (stack(own), "-M")
    for move in (False, True):
        assert layer_apart([main], rows_move=move) == ""
        said = layer_apart([main, depth], rows_move=move)
        assert "layer 2, M, is a Linear: states" in said and "--burst-layout zigzag" in said
    misplaced = stack(Ours()), "M*"
    assert layer_apart([misplaced], rows_move=False) == "", "it knows documents anywhere"
    assert "layer 2, *, is a Ours: states" in layer_apart([misplaced], rows_move=True)


def test_the_parts_of_a_projection_are_ours_to_know() -> None:
    """Megatron's dev has no feat_dim_split."""
    layer: Any = SimpleNamespace(qk_dim_local_tp=6, v_dim_local_tp=4, num_v_heads_local_tp=2)
    parts = DeltaNetOverRanks._parts(layer, torch.randn(1, 3, 24))
    assert [part.shape[-1] for part in parts] == [16, 4, 2, 2]


class OnAGpu(Tensor):
    is_cuda = True


@pytest.mark.parametrize("has", [False, True])
def test_a_kernel_keeps_states_in_the_dtype_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    kernel = mock.Mock(side_effect=mamba_ssm)
    monkeypatch.setattr(mixers.mamba_mixer, "mamba_chunk_scan_combined", kernel, raising=False)
    monkeypatch.setattr(mixers.mamba_mixer, "MAMBA_HAS_STATE_DTYPE", has)
    layer: Any = SimpleNamespace(dt_bias=torch.zeros(2), A_log=torch.zeros(2), chunk_size=4)
    layer.mamba_training_ssm_states_dtype, layer.log_bytes = torch.bfloat16, mock.Mock()
    x, dt, b, c = (torch.randn(1, 8, *size) for size in [(2, 3), (2,), (1, 5), (1, 5)])
    shard = Shard((0, 8), 8)
    expected = MambaOverRanks._scan(layer, x, dt, b, c, shard)
    found = MambaOverRanks._scan(layer, x.as_subclass(OnAGpu), dt, b, c, shard)
    assert kernel.call_args.kwargs.get("state_dtype") == (torch.bfloat16 if has else None)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == torch.float32, "what ranks pass"
        torch.testing.assert_close(got.as_subclass(Tensor), wanted, rtol=0.01, atol=0.01)


def test_a_norm_is_recomputed_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own way to do so needs TransformerEngine."""
    read, gate = torch.randn(2, 4, 3, 2, 5)
    checkpoint = mock.Mock(checkpoint=mock.Mock(side_effect=lambda run, *given: run(*given)))
    monkeypatch.setattr(mixers, "CheckpointWithoutOutput", lambda: checkpoint)
    layer: Any = SimpleNamespace(recompute_norm_out=False, out_proj=lambda x: (2 * x, None))
    layer._apply_gated_norm = lambda x, gate: (x * gate).flatten(0, 2)
    expected, _ = DeltaNetOverRanks._project(layer, read, gate)
    torch.testing.assert_close(expected, 2 * (read * gate).flatten(2).transpose(0, 1))
    assert not checkpoint.checkpoint.called
    layer.recompute_norm_out = True
    found, _ = DeltaNetOverRanks._project(layer, read, gate)
    assert found.equal(expected) and layer.norm_out_checkpoint is checkpoint
    checkpoint.discard_output_and_register_recompute.assert_called_once_with(found)
