"""Micro-batches that bring context-parallel groups of their own, against float64. (fast tier)

tests/training/test_sft.py runs Megatron's own groups, with rotary embeddings, in a GPTModel.
"""

import itertools
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst import BurstConfig
from megatron_burst.plans.visibility.layout import zigzag_of_each
from megatron_burst.plugin.training_config import LayerConfig
from tests import oracle
from tests.tier import one_in
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.training.models.gpt")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

from megatron_burst.plugin.attention.layouts import Layouts  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.hooks.sequence_hooks import _StageHooks  # noqa: E402
from megatron_burst.plugin.scans.layer import OverRanks  # noqa: E402
from tests.plugin.test_layer_spec import build  # noqa: E402

JOB, OWN = 8, 4  # ranks; of a context-parallel group of the model
SIZES = (4, 2, 1, 2, 8, 1, 4)  # of the groups of the micro-batches
SMALLEST = {"_DYNAMIC_DP_CP_GROUPS": 1, "_HYBRID_DP_CP_GROUPS": 2}  # group that Megatron makes


type Groups = dict[int, dist.ProcessGroup]  # by their sizes


def make_groups(sizes: Sequence[int]) -> Groups:
    """This rank's groups of ranks that follow each other, by size."""
    found = {}
    for size in sizes:
        for first in range(0, JOB, size):
            ranks = range(first, first + size)
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found[size] = group
    return found


