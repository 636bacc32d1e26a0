"""The hook on Megatron's own `forward` of both models, and main_grad. (fast tier)

tests/training runs the same in whole trainings.
"""

import copy
import logging
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("megatron.training.models.gpt")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    MTPLossLoggingHelper,
    _compute_mtp_acceptance_counts,
)

from megatron_burst.config import LmHeadConfig  # noqa: E402
from megatron_burst.loss.call import Call  # noqa: E402
from megatron_burst.loss.kept import Kept  # noqa: E402
from megatron_burst.loss.products import LogitsGradient, OwnSum  # noqa: E402
from megatron_burst.plugin.hooks import lm_head  # noqa: E402
from megatron_burst.plugin.hooks.lm_head import ChunkedHead, UnmadeLogits, log_probs  # noqa: E402
from megatron_burst.plugin.hooks.main_grad import MainGradSum, fused_kernel, weight_sum  # noqa: E402
from megatron_burst.plugin.hooks.mtp import MtpLosses  # noqa: E402
from tests.loss.bare_models import HEADS, KINDS, bare  # noqa: E402
from tests.loss.test_memory import LIMIT_MB, MIB, K, peak_bytes  # noqa: E402
from tests.tier import slow_if  # noqa: E402
from tests.workers import Team, WorkerPool  # noqa: E402

TOKENS, BATCH, ROWS, SIZE = 6, 2, 20, 8
CONFIG = LmHeadConfig(loss="chunked", chunk_size=5)
LABELS = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) * 7 % ROWS


