"""An MLP in chunks equals the whole, runs hooks of weights once, and holds one chunk."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_burst.plans.choice.mlp_chunks import choose_mlp_chunks
from megatron_burst.tools.live_bytes import LiveBytes

pytest.importorskip("megatron.core.transformer.mlp")
from megatron_burst.plugin.hooks.mlp import ChunkedMlp  # noqa: E402

TOKENS, HIDDEN, WIDTH = 13, 6, 10


class Mlp(torch.nn.Module):
    """Megatron's as far as it is seen here: gated, with a bias inside and one that is handed on."""

    def __init__(self, dtype: torch.dtype, hidden: int = HIDDEN, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = {"dtype": dtype, "device": torch.get_default_device()}
        self.fc1 = torch.nn.Linear(hidden, 2 * width, **made)
        self.fc2 = torch.nn.Linear(width, hidden, bias=False, **made)
        self.bias = torch.nn.Parameter(torch.ones(hidden, **made))
        self.config = SimpleNamespace(
            ffn_hidden_size=width, gated_linear_unit=True, sequence_parallel=True
        )
        self.calls = 0

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        gate, linear = self.fc1(hidden).chunk(2, -1)
        return self.fc2(F.silu(gate) * linear), self.bias


class Shared(Mlp):
    """Shared experts return a tensor alone."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden)[0] * torch.sigmoid(hidden[..., :1])


type Run = Callable[[Mlp, Tensor], Tensor]


def add_residual(mlp: Mlp, x: Tensor) -> Tensor:
    """What a layer does behind its norm."""
    found = mlp(x.sin())
    output, bias = found if isinstance(found, tuple) else (found, 0.0)
    return x + (output + bias)


def gradients(mlp: Mlp, run: Run, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(TOKENS, 2, HIDDEN, dtype=dtype, requires_grad=True)
    output = run(mlp, x)
    output.cos().sum().backward()
    found = [output.detach(), x.grad, *(weight.grad for weight in mlp.parameters())]
    return [t for t in found if t is not None]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def check_chunked(run: Run, chunks: int, *, is_read: bool = True, kind: type[Mlp] = Mlp) -> Mlp:
    """Compare one in chunks with the whole and return it."""
    expected = gradients(kind(torch.float64), run, torch.float64)
    chunked = kind(torch.float64)
    ChunkedMlp(chunked, is_read, chunks)
    found = gradients(chunked, run, torch.float64)
    assert len(found) == len(expected) == (5 if kind is Shared else 6)
    check_same(found, expected)
    return chunked


@pytest.mark.parametrize("chunks", [2, 5, 13, 40])
@pytest.mark.parametrize("kind", [Mlp, Shared])
def test_equals_the_whole(kind: type[Mlp], chunks: int) -> None:
    check_chunked(add_residual, chunks, kind=kind)


def replayed(mlp: Mlp, x: Tensor) -> Tensor:
    return checkpoint(lambda y: add_residual(mlp, y), x, use_reentrant=True)


def test_a_replay_of_one_layer_computes_no_output() -> None:
    """The output's place is NaN there: whatever read it would be seen."""
    chunked = check_chunked(replayed, 4, is_read=False)
    assert chunked.calls == 4 + 4, "first pass and backward"


def test_a_replay_whose_output_is_read_computes_it() -> None:
    def twice(mlp: Mlp, x: Tensor) -> Tensor:
        both = [lambda y: add_residual(mlp, y)] * 2
        return checkpoint(lambda y: both[1](both[0](y)), x, use_reentrant=True)

    check_chunked(twice, 4)


def test_the_hook_of_a_weight_runs_once() -> None:
    chunked, seen = Mlp(torch.float32), []
    ChunkedMlp(chunked, True, 4)
    alive = []  # a parameter does not hold its accumulator, and gc ends a hook that alone does
    for weight in chunked.parameters():
        alive.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
        alive[-1].register_hook(lambda *_, w=weight: seen.append(id(w)))
    gradients(chunked, add_residual, torch.float32)
    assert sorted(seen) == sorted(id(weight) for weight in chunked.parameters())


class Fused(torch.autograd.Function):
    """A product that adds its weight's gradient to `main_grad`, by Megatron's contract."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.main_grad += (gradient.flatten(0, 1).T @ x.flatten(0, 1)).to(weight.main_grad.dtype)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)


def test_gradients_that_a_kernel_added_are_not_added_again() -> None:
    class WithFusion(Mlp):
        def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
            return Fused.apply(F.silu(self.fc1(hidden))[..., :WIDTH], self.fc2.weight), self.bias

    def run(chunks: int) -> tuple[Tensor, bool]:
        mlp = WithFusion(torch.float64)
        for weight in mlp.parameters():
            weight.main_grad = torch.zeros_like(weight)
            weight.grad_added_to_main_grad = weight is mlp.fc1.weight  # of a micro-batch before
        if chunks > 1:
            ChunkedMlp(mlp, True, chunks)
        found = gradients(mlp, add_residual, torch.float64)
        flags = [weight.grad_added_to_main_grad for weight in mlp.parameters()]
        assert chunks == 1 or flags == [weight is mlp.fc2.weight for weight in mlp.parameters()]
        kept = [t for t in found if not t.isnan().any()]
        return torch.cat([t.flatten() for t in (*kept, mlp.fc2.weight.main_grad)])

    check_same([run(4)], [run(1)])


def test_weight_gradients_are_summed_in_float32() -> None:
    """In bfloat16 a sum over 64 chunks would lose what is rounded once a chunk."""

    def run(dtype: torch.dtype, chunks: int) -> Tensor:
        mlp = Mlp(torch.float32).to(dtype)
        ChunkedMlp(mlp, True, chunks)
        torch.manual_seed(1)
        x = torch.randn(1024, 1, HIDDEN, dtype=torch.bfloat16).to(dtype)
        mlp(x)[0].sum().backward()
        return mlp.fc2.weight.grad.double()

    exact, one, many = run(torch.float64, 1), run(torch.bfloat16, 1), run(torch.bfloat16, 64)
    assert (many - exact).norm() < 2 * (one - exact).norm()


def test_frozen_weights_and_inputs() -> None:
    chunked, whole = Mlp(torch.float64), Mlp(torch.float64)
    ChunkedMlp(chunked, True, 3)
    for mlp in (chunked, whole):
        mlp.fc1.weight.requires_grad_(False)
    x = torch.randn(TOKENS, 2, HIDDEN, dtype=torch.float64)
    for mlp in (chunked, whole):
        mlp(x)[0].sum().backward()
    assert chunked.fc1.weight.grad is None
    torch.testing.assert_close(chunked.fc2.weight.grad, whole.fc2.weight.grad)


def test_a_bias_that_is_no_parameter_is_refused() -> None:
    class Casting(Mlp):
        def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
            return super().forward(hidden)[0], self.bias.float()

    chunked = Casting(torch.float64)
    ChunkedMlp(chunked, True, 2)
    with pytest.raises(ValueError, match="no parameter of it"):
        chunked(torch.randn(TOKENS, 1, HIDDEN, dtype=torch.float64))


def test_one_chunk_lives_at_a_time() -> None:
    """In units of the hidden states: FFN 3.5 times as wide, as that of an 8B model."""
    tokens, hidden, width = 4096, 64, 224

    def peak(chunks: int) -> float:
        with torch.device("meta"):
            mlp = Mlp(torch.bfloat16, hidden, width)
            x = torch.empty(tokens, 1, hidden, dtype=torch.bfloat16, requires_grad=True)
            if chunks > 1:
                ChunkedMlp(mlp, False, chunks)
            with LiveBytes([x, *mlp.parameters()]) as live:
                replayed(mlp, x).sum().backward()
        return live.peak / x.nbytes

    whole, chunked = peak(1), peak(32)
    assert whole > 23 and chunked < 4.3, (whole, chunked)


@pytest.mark.parametrize(
    ("tokens", "between", "chunks"),
    [
        (131072, 3 * 14336, 21),  # 2 · 3 · 14336 / 4096, gated
        (131072, 2 * 14336, 14),
        (131072, 3 * 7168, 11),  # half of the width on this rank
        (16384, 3 * 14336, 8),  # 2048 tokens each
        (512, 3 * 14336, 1),
    ],
)
def test_automatic_chunks_are_those_by_hand(tokens: int, between: int, chunks: int) -> None:
    assert choose_mlp_chunks(tokens, 4096, between) == chunks
