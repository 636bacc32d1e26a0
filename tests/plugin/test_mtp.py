"""MTP on context-parallel ranks against one rank in float64: rolls, weights, logs. (fast tier)

tests/training/test_mtp.py runs the same in whole trainings.
"""

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_burst import BurstConfig
from megatron_burst.plans.visibility.layout import zigzag
from tests.oracle import relative_error
from tests.plugin.contexts import group_of
from tests.tier import one_in
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.core.models.gpt")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer import multi_token_prediction  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    process_mtp_loss,
)

from megatron_burst.plugin.attention.layouts import Layouts  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.hooks.mtp import MtpLosses, Rolls  # noqa: E402
from megatron_burst.plugin.hooks.sequence_hooks import _StageHooks  # noqa: E402
from tests.loss.bare_models import KINDS, bare  # noqa: E402

TOKENS, BATCH, ROWS, SIZE, HEADS = 16, 2, 11, 4, 2
SCALE = 0.3  # of a micro-batch's loss, as Megatron's schedule sets it
TOKEN_IDS = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) * 5 % ROWS
LABELS = TOKEN_IDS.roll(-1, 1)
BOUNDS = (0, 1, 5, 11, BATCH * TOKENS)  # of documents, in the samples one behind the other


def masks() -> dict[str, Tensor | None]:
    """Tokens 2 and 3 are a chunk of rank 1 of 4; rank 0 has those before."""
    uneven, only = torch.zeros(2, BATCH, TOKENS, dtype=torch.float64).unbind()
    uneven[0, 3:9] = uneven[1, [1, 2, 15]] = 1.0
    only[:, 2:4] = 1.0
    whole = torch.ones_like(only)
    return {"whole": whole, "uneven": uneven, "a rank's alone": only, "none": 0 * only, "": None}