def drawn(seed: int) -> list[Tensor]:
    """Hidden states and a weight."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*n, SIZE, generator=generator) for n in ((TOKENS, BATCH), (ROWS,))]


def model(kind: str = "hybrid", **settings: Any) -> Any:
    return bare(kind, *drawn(0), **settings)


def in_chunks(made: Any) -> Any:
    return ChunkedHead(CONFIG)([made])[0]


def run(made: Any, labels: Tensor | None = LABELS, **more: Any) -> Tensor:
    return made(None, None, None, labels=labels, **more)


# Each is what Megatron has to be told of a model; all go through both models' `forward`.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "width-scaled": {"use_mup": True, "mup_output_mult": 0.25},
    "mtp": {"mtp": True},
    "mtp, width-scaled": {"mtp": True, "use_mup": True, "mup_output_mult": 0.25},
    "mtp, tied": {"mtp": True, "tied": True},
    "mtp, detached": {"mtp": True, "mtp_detach_heads": True},
}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Megatron logs of MTP, which asks for a device and for data-parallel ranks."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: None)
    MTPLossLoggingHelper.tracker.clear()
    yield MTPLossLoggingHelper.tracker
    MTPLossLoggingHelper.tracker.clear()


def compare(
    logged: Any, labels: Tensor, mask: Tensor, kind: str = "hybrid", **settings: Any
) -> None:
    """Losses, gradients and what MTP counts, in chunks and as Megatron makes them."""
    found: list[list[Tensor]] = []
    for attach in (lambda made: made, in_chunks):
        made = attach(model(kind, **settings))
        losses = run(made, labels, loss_mask=mask)
        assert losses.shape == LABELS.shape and losses.dtype == torch.float32
        assert losses.is_contiguous()
        (losses * mask).sum().backward()
        counts = {name: value.clone() for name, value in logged.items() if "values" in name}
        assert len(counts) == 3 * made.mtp_process
        losses = losses.where(labels >= 0, 0.0)
        found.append([losses, *(p.grad for p in made.parameters()), *counts.values()])
        logged.clear()
    for ours, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_gradients_and_counts_are_those_of_the_logits(
    logged: Any, kind: str, settings: str
) -> None:
    compare(logged, LABELS, (LABELS % 3 > 0).float(), kind, **SETTINGS[settings])


@pytest.mark.parametrize("left", [BATCH * TOKENS, TOKENS + 3, 1, 0])
def test_heads_of_mtp_count_beside_tokens_that_are_ignored(logged: Any, left: int) -> None:
    """As --sft has them: -100 where no loss is asked for."""
    labels = LABELS.flatten().clone()
    labels[: LABELS.numel() - left] = -100
    labels = labels.view_as(LABELS)
    compare(logged, labels, (labels >= 0).float(), mtp=True)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("settings", ["plain", "tied", "width-scaled"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_and_entropies_of_given_tokens(
    kind: str, settings: str, has_mask: bool
) -> None:
    """With a mask, by whose multiple the log-probabilities are weighed: that says nothing of H."""
    generator = torch.Generator().manual_seed(1)
    grad, found = torch.randn(BATCH, TOKENS, 2, generator=generator), []
    labels = LABELS.clone()
    labels[1, :2] = -100
    plain, chunked = (model(kind, **SETTINGS[settings]) for _ in range(2))
    logs = (run(plain, None) / 0.7).log_softmax(-1)
    of_labels = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = torch.stack([of_labels, -(logs.exp() * logs).sum(-1)], -1)
    expected = expected * (labels >= 0)[..., None]
    call = dict.fromkeys(("input_ids", "position_ids", "attention_mask"))
    wrapped = torch.nn.Sequential(in_chunks(chunked))
    wrapped.forward = lambda **arguments: wrapped[0](**arguments)
    if has_mask:
        call["loss_mask"] = (labels % 3 > 0).float() * (labels >= 0)
        grad[..., 0] = -call["loss_mask"]
    ours = log_probs(wrapped, labels, 0.7, **call)
    for made, result in ((plain, expected), (chunked, ours)):
        (result * grad).sum().backward()
        found.append([result.detach(), *(p.grad for p in made.parameters())])
    for of_plain, of_chunked in zip(*found, strict=True):
        torch.testing.assert_close(of_chunked, of_plain)
    assert run(chunked).shape == LABELS.shape, "calls after it are as before"


def test_log_probabilities_beside_the_losses_of_mtp_over_ranks(logged: Any) -> None:
    """MtpLosses, behind the chunked loss, stands in for a model's loss, too."""
    made, call = model(mtp=True), dict.fromkeys(("input_ids", "position_ids", "attention_mask"))
    expected = run(in_chunks(model()))
    made.pg_collection.cp = SimpleNamespace(size=lambda: 2)
    MtpLosses()(ChunkedHead(CONFIG)([made]))
    made.pg_collection.cp = None  # no rank is there to roll tokens with
    with torch.no_grad():
        actual = log_probs(made, LABELS, **call)
    torch.testing.assert_close(-actual[..., 0], expected)


