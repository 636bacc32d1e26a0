"""The output processor, the waiting for weights and main_grad, on stand-ins. (fast tier)

tests/training runs the same with Megatron itself.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("megatron.training.models.gpt")
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, layers  # noqa: E402

from megatron_burst.config import LmHeadConfig  # noqa: E402
from megatron_burst.loss.products import LogitsGradient, OwnSum  # noqa: E402
from megatron_burst.plugin.hooks import lm_head  # noqa: E402
from megatron_burst.plugin.hooks.lm_head import (  # noqa: E402
    ChunkedHead,
    ChunkedOutput,
    wait_for_weights,
)
from megatron_burst.plugin.hooks.main_grad import MainGradSum, fused_kernel, weight_sum  # noqa: E402
from tests.loss.oracle import from_logits  # noqa: E402

TOKENS, BATCH, ROWS, SIZE = 6, 2, 20, 8
CONFIG = LmHeadConfig(loss="chunked")


class OutputLayer(torch.nn.Module):
    """What the processor uses of a ColumnParallelLinear; it is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(ROWS, SIZE))
        self.output_size, self.tp_group, self.sequence_parallel = ROWS, None, False

    def forward(self, _: Tensor) -> Tensor:
        raise AssertionError("the output layer was called")


def transformer(**settings: Any) -> Any:
    return SimpleNamespace(
        **{"gradient_accumulation_fusion": False, "calculate_per_token_loss": True, **settings}
    )


def run(output: ChunkedOutput, layer: Any = None, **changes: Any) -> Tensor:
    torch.manual_seed(0)
    layer = layer or OutputLayer()
    arguments = {
        "hidden_states": torch.randn(TOKENS, BATCH, SIZE, requires_grad=True),
        "output_layer": layer,
        "output_weight": None,
        "labels": torch.randint(0, ROWS, (BATCH, TOKENS)),
        "loss_mask": torch.ones(BATCH, TOKENS),  # is given, and not needed
        "scale_logits": lambda logits: logits,
        "input_ids": None,
        "config": None,
        **changes,
    }
    return output(**arguments)


def expected(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    logits = torch.einsum("sbd,vd->bsv", hidden, weight)
    return from_logits(logits, labels, logit_scale=scale)


def test_losses_come_by_sample_and_token_in_float32() -> None:
    layer, hidden = OutputLayer(), torch.randn(TOKENS, BATCH, SIZE)
    labels = torch.randint(0, ROWS, (BATCH, TOKENS))
    found = run(ChunkedOutput(CONFIG, transformer()), layer, hidden_states=hidden, labels=labels)
    assert found.shape == (BATCH, TOKENS) and found.is_contiguous()
    torch.testing.assert_close(found, expected(hidden, layer.weight, labels))


def test_the_shared_weight_is_taken_where_there_is_one() -> None:
    layer, hidden = OutputLayer(), torch.randn(TOKENS, BATCH, SIZE)
    shared = torch.randn(ROWS, SIZE)
    labels = torch.randint(0, ROWS, (BATCH, TOKENS))
    layer.weight = None
    found = run(
        ChunkedOutput(CONFIG, transformer()),
        layer,
        **{"hidden_states": hidden, "labels": labels, "output_weight": shared},
    )
    torch.testing.assert_close(found, expected(hidden, shared, labels))


def test_width_scaled_logits() -> None:
    layer, hidden = OutputLayer(), torch.randn(TOKENS, BATCH, SIZE)
    labels = torch.randint(0, ROWS, (BATCH, TOKENS))
    found = run(
        ChunkedOutput(CONFIG, transformer()),
        layer,
        **{"hidden_states": hidden, "labels": labels, "scale_logits": lambda x: x * 0.25},
    )
    torch.testing.assert_close(found, expected(hidden, layer.weight, labels, 0.25))


@pytest.mark.parametrize("model_has_the_mask", [True, False])
@pytest.mark.parametrize("wrong", [-1, -100, ROWS])
def test_masked_labels_may_be_anything(wrong: int, model_has_the_mask: bool) -> None:
    """As in Megatron, whose loss of such a label is meaningless, finite and masked."""
    mask = torch.ones(BATCH, TOKENS)
    mask[1, 2] = 0
    found = []
    for label in (0, wrong):
        labels = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        labels[1, 2] = label
        hidden, layer = torch.linspace(-1, 1, TOKENS * BATCH * SIZE), OutputLayer()
        hidden = hidden.view(TOKENS, BATCH, SIZE).requires_grad_()
        torch.nn.init.constant_(layer.weight, 0.5)
        given = {"labels": labels, "loss_mask": mask if model_has_the_mask else None}
        losses = run(ChunkedOutput(CONFIG, transformer()), layer, hidden_states=hidden, **given)
        (losses * mask).sum().backward()
        found.append(((losses * mask).detach(), hidden.grad, layer.weight.grad))
    for right, with_wrong in zip(*found, strict=True):
        assert torch.equal(right, with_wrong)


def test_a_wrong_label_that_counts_is_an_error() -> None:
    labels = torch.full((BATCH, TOKENS), ROWS)
    losses = run(ChunkedOutput(CONFIG, transformer()), labels=labels)
    assert (losses > 1e29).all()
    with pytest.raises(ValueError, match=f"target {ROWS} is outside"):
        losses.sum().backward()


def test_evaluation_makes_no_gradients(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), torch.no_grad():
        loss = run(ChunkedOutput(CONFIG, transformer()))
    assert not loss.requires_grad and not caplog.records


# Waiting for weights, and hooks that cannot be served.


def test_hooks_before_the_output_layer_run() -> None:
    layer, ran = OutputLayer(), []
    layer.register_forward_pre_hook(lambda *seen: ran.append(seen))
    layer.register_forward_pre_hook(lambda *seen: ran.append(seen), with_kwargs=True)
    hidden = torch.randn(TOKENS, BATCH, SIZE)
    run(ChunkedOutput(CONFIG, transformer()), layer, hidden_states=hidden)
    assert ran == [(layer, (hidden,)), (layer, (hidden,), {})]


def test_hooks_that_want_logits_or_change_the_input_are_refused() -> None:
    layer = OutputLayer()
    handle = layer.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="forward hook of the output layer wants its logits"):
        wait_for_weights(layer, torch.zeros(1))
    handle.remove()
    layer.register_forward_pre_hook(lambda module, inputs: inputs)
    with pytest.raises(ValueError, match="forward-pre-hook of the output layer changes its input"):
        wait_for_weights(layer, torch.zeros(1))