class MicroBatch:
    """Documents that are padded and each in a zigzag; a group has the same on all its ranks."""

    def __init__(self, number: int, group: dist.ProcessGroup) -> None:
        self.rank, ranks = group.rank(), group.size()
        first = dist.get_process_group_ranks(group)[0]
        self.lengths = [5 + first, 1, 9 + 2 * number, 3]
        multiple = 2 * ranks
        self.places = [-(-length // multiple) * multiple for length in self.lengths]
        self.layout = zigzag_of_each(self.places, ranks)
        generator = torch.Generator().manual_seed(100 * number + first)
        self.whole = [
            torch.randn(sum(self.places), heads, 8, generator=generator, dtype=torch.float64)
            for heads in (4, 2, 2, 4)
        ]
        self.qkv = [self.mine(x).requires_grad_() for x in self.whole[:3]]

    def mine(self, x: Tensor) -> Tensor:
        return self.layout.shard(x, self.rank, 0)

    def packed(self, **given: Any) -> PackedSeqParams:
        real, padded = (torch.tensor([0, *accumulate(x)]) for x in (self.lengths, self.places))
        return PackedSeqParams(
            "thd", cu_seqlens_q=real, cu_seqlens_q_padded=padded, cu_seqlens_kv=None, **given
        )

    def error(self, out: Tensor) -> float:
        bounds = (0, *accumulate(self.places))
        visible = oracle.visible_pairs(bounds[-1], True, documents=bounds, lengths=(*self.lengths,))
        expected = oracle.attention(*(x[None] for x in self.whole), visible)
        pairs = zip(
            (out, *(x.grad for x in self.qkv)),
            (expected.out, expected.dq, expected.dk, expected.dv),
            strict=True,
        )
        return max(oracle.relative_error(x, self.mine(y[0])) for x, y in pairs)


def made(
    shared: SharedState,
    groups: Groups,
    by_megatron: Groups | None = None,
    name: str = "_HYBRID_DP_CP_GROUPS",
) -> Any:
    """A layer's core attention, and its groups, as a model's layers have them."""
    pg_collection = SimpleNamespace(cp=groups[OWN])
    whole = lambda **_: groups[JOB]  # noqa: E731
    with (
        mock.patch.object(parallel_state, "get_data_parallel_group", whole),
        mock.patch.object(parallel_state, name, by_megatron or {}, create=True),
    ):
        return build(shared=shared, pg_collection=pg_collection), pg_collection


def _attend(team: Team, settings: dict[str, Any], name: str, smallest: int) -> tuple[float, int]:
    groups = make_groups((1, 2, 4, 8))
    by_megatron = {size: groups[size] for size in (1, 2, 4) if size >= smallest}
    shared = SharedState(BurstConfig(**settings))
    module, pg_collection = made(shared, groups, by_megatron, name)
    batches = [MicroBatch(n, groups[size]) for n, size in enumerate(SIZES)]
    outs = []
    for batch, size in zip(batches, SIZES, strict=True):
        pg_collection.cp = groups[size]  # as Megatron's dev does for a layer's forward
        packed = batch.packed(
            cp_group=groups[size] if size >= smallest else None, local_cp_size=size
        )
        outs.append(module(*batch.qkv, None, packed_seq_params=packed))
        pg_collection.cp = groups[OWN]
    for batch, out in zip(batches, outs, strict=True):
        out.backward(batch.mine(batch.whole[3]))
    worst = max(batch.error(out) for batch, out in zip(batches, outs, strict=True))
    return worst, len([*shared.contexts])


@pytest.mark.parametrize(
    ("settings", "name"),
    one_in(4, itertools.product([{"head_parallel_size": 2, "backward": "query"}, {}], SMALLEST)),
)
def test_each_micro_batch_runs_over_its_own_group(
    workers: WorkerPool, settings: dict[str, Any], name: str
) -> None:
    """All are under way at once, and groups beside each other have other documents."""
    for worst, contexts in workers.run(JOB, _attend, settings, name, SMALLEST[name]):
        assert worst < 1e-13
        assert contexts == 4


def _of_unequal_sizes(team: Team) -> float:
    groups = make_groups((1, 2, 4, 8))
    shared = SharedState(BurstConfig(timeout_seconds=30))
    module, pg_collection = made(shared, groups)
    pg_collection.cp = groups[2 if team.rank < OWN else 1]
    shared.contexts.add(module.config, pg_collection.cp)
    batch = MicroBatch(0, pg_collection.cp)
    out = module(*batch.qkv, None, packed_seq_params=batch.packed(cp_group=pg_collection.cp))
    out.backward(batch.mine(batch.whole[3]))
    return batch.error(out)


def test_some_ranks_may_be_alone(workers: WorkerPool) -> None:
    """And take part where the others make their groups, which is for the whole job."""
    assert max(workers.run(JOB, _of_unequal_sizes)) < 1e-13


def _refused(team: Team) -> list[str]:
    groups, said = make_groups((1, 2, 4, 8)), []
    shared = SharedState(BurstConfig())
    module, pg_collection = made(shared, groups)
    batch = MicroBatch(0, groups[2])

    def refuse(**given: Any) -> None:
        with pytest.raises(ValueError) as error:
            module(*batch.qkv, None, packed_seq_params=batch.packed(**given))
        said.append(str(error.value))

    refuse(cp_group=groups[2])
    shared.contexts.add(module.config, groups[2])
    shared.contexts.add(module.config, groups[2])  # which is there
    refuse(cp_group=groups[2])  # Megatron's layer has its own
    refuse(cp_group=groups[2], local_cp_size=4)
    refuse(local_cp_size=2)
    layer: Any = OverRanks.__new__(OverRanks)
    layer.pg_collection, layer.layer_number, layer._passes = pg_collection, 3, False
    for given in ({"cp_group": groups[2]}, {"local_cp_size": 1}):
        with pytest.raises(ValueError, match="layer 3 carries a state over the ranks of the"):
            layer.shard(8, batch.packed(**given), None)
    stage: Any = torch.nn.Module()
    stage.config = module.config
    hooks = _StageHooks(stage, Layouts(module.context), shared)
    hooks._layer_moves = mock.Mock()  # it would move rows over ranks that have none
    with pytest.raises(ValueError, match="M and G layers carry a state over the ranks of the"):
        hooks.before(stage, {"packed_seq_params": batch.packed(cp_group=groups[2])})
    assert layer.shard(8, batch.packed(cp_group=groups[OWN]), None) is None
    pg_collection.cp = groups[2]
    out = module(*batch.qkv, None, packed_seq_params=batch.packed(cp_group=groups[2]))
    out.backward(batch.mine(batch.whole[3]))
    assert batch.error(out) < 1e-13
    return said


def test_groups_that_are_not_known_are_refused(workers: WorkerPool) -> None:
    for rank, said in enumerate(workers.run(JOB, _refused)):
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        own = [*range(rank - rank % OWN, rank - rank % OWN + OWN)]
        new, rotated, size, alone = said
        assert f"cp_group of ranks {pair}, for which our attention has made no groups" in new
        assert "call shared.contexts.add(config, cp_group)" in new
        assert f"of ranks {pair}, and Megatron's layer rotates by" in rotated
        assert f"of ranks {own}: set that to the cp_group" in rotated
        assert f"local_cp_size = 4 and a cp_group of ranks {pair}" in size
        assert (
            f"local_cp_size = 2 without a group, and our attention runs over ranks {own}" in alone
        )


def test_the_check_beside_the_reference_knows_one_group(workers: WorkerPool) -> None:
    for said in workers.run(2, _checked):
        assert "--burst-check reference knows no cp_group but the model's own" in said


def test_ranks_that_would_check_different_things_stop_before_the_first_layer(
    workers: WorkerPool,
) -> None:
    """Also those of other context-parallel groups."""
    for said in workers.run(JOB, _unlike):
        assert "disagree on --burst-check or --recompute-offload" in said
        assert "<Check.OFF: 'off'>" in said and "<Check.NAN: 'nan'>" in said


def _unlike(team: Team) -> str:
    layers = LayerConfig(check=("off", "nan")[team.rank // OWN])
    groups = SimpleNamespace(cp=make_groups((OWN,))[OWN])
    with pytest.raises(ValueError) as error:
        build(shared=SharedState(BurstConfig(), layer_config=layers), pg_collection=groups)
    return str(error.value)


def _checked(team: Team) -> str:
    shared = SharedState(BurstConfig(), layer_config=LayerConfig(check="reference"))
    own = team.context(shared.config)
    same = PackedSeqParams(cp_group=team.group, local_cp_size=2)
    assert shared.contexts.of_micro_batch(same, own) is own
    with pytest.raises(ValueError) as error:
        shared.contexts.of_micro_batch(PackedSeqParams(local_cp_size=1), own)
    return str(error.value)