def test_log_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match="pass --lm-head-loss chunked"):
        log_probs(model(), LABELS)
    with pytest.raises(ValueError, match="temperature must be positive and finite, got 0"):
        log_probs(in_chunks(model()), LABELS, 0.0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_limit_for_no_token_is_refused_when_the_model_is_built(tied: bool) -> None:
    hook = ChunkedHead(LmHeadConfig(loss="chunked", memory_mb=1))
    weight = torch.zeros(300_000, 1)
    with pytest.raises(ValueError, match=r"mb\) 1 is too small for one token.*at least 2 MiB"):
        hook([bare("gpt", torch.zeros(2, 1, 1), weight, tied=tied)])
    hook([bare("gpt", torch.zeros(2, 1, 1), weight[:100_000], tied=tied)])


def test_the_counts_are_of_tokens_that_were_foretold(logged: Any) -> None:
    """So that the comparison above compares something."""
    made = in_chunks(model(mtp=True))
    logits = F.linear(made.mtp(made.decoder())[TOKENS : 2 * TOKENS], made.output_layer.weight)
    labels = logits.argmax(-1).t().roll(1, -1)  # of the first head, which moves them back
    run(made, labels, loss_mask=torch.ones(BATCH, TOKENS))
    assert logged["correct_values"].tolist()[0] == BATCH * (TOKENS - 1)
    assert logged["total_values"].tolist() == [BATCH * (TOKENS - n) for n in range(1, 1 + HEADS)]


def _best_over_ranks(team: Team) -> bool:
    hidden, weight = drawn(1)
    shard = weight.chunk(team.group.size())[team.rank]
    made = in_chunks(bare("gpt", hidden, shard, mtp=True, group=team.group))
    made.eval()
    standing_in: list[UnmadeLogits] = []
    made.output_layer.register_forward_hook(lambda _, __, out: standing_in.append(out[0]))
    run(made)
    preds = F.linear(made.mtp(made.decoder())[TOKENS : 2 * TOKENS], weight).argmax(-1)
    correct, total = _compute_mtp_acceptance_counts(
        standing_in[0], preds.t(), torch.ones(BATCH, TOKENS), made.output_layer, None, team.group
    )
    return bool(correct == total == BATCH * TOKENS)


def test_the_likeliest_token_over_ranks_of_the_vocabulary(workers: WorkerPool) -> None:
    assert all(workers.run(2, _best_over_ranks))


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("wrong", [-1, -100, ROWS])
def test_masked_labels_may_be_anything(wrong: int, has_mask: bool) -> None:
    """As in Megatron, whose loss of such a label is meaningless, finite and masked."""
    mask = torch.ones(BATCH, TOKENS)
    mask[1, 2] = 0
    found = []
    for label in (0, wrong):
        labels = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        labels[1, 2] = label
        made = in_chunks(model())
        losses = run(made, labels, loss_mask=mask if has_mask else None)
        (losses * mask).sum().backward()
        found.append(((losses * mask).detach(), *(p.grad for p in made.parameters())))
    for right, with_wrong in zip(*found, strict=True):
        torch.testing.assert_close(right, with_wrong, rtol=1e-6, atol=1e-6)


def test_a_wrong_label_that_counts_is_an_error() -> None:
    losses = run(in_chunks(model()), torch.full((BATCH, TOKENS), ROWS))
    assert (losses > 1e29).all()
    with pytest.raises(ValueError, match=f"target {ROWS} is outside"):
        losses.sum().backward()


def test_evaluation_makes_no_gradients(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), torch.no_grad():
        loss = run(in_chunks(model()))
    assert not loss.requires_grad and not caplog.records


# Calls, and hooks of the output layer.


@pytest.mark.parametrize("kind", KINDS)
def test_calls_without_labels_have_logits(kind: str) -> None:
    made = in_chunks(model(kind))
    logits = F.linear(made.decoder(), made.output_layer.weight).transpose(0, 1)
    with pytest.raises(ValueError, match="targets"):
        run(made, LABELS[:1])
    for _ in range(2):
        torch.testing.assert_close(run(made, None), logits, rtol=0, atol=0)
        by_place = made(None, None, None, None, LABELS)
        assert torch.equal(by_place, run(made))
        torch.testing.assert_close(
            made.output_layer(made.decoder())[0].transpose(0, 1), logits, rtol=0, atol=0
        )


def test_a_callers_own_end_has_the_output_layer_and_the_loss() -> None:
    """GPTModel's output_processor: what it makes of them is in chunks, too."""

    def processor(*, hidden_states: Any, labels: Any, **parts: Any) -> Tensor:
        logits, _ = parts["output_layer"](hidden_states)
        return parts["compute_language_model_loss"](labels, logits) * 2

    made = in_chunks(model("gpt"))
    assert torch.equal(run(made, output_processor=processor), 2 * run(made))


def test_hooks_of_the_output_layer_run_and_may_change_the_input() -> None:
    made, ran = in_chunks(model()), []
    expected = run(made)
    layer = made.output_layer
    layer.register_forward_pre_hook(lambda _, given: ran.append(given))
    layer.register_forward_hook(lambda *_: ran.append(None))
    assert torch.equal(run(made), expected)
    assert len(ran) == 2 and torch.equal(ran[0][0], made.decoder())
    layer.register_forward_pre_hook(lambda _, given: (given[0] * 0,))
    torch.testing.assert_close(run(made), torch.full((BATCH, TOKENS), ROWS).log())


@pytest.mark.parametrize("read", [torch.sum, lambda logits: logits.float(), lambda x: x + 1])
def test_a_hook_that_reads_logits_fails(read: Any) -> None:
    made = in_chunks(model())
    made.output_layer.register_forward_hook(lambda _, __, out: read(out[0]) and None)
    with pytest.raises((TypeError, AttributeError), match="UnmadeLogits"):
        run(made)


def test_gathered_logits_are_refused_with_labels() -> None:
    made = in_chunks(model(group=SimpleNamespace(size=lambda: 2)))
    with pytest.raises(ValueError, match="logits gathered from 2 ranks: drop runtime_gather_out"):
        run(made, runtime_gather_output=True)
    assert run(made, None, runtime_gather_output=True).shape == (BATCH, TOKENS, ROWS)


# Memory.


@pytest.mark.parametrize("kind", slow_if({"gpt"}, KINDS))
def test_a_model_holds_the_limit(kind: str) -> None:
    def losses(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        made = bare(kind, states[:, None], weight)
        ChunkedHead(LmHeadConfig(loss="chunked", memory_mb=LIMIT_MB))([made])
        return run(made, targets[None])

    peak = peak_bytes(losses, tokens=32 * K, vocabulary=128 * K, hidden=64)
    assert 0.4 * LIMIT_MB * MIB < peak <= LIMIT_MB * MIB


# Attaching.


def test_a_stage_with_output_is_changed_and_others_are_not() -> None:
    last, first = model(), model()
    first.post_process = False
    before = copy.copy(vars(first))
    assert ChunkedHead(CONFIG)([first, last]) == [first, last]
    assert vars(first) == before and not first._forward_pre_hooks
    assert len(last._forward_pre_hooks) == 1


def test_a_tied_embedding_beside_the_heads_gets_its_gradient_on_every_stage() -> None:
    """Megatron's data parallelism leaves out what autograd has, unless it is told of more uses."""
    for settings, more_uses in (
        ({"mtp": True, "tied": True}, True),
        ({"mtp": True}, False),
        ({"tied": True}, False),
    ):
        made = in_chunks(model("gpt", **settings))
        (weight,) = (p for p in made.parameters() if p.shape == (ROWS, SIZE))
        assert getattr(weight, "zero_out_wgrad", False) is more_uses


def with_layer(**changes: Any) -> Any:
    made = model()
    for name, value in changes.items():
        setattr(made.output_layer, name, value)
    return made


def with_linear() -> Any:
    made = model()
    made.output_layer = torch.nn.Linear(1, 1)
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: torch.nn.Linear(1, 1), "needs a GPTModel or HybridModel, not a Linear"),
        (with_linear, "the output layer is a Linear, not a ColumnPar"),
        (
            lambda: with_layer(bias=torch.nn.Parameter(torch.zeros(1))),
            "the output layer has a bias",
        ),
        (lambda: with_layer(gtp_remat_size=2), "the output layer is spread over 2 GTP ranks"),
        (lambda: model(cross_entropy_loss_fusion=True), "cross_entropy_loss_fusion = True: it"),
    ],
)
def test_models_that_cannot_be_served_are_refused(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkedHead(CONFIG)([made()])


# dW into main_grad.


def parameter(main_grad: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32) -> Any:
    weight = torch.nn.Parameter(torch.randn(ROWS, SIZE).to(dtype))
    weight.main_grad = torch.ones(ROWS, SIZE, dtype=main_grad)
    weight.grad_added_to_main_grad = False
    return weight


def product(tokens: int = 4) -> tuple[LogitsGradient, Tensor, Tensor]:
    wide, hidden = torch.randn(tokens, ROWS), torch.randn(tokens, SIZE)
    return LogitsGradient(wide, wide), hidden, wide.t() @ hidden


@pytest.mark.parametrize("tied", [False, True])
def test_dw_is_added_to_main_grad_and_ddp_is_told(tied: bool) -> None:
    weight = parameter()
    weight.zero_out_wgrad = tied
    gradient, hidden, dw = product()
    place = weight_sum(weight)
    place.add_product(gradient, hidden)
    place.add_product(gradient, hidden)
    dummy = place.result()
    torch.testing.assert_close(weight.main_grad, 1 + 2 * dw)
    assert weight.grad_added_to_main_grad and dummy.shape == weight.shape
    assert dummy.dtype == weight.dtype and (not tied or not dummy.any())


def test_a_narrow_main_grad_gets_the_sum_once() -> None:
    weight = parameter(torch.bfloat16)
    gradient, hidden, dw = product()
    place = weight_sum(weight)
    assert place.apart
    for _ in range(3):
        place.add_product(gradient, hidden)
    assert (weight.main_grad == 1).all()
    place.result()
    torch.testing.assert_close(weight.main_grad.float(), 1 + 3 * dw, rtol=2**-8, atol=1e-5)


def test_without_main_grad_autograd_gets_the_gradient() -> None:
    assert isinstance(weight_sum(torch.nn.Parameter(torch.zeros(2, 2))), OwnSum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, torch.ones(BATCH, TOKENS)], ids=["", "kept"])