# Attaching.


def model(layer: Any = None, **settings: Any) -> GPTModel:
    """A GPTModel without its parts."""
    made = GPTModel.__new__(GPTModel)
    torch.nn.Module.__init__(made)
    made.post_process = True
    made.config = transformer(**settings)
    if layer is None:
        layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
        torch.nn.Module.__init__(layer)
        layer.bias, layer.gtp_remat_size = None, 1
    made.output_layer = layer
    return made


def test_a_stage_with_output_gets_a_hook_and_others_do_not() -> None:
    last, first = model(), model()
    first.post_process = False
    assert ChunkedHead(CONFIG)([first, last]) == [first, last]
    assert len(last._forward_pre_hooks) == 1 and not first._forward_pre_hooks


def test_the_hook_answers_calls_with_labels() -> None:
    made = model()
    ChunkedHead(CONFIG)([made])
    (hook,) = made._forward_pre_hooks.values()
    labels = torch.zeros(1, 1)
    assert hook(made, (None, None, None), {"labels": None}) is None
    assert hook(made, (None, None, None), {}) is None
    _, by_name = hook(made, (None, None, None), {"labels": labels})
    _, by_place = hook(made, (None, None, None, None, labels), {})
    for kwargs in (by_name, by_place):
        assert isinstance(kwargs["output_processor"], ChunkedOutput)
    with pytest.raises(ValueError, match="both bring an output_processor"):
        hook(made, (None, None, None), {"labels": labels, "output_processor": print})


def with_bias() -> Any:
    layer = model().output_layer
    layer.bias = torch.nn.Parameter(torch.zeros(1))
    return layer


def spread() -> Any:
    layer = model().output_layer
    layer.gtp_remat_size = 2
    return layer


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: torch.nn.Linear(1, 1), "Linear has no hook for its output, only GPTModel has"),
        (lambda: model(torch.nn.Linear(1, 1)), "the output layer is a Linear, not a ColumnPar"),
        (lambda: model(with_bias()), "the output layer has a bias"),
        (lambda: model(spread()), "the output layer is spread over 2 GTP ranks"),
        (lambda: model(mtp_num_layers=1), "mtp_num_layers = 1: Megatron's MTP"),
        (lambda: model(defer_embedding_wgrad_compute=True), "defer_embedding_wgrad_compute = True"),
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


def test_the_whole_loss_sums_into_main_grad() -> None:
    layer = OutputLayer()
    layer.weight = parameter()
    for _ in range(2):
        layer.weight.main_grad.zero_()
        layer.weight.grad = None
        output = ChunkedOutput(CONFIG, transformer())
        hidden = torch.randn(TOKENS, BATCH, SIZE, requires_grad=True)
        labels = torch.randint(0, ROWS, (BATCH, TOKENS))
        run(output, layer, hidden_states=hidden, labels=labels).sum().backward()
        plain = layer.weight.detach().clone().requires_grad_()
        expected(hidden.detach(), plain, labels).sum().backward()
        torch.testing.assert_close(layer.weight.main_grad, plain.grad)
        assert layer.weight.grad_added_to_main_grad
        layer.weight.grad_added_to_main_grad = False


def test_apexs_kernel_is_taken_under_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    apex = SimpleNamespace(wgrad_gemm_accum_fp32=object())
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", apex, raising=False)
    assert fused_kernel(True) == ("Apex", apex.wgrad_gemm_accum_fp32)
    assert fused_kernel(False)[0] != "Apex"


def fake_transformer_engine(monkeypatch: pytest.MonkeyPatch, general_gemm: Any) -> None:
    import sys

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
    run(ChunkedOutput(CONFIG, transformer())).sum().backward()
    assert kernels and all(kernel is print for kernel in kernels)