class Model(torch.nn.Module):
    """Megatron's process_mtp_loss between an embedding, some heads and an output layer."""

    def __init__(self, group: Any, per_token: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(ROWS, SIZE, dtype=torch.float64)
        self.steps = torch.nn.ModuleList(
            torch.nn.Linear(2 * SIZE, SIZE, dtype=torch.float64) for _ in range(HEADS)
        )
        self.out = torch.nn.Linear(SIZE, ROWS, bias=False, dtype=torch.float64)
        self.post_process, self.share_embeddings_and_output_weights = True, False
        self.decoder = SimpleNamespace(input_tensor=None)
        self.pg_collection = SimpleNamespace(cp=group)
        self.config = SimpleNamespace(
            mtp_num_layers=HEADS,
            mtp_loss_scaling_factor=0.1,
            mtp_detach_heads=False,
            sequence_parallel=False,
            tensor_model_parallel_size=1,
            calculate_per_token_loss=per_token,
        )

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        states, moved = [self.embed(input_ids).transpose(0, 1)], input_ids
        for step in self.steps:
            moved, _ = multi_token_prediction.roll_tensor(
                moved, cp_group=self.pg_collection.cp, packed_seq_params=packed_seq_params
            )
            seen = torch.cat([states[-1], self.embed(moved).transpose(0, 1)], -1)
            states.append(torch.tanh(step(seen)))
        hidden = process_mtp_loss(
            torch.cat(states),
            labels,
            loss_mask,
            output_layer=lambda hidden, **_: (self.out(hidden), None),
            output_weight=None,
            runtime_gather_output=None,
            is_training=True,
            compute_language_model_loss=self.compute_language_model_loss,
            config=self.config,
            cp_group=self.pg_collection.cp,
            packed_seq_params=packed_seq_params,
            input_ids=input_ids,
        )
        if labels is None:
            return hidden.transpose(0, 1)
        return self.compute_language_model_loss(labels, self.out(hidden))


def of_rank(whole: Tensor | None, ranks: int, rank: int) -> Tensor | None:
    return None if whole is None else zigzag(whole.shape[1], ranks).shard(whole, rank, 1)


def train(
    team: Team,
    mended: bool,
    per_token: bool,
    has_labels: bool,
    mask: Any,
    layout: str | None = None,
    bounds: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """Gradients of MTP's losses as an optimizer gets them, and what Megatron logs.

    In another layout, or with documents, of which the samples are one sequence.
    """
    ranks, tracker = team.group.size(), MTPLossLoggingHelper.tracker
    model = Model(team.group, per_token)
    if mended and layout is not None:
        config = BurstConfig(layout=layout)
        _StageHooks(model, Layouts(team.context(config)), SharedState(config))
    if mended:
        MtpLosses()([model])
    packed = None if bounds is None else PackedSeqParams("thd", cu_seqlens_q=torch.tensor(bounds))
    ids, targets = (x if bounds is None else x.view(1, -1) for x in (TOKEN_IDS, LABELS))
    mask = mask if mask is None or bounds is None else mask.view(1, -1)
    local = partial(of_rank, ranks=ranks, rank=team.rank)
    tracker.clear()
    MTPLossAutoScaler.set_loss_scale(torch.tensor(SCALE))
    on_cpu = patch.object(torch.cuda, "current_device", return_value=torch.device("cpu"))
    with on_cpu, patch.object(parallel_state, "get_data_parallel_group", lambda **_: team.group):
        labels = local(targets) if has_labels else None
        (model(local(ids), labels, local(mask), packed) * 0).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    sums = [tracker[f"{name}_values"] for name in ("loss", "correct", "total")]
    for x in (*gradients, *sums):
        dist.all_reduce(x, group=team.group)
    sums[0] /= ranks
    return [*(g if per_token else g / ranks for g in gradients), *sums]


@pytest.fixture(scope="module")
def expected(workers: WorkerPool) -> Any:
    return {
        (name, *how): workers.run(1, train, False, *how, mask)[0]
        for (name, mask), how in product(masks().items(), product((True, False), repeat=2))
    }


CASES = [
    (ranks, name, per_token, has_labels)
    for ranks in (2, 4)
    for name in masks()
    for per_token, has_labels in ((True, True), (False, True), (True, False))
]


def differences(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [relative_error(f, w) for f, w in zip(found, wanted, strict=True)]


@pytest.mark.parametrize(("ranks", "mask", "per_token", "has_labels"), one_in(2, CASES))
def test_gradients_and_logs_are_those_of_one_rank(
    workers: WorkerPool, expected: Any, ranks: int, mask: str, per_token: bool, has_labels: bool
) -> None:
    how = per_token, has_labels
    for found in workers.run(ranks, train, True, *how, masks()[mask]):
        *gradients, loss, correct, total = differences(found, expected[mask, *how])
        # Without a mask Megatron divides its integer counts in float32.
        assert max(gradients) < (1e-12 if mask else 1e-6)
        assert max(loss, correct, total) < 1e-6  # Megatron logs in float32


LAID_OUT = [
    (ranks, layout, bounds, mask, has_labels)
    for ranks in (2, 4)
    for layout, bounds in (
        ("zigzag", BOUNDS),
        ("balanced", BOUNDS),
        ("segmented-zigzag", None),
        ("segmented-zigzag", BOUNDS),
    )
    for mask, has_labels in (("uneven", True), ("a rank's alone", True), ("uneven", False))
]


@pytest.mark.parametrize(("ranks", "layout", "bounds", "mask", "has_labels"), one_in(5, LAID_OUT))
def test_documents_and_other_layouts_are_those_of_one_rank(
    workers: WorkerPool, ranks: int, layout: str, bounds: Any, mask: str, has_labels: bool
) -> None:
    """Of documents Megatron's own roll on one rank is what is expected."""
    given = True, has_labels, masks()[mask]
    wanted = workers.run(1, train, False, *given, None, bounds)[0]
    for found in workers.run(ranks, train, True, *given, layout, bounds):
        *gradients, loss, correct, total = differences(found, wanted)
        assert max(gradients) < 1e-12 and max(loss, correct, total) < 1e-6


@pytest.mark.parametrize("per_token", [True, False])
def test_megatron_alone_is_wrong(workers: WorkerPool, expected: Any, per_token: bool) -> None:
    """MC#7498; where this fails Megatron is right, and MtpLosses can go."""
    wanted = expected["a rank's alone", per_token, True]
    found = workers.run(4, train, False, per_token, True, masks()["a rank's alone"])[0]
    *gradients, loss, _, _ = differences(found, wanted)
    assert min(max(gradients), loss) > 0.1


def test_one_rank_and_other_stages_are_left_alone() -> None:
    alone, other = Model(group_of(1), True), Model(None, True)
    other.post_process = False
    assert MtpLosses()([alone, other]) == [alone, other]
    assert not alone._forward_pre_hooks and not other._forward_pre_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_tied_embeddings_of_several_stages_are_one_weight(kind: str) -> None:
    """Megatron's `sharded_state_dict` fails with both; tests/training saves and loads them."""
    hidden, weight = torch.randn(2, 1, SIZE), torch.randn(ROWS, SIZE)
    for is_last, is_tied in ((True, True), (False, True), (True, False)):
        model = bare(kind, hidden, weight, mtp=True)
        model.pre_process, model.share_embeddings_and_output_weights = not is_last, is_tied
        model.pg_collection = SimpleNamespace(cp=group_of(1))
        MtpLosses()([model])
        assert (model.output_layer.weight is None) == (is_last and is_tied)


def test_evaluation_is_left_alone(workers: WorkerPool) -> None:
    workers.run(2, _evaluate)


def _evaluate(team: Team) -> None:
    model = Model(team.group, True)
    MtpLosses()([model])
    labels = of_rank(LABELS, 2, team.rank)
    with torch.no_grad(), patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        losses = model.compute_language_model_loss(
            labels, model.out(torch.zeros(8, BATCH, SIZE).double())
        )
    torch.testing.assert_close(losses, torch.full_like(losses, ROWS).log())


def test_documents_without_our_hook_are_refused() -> None:
    model = Model(group_of(2), True)
    MtpLosses()([model])
    with pytest.raises(ValueError, match="documents, MTP and 2 context-parallel ranks"):
        model(TOKEN_IDS, LABELS, packed_seq_params=SimpleNamespace())


def test_lists_are_rolled_as_dev_wants_them() -> None:
    """What comes behind the last token is 0, or True: padding."""
    rolls = Rolls(torch.nn.Identity())
    rolls.begin(SimpleNamespace(next=lambda x: F.pad(x[:, 1:], (0, 1))))  # type: ignore[arg-type]
    try:
        tokens, padded = torch.tensor([[5, 6, 7]]), torch.tensor([[False, True, False]])
        roll = multi_token_prediction.roll_tensor
        (moved,) = roll([tokens], shifts=-1, dims=-1, cp_group=None)
        assert moved.tolist() == [[6, 7, 0]]
        moved, padding = roll([tokens, padded], fill_values=[0, True], roll_depth=1)
        assert moved.tolist() == [[6, 7, 0]] and padding.tolist() == [[True, False, True]]
    finally:
        rolls._end()