def test_the_whole_loss_sums_into_main_grad(dtype: torch.dtype, mask: Tensor | None) -> None:
    """In the backward alone, of which data parallelism counts that it has been."""
    made, plain = in_chunks(model()), model()
    (run(plain).sum() / 3).backward()
    weight = made.output_layer.weight
    for _ in range(2):
        weight.main_grad = torch.ones(ROWS, SIZE, dtype=dtype)
        weight.grad_added_to_main_grad = False
        losses = run(made, loss_mask=mask)
        assert (weight.main_grad == 1).all() and not weight.grad_added_to_main_grad
        (losses.sum() / 3).backward()
        near = {"rtol": 2**-7, "atol": 1e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(
            weight.main_grad.float(), 1 + plain.output_layer.weight.grad, **near
        )
        assert weight.grad_added_to_main_grad


def test_dw_of_logits_is_not_dropped_beside_losses() -> None:
    """Autograd has it where no kernel sums it, and losses tell DDP to leave the gradient alone."""
    made, plain = in_chunks(model()), model()
    ours, weight = (each.output_layer.weight for each in (made, plain))
    ours.main_grad, ours.grad_added_to_main_grad = torch.zeros(ROWS, SIZE), False
    for each in (plain, made):
        (run(each).sum() + run(each, None).square().sum()).backward()
    assert ours.grad_added_to_main_grad and ours.zero_out_wgrad  # then DDP adds the gradient
    torch.testing.assert_close(ours.main_grad + ours.grad, weight.grad)


@pytest.mark.parametrize("has_main_grad", [False, True])
def test_dw_in_blocks_of_rows_goes_where_all_of_it_goes(has_main_grad: bool) -> None:
    """Behind a micro-batch that made it at once, and told DDP to leave the gradient alone."""
    made, plain, chunking = in_chunks(model()), model(), Call.chunking
    (2 * run(plain).sum()).backward()
    weight = made.output_layer.weight
    if has_main_grad:
        weight.main_grad = torch.zeros(ROWS, SIZE, dtype=torch.bfloat16)
        weight.grad_added_to_main_grad = False

    def in_blocks(call: Call, sizes: Any) -> Any:
        return replace(chunking(call, sizes), rows=7, tokens_of_rows=5)

    run(made).sum().backward()
    with mock.patch.object(Call, "chunking", in_blocks):
        run(made).sum().backward()
    found = weight.main_grad.float() if has_main_grad else weight.grad
    near = {"rtol": 2**-7, "atol": 1e-2} if has_main_grad else {}
    torch.testing.assert_close(found, plain.output_layer.weight.grad, **near)


def said_of_logits(caplog: pytest.LogCaptureFixture) -> list[str]:
    return re.findall(r"logits made (\w+)", caplog.text)


@pytest.mark.parametrize(
    "settings", [{}, {"calculate_per_token_loss": True}, {"mtp": True}], ids=str
)
def test_logits_are_made_once_where_the_loss_mask_is_known(
    logged: Any, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    """For MTP's heads twice; and by Megatron's own mean the gradients that are kept hold."""
    made, mask = in_chunks(model("gpt", **settings)), (LABELS % 3 > 0).float()
    factors: list[float | None] = []
    factor = Kept.factor
    with (
        caplog.at_level(logging.INFO),
        mock.patch.object(
            Kept, "factor", lambda *given: factors.append(factor(*given)) or factors[-1]
        ),
    ):
        total = (run(made, loss_mask=mask) * mask).sum()
        number = 1 if made.config.calculate_per_token_loss else mask.sum()
        (total / number / 4).backward()
        assert said_of_logits(caplog) == ["twice"] * made.mtp_process + ["once"]
        assert factors == [0.25], "a power of two: what is kept is rounded once"
        run(made)
    assert sorted(said_of_logits(caplog)) == ["once", "twice"]
    assert "dW by torch" in caplog.text


def test_apexs_kernel_is_taken_under_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    apex = SimpleNamespace(wgrad_gemm_accum_fp32=object())
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", apex, raising=False)
    assert fused_kernel(True) == ("Apex", apex.wgrad_gemm_accum_fp32)
    assert fused_kernel(False)[0] != "Apex"


def fake_transformer_engine(monkeypatch: pytest.MonkeyPatch, general_gemm: Any) -> None:
    module = SimpleNamespace(general_gemm=general_gemm)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cpp_extensions", module)


def test_transformer_engines_kernel_where_apex_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: dict[str, Any] = {}

    def general_gemm(A: Any, B: Any, out_dtype: Any = None, **options: Any) -> None:
        called.update(A=A, B=B, out_dtype=out_dtype, **options)

    fake_transformer_engine(monkeypatch, general_gemm)
    name, kernel = fused_kernel(False)
    total = torch.zeros(1)
    kernel("input", "gradient", total)
    assert name == "TransformerEngine"
    assert called["out"] is total and called["out_dtype"] is total.dtype
    assert (called["A"], called["B"], called["layout"]) == ("input", "gradient", "NT")
    assert called["accumulate"] and called["grad"]


def test_an_old_transformer_engine_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformer_engine(monkeypatch, lambda A, B, workspace, **_: None)
    assert fused_kernel(False) == ("torch", None)


def test_a_kernel_serves_a_gpu_alone() -> None:
    calls: list[Any] = []
    weight = parameter()
    place = MainGradSum(weight, lambda *given: calls.append(given))
    gradient, hidden, dw = product()
    place.add_product(gradient, hidden)
    assert not calls
    torch.testing.assert_close(weight.main_grad, 1 + dw)
    on_a_gpu: Any = SimpleNamespace(is_cuda=True)
    place.add_product(gradient, on_a_gpu)
    assert [tuple(map(id, call)) for call in calls] == [
        (id(on_a_gpu), id(gradient.narrow), id(weight.main_grad))
    ]


def test_the_installed_kernel_reaches_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[Any] = []

    def sum_with(weight: Tensor, kernel: Any = None) -> OwnSum:
        kernels.append(kernel)
        return OwnSum(weight)

    monkeypatch.setattr(lm_head, "fused_kernel", lambda _: ("fast", print))
    monkeypatch.setattr(lm_head, "weight_sum", sum_with)
    run(in_chunks(model())).sum().backward()
    assert kernels and all(kernel is print for kernel in kernels)
