"""The largest scores that --qk-clip asks for, over ranks, against all scores. (fast tier)"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plugin.training_config import LayerConfig
from megatron_burst.reference.dense import Visibility
from tests import oracle
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.training.models.gpt")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer.qk_clip import clip_qk  # noqa: E402
from megatron.core.transformer.attention import SelfAttention  # noqa: E402

from megatron_burst.plugin.attention import largest_scores as largest_scores_module  # noqa: E402
from megatron_burst.plugin.attention.documents import PackedDocuments  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from tests.plugin.test_layer_spec import build  # noqa: E402

TOKENS, THRESHOLD = 48, 20.0
TABLE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 9},
    "documents": {"documents": (0, 5, 31, 48), "lengths": (5, 25, 17)},
    "blocks": {"table": TABLE},
}


def scores_of(q: Tensor, k: Tensor, **seen: Any) -> Tensor:
    """All scores that are seen, [heads, pairs]."""
    visible = oracle.visible_pairs(TOKENS, True, **seen)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->hbij", q, k) * q.shape[3] ** -0.5
    return scores[:, :, visible].flatten(1)


def micro_batch(number: int) -> list[Tensor]:
    """q, k, v [batch, tokens, heads, 8]: head 1 is loud in one row, head 2 in all, 3 in none.

    That row's loudest score is of a key that only causality alone lets it see.
    """
    generator = torch.Generator().manual_seed(number)
    q, k, v = (torch.randn(2, TOKENS, n, 8, generator=generator) for n in (4, 2, 2))
    q[:, :, 2] *= 15
    q[0, 40, 1] = 40 * k[0, 38, 0] / k[0, 38, 0].norm()
    k[0, 15, 0] = 3 * k[0, 38, 0]
    return [q, k, v]


def _look(team: Team, settings: dict[str, Any], mask: dict[str, Any]) -> None:
    masked = dict(mask)
    shared = SharedState(BurstConfig(**settings))
    shared.masks.table = masked.pop("table", None)
    shared.contexts.of = lambda *_: team.context(shared.config)  # type: ignore[method-assign]
    config = {"qk_clip": True, "qk_clip_threshold": THRESHOLD}
    if window := masked.pop("window", None):
        config["window_size"] = (window, 0)
    module = build(shared=shared, config=config, pg_collection=SimpleNamespace(cp=team.group))
    documents = PackedDocuments(
        bounds=masked.get("documents", ()), lengths=masked.get("lengths"), qkv_format="sbhd"
    )
    expected = []
    for number in (0, 1):
        whole = micro_batch(number)
        q, k, v = (zigzag(TOKENS, team.group.size()).shard(x, team.rank, 1) for x in whole)
        qkv = [x.transpose(0, 1).requires_grad_() for x in (q, k, v)]
        module(*qkv, None, packed_seq_params=documents if documents.bounds else None)
        expected.append(scores_of(*whole[:2], **mask).amax(1))
    with torch.no_grad():  # the first pass of a checkpoint, and an evaluation
        module(*(100 * x for x in qkv), None)
    largest = torch.stack(expected).amax(0)
    found = module.current_max_attn_logits
    dist.all_reduce(found, dist.ReduceOp.MAX, group=team.group)
    above = largest > THRESHOLD
    assert above.tolist()[1:] == [True, True, False]
    assert torch.allclose(found[above], largest[above], rtol=1e-6)
    assert (found[~above] <= THRESHOLD).all() and (found[~above] >= largest[~above]).all()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (2, 1), (4, 2)])
def test_what_is_above_the_threshold_is_exact(
    workers: WorkerPool, ranks: int, degree: int, mask: dict[str, Any]
) -> None:
    workers.run(ranks, _look, {"head_parallel_size": degree}, mask)


def test_nothing_is_multiplied_where_nothing_is_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory does not grow with the pairs."""
    monkeypatch.setattr(largest_scores_module, "_PAIRS_AT_ONCE", 100)
    parts = mock.Mock(side_effect=Visibility.pairs)
    monkeypatch.setattr(Visibility, "pairs", lambda *given: parts(*given))
    module = build(config={"qk_clip": True})
    q, k, v = (x.transpose(0, 1).requires_grad_() for x in micro_batch(0))
    module(q / 2, k, v, None)
    assert (module.current_max_attn_logits <= 100).all() and not parts.called
    module(10 * q, k, v, None)
    assert parts.call_count > 2 and all(len(x.args[1]) <= 2 for x in parts.call_args_list)
    expected = scores_of(10 * q.transpose(0, 1), k.transpose(0, 1)).amax(1)
    found = module.current_max_attn_logits
    assert torch.allclose(found, expected.where(expected > 100, found), rtol=1e-6)


def test_megatrons_optimizer_clips_by_it() -> None:
    module = build(config={"qk_clip": True, "qk_clip_threshold": THRESHOLD})
    q, k, v = (x.transpose(0, 1).requires_grad_() for x in micro_batch(0))
    module(q, k, v, None)
    largest = scores_of(q.transpose(0, 1), k.transpose(0, 1)).amax(1).view(2, 2).amax(1)
    weight = torch.randn(2 * (16 + 8 + 8), 32)
    attention: Any = SelfAttention.__new__(SelfAttention)
    torch.nn.Module.__init__(attention)
    attention.config, attention.core_attention = module.config, module
    attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition = 4, 2
    attention.query_projection_size, attention.kv_projection_size = 32, 16
    attention.linear_qkv = SimpleNamespace(weight=torch.nn.Parameter(weight.clone()))
    layers = SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace()]))
    layers.decoder.layers[0].self_attention = attention
    chunk = SimpleNamespace(module=SimpleNamespace(module=layers))
    with (
        mock.patch.object(dist, "all_reduce"),
        mock.patch.object(parallel_state, "get_data_parallel_group"),
    ):
        assert clip_qk([chunk]) == pytest.approx(largest.max().item(), rel=1e-6)
    root = (THRESHOLD / largest).clamp(max=1).sqrt()
    found, before = (x.view(2, 32, 32) for x in (attention.linear_qkv.weight, weight))
    assert torch.allclose(found[:, :24], before[:, :24] * root[:, None, None], rtol=1e-5)
    assert torch.equal(found[:, 24:], before[:, 24:]) and (root < 0.9).all()
    assert module.current_max_attn_logits is None


def test_the_check_beside_the_reference_is_refused() -> None:
    shared = SharedState(BurstConfig(), layer_config=LayerConfig(check="reference"))
    with pytest.raises(ValueError, match="qk_clip = True: --burst-check reference looks past it"):
        build(shared=shared, config={"qk_clip": True})


def test_padding_has_no_largest_score_beside_a_sink_and_autocast_rounds_none() -> None:
    """The log-sum-exp of a row of padding is the sink, here above the threshold."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 8, 1, 8, generator=generator) for _ in range(2))
    q[:, 5:], k[:, 5:] = 30, 30
    q[0, 3, 0], k[0, 2, 0] = 9.3, 9.1
    lse = torch.full((1, 1, 8), 21.0)
    given = BurstContext.alone(BurstConfig()), Mask.causal(documents=[0, 8], lengths=[5])
    with torch.autocast("cpu", torch.bfloat16):
        found = largest_scores_module.largest_scores(
            *(q, k, lse, *given, zigzag(8, 1)), scale=1.0, threshold=THRESHOLD
        )
    assert found.item() == pytest.approx(8 * 9.3 * 9.1, rel=1e-6)
