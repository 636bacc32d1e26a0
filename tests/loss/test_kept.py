"""Gradients that the forward makes: those of float64, wherever they hold and where not. (fast)"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_burst import linear_cross_entropy
from megatron_burst.loss import function
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk import InTorch
from megatron_burst.loss.chunk_size import KEPT_MB, Chunking, Sizes, choose, within
from megatron_burst.loss.kept import Keeper
from tests.loss.oracle import (
    OBJECTIVES,
    Case,
    Result,
    errors,
    make_case,
    oracle,
    share,
    together,
)
from tests.loss.test_memory import MIB, K
from tests.oracle import relative_error
from tests.workers import Team, WorkerPool

TOLERANCE = 2e-6  # float32
FACTOR = 0.37


def a_mask(case: Case) -> Tensor:
    """Zeros, ones and what a weighted loss has."""
    numbers = torch.arange(case.targets.numel()).view(case.targets.shape)
    return (numbers % 4).clamp(max=2).div(2).where(numbers % 3 > 0, 0.3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of which logits were made."""
    tokens: list[int] = []
    logits = InTorch._logits

    def counting(self: InTorch, hidden: Tensor) -> Tensor:
        tokens.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(InTorch, "_logits", counting)
    return tokens


def losses_of(*args: Any, **named: Any) -> Tensor:
    return function.apply(*args, **named)[0]


def with_weights(case: Case, grad: Tensor, weights: Tensor | None, **arguments: Any) -> Result:
    hidden, weight = (x.detach().clone().requires_grad_() for x in (case.hidden, case.weight))
    loss = losses_of(hidden, weight, case.targets, Call(weights=weights, **arguments))
    return Result(loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad.to(loss.dtype)))


@pytest.mark.parametrize("chunk_size", [1, 5, 21, 100])
@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if "entropy" not in name])
def test_float32_equals_float64(made: list[int], objective: str, chunk_size: int) -> None:
    arguments = OBJECTIVES[objective]
    case = make_case(ignore_index=arguments.get("ignore_index", -100))
    grad = a_mask(case) * FACTOR
    found = with_weights(case, grad, a_mask(case) / 7, chunk_size=chunk_size, **arguments)
    ignored = case.targets == arguments.get("ignore_index", -100)
    assert sum(made) == (~ignored).sum(), "logits are made once, of what counts"
    assert max(errors(found, oracle(case, grad, **arguments))) < TOLERANCE


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("tokens", [(1,), (3, 7), (333,)])
def test_reductions_are_torchs(made: list[int], reduction: str, tokens: tuple[int, ...]) -> None:
    case = make_case(tokens, ignore_index=0)
    inputs = [x.clone().requires_grad_() for x in (case.hidden, case.weight)]
    exact = [x.double().detach().requires_grad_() for x in inputs]
    flat = case.targets.flatten()
    logits = F.linear(*exact).flatten(0, -2)
    expected = F.cross_entropy(logits, flat, ignore_index=0, reduction=reduction)
    options: Any = {"ignore_index": 0, "reduction": reduction, "chunk_size": 50}
    found = linear_cross_entropy(*inputs, case.targets, **options)
    (found * FACTOR).backward()
    (expected * FACTOR).backward()
    assert sum(made) == (case.targets != 0).sum() and found.shape == ()
    result, wanted = (
        Result(x[0].detach(), x[1].grad, x[2].grad) for x in ((found, *inputs), (expected, *exact))
    )
    assert max(errors(result, wanted)) < TOLERANCE


def test_another_reduction_is_refused() -> None:
    case = make_case()
    options: Any = {"reduction": "max"}
    with pytest.raises(ValueError, match="reduction must be none, sum or mean, got 'max'"):
        linear_cross_entropy(*case[:3], **options)


GRADIENTS = {
    "of another mask": lambda mask: 1.0 - mask,
    "one token otherwise": lambda mask: mask.clone().index_fill_(0, torch.tensor([2]), 0.31),
    "one token a little otherwise": lambda mask: mask * (1 + 1e-5 * (torch.arange(21) == 2)),
    "zero": torch.zeros_like,
    "infinite": lambda mask: mask * math.inf,
    "not a number": lambda mask: mask * math.nan,
    "random": lambda mask: torch.randn(21, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_what_is_no_multiple_is_computed_exactly(made: list[int], gradient: str) -> None:
    case = make_case((21,))
    mask = a_mask(case)
    grad = GRADIENTS[gradient](mask)
    found = with_weights(case, grad, mask, chunk_size=4)
    counts = case.targets != -100
    assert sum(made) == counts.sum() + (counts & (grad != 0)).sum(), "logits are made again"
    if torch.isfinite(grad).all():
        assert max(errors(found, oracle(case, grad))) < TOLERANCE
    for ours, expected in zip(found, with_weights(case, grad, None, chunk_size=4), strict=True):
        assert torch.equal(ours.isfinite(), expected.isfinite())
        torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.parametrize("grad", [0.0, 1.0])
def test_a_mask_of_zeros(made: list[int], grad: float) -> None:
    """That masks losses without a gradient, or with one after all."""
    case = make_case()
    given = torch.full_like(case.grad, grad)
    found = with_weights(case, given, torch.zeros_like(case.grad), chunk_size=4)
    assert max(errors(found, oracle(case, given))) < TOLERANCE
    assert sum(made) == (34 if grad else 17), "of those that are not ignored"


def test_a_wrong_target_counts_where_its_gradient_does() -> None:
    case = make_case()
    case.targets[1, 2] = 48
    mask = torch.ones_like(case.grad)
    with pytest.raises(ValueError, match="target 48 is outside"):
        with_weights(case, mask, mask)
    mask[1, 2] = 0
    found = with_weights(case, FACTOR * mask, mask)
    case.targets[1, 2] = 0
    assert max(errors(found, oracle(case, FACTOR * mask))[1:]) < TOLERANCE


def test_evaluation_and_float16_keep_nothing(made: list[int]) -> None:
    case = make_case(dtype=torch.float16)
    inputs = [x.clone().requires_grad_() for x in (case.hidden, case.weight)]
    said: list[Chunking] = []
    call = Call(weights=torch.ones_like(case.grad), on_chunking=said.append)
    losses_of(*inputs, case.targets, call)
    inputs = [x.float().detach().requires_grad_() for x in inputs]
    with torch.no_grad():
        losses_of(*inputs, case.targets, call)
    losses_of(*inputs, case.targets, call)
    assert [chunking.products for chunking in said] == [4, 4, 3]


@pytest.mark.parametrize(("factor", "allowed"), [(2**-5, 1.001), (FACTOR, 1.5)])
def test_bfloat16_is_rounded_once_by_powers_of_two(factor: float, allowed: float) -> None:
    """Any other factor rounds dh, which is kept in bfloat16, once more; dW is kept in float32."""
    kept, again = [], []
    for seed in range(6):
        case = make_case((256,), 1024, 64, torch.bfloat16, seed)
        mask = (torch.arange(256) % 5 > 0) / 205.0
        arguments = {"chunk_size": 100}
        expected = oracle(case, mask * factor)
        kept.append(errors(with_weights(case, mask * factor, mask, **arguments), expected))
        again.append(errors(with_weights(case, mask * factor, None, **arguments), expected))
    means = [torch.tensor(many).mean(0) for many in (kept, again)]
    print(f"loss, d_hidden, d_weight: kept {means[0]}, made again {means[1]}")
    assert (means[0] <= torch.tensor([1.001, allowed, 1.001]) * means[1]).all()
    assert means[0].max() < 2**-8


# Ranks.


def on_a_rank(team: Team, case: Case, parts: bool, grads: list[Tensor]) -> list[Any]:
    hidden, weight = share(case, team.rank, team.group.size(), parts)
    said: list[Chunking] = []
    call = Call(
        weights=a_mask(case),
        chunk_size=10,
        label_smoothing=0.1,
        z_loss=1e-3,
        logit_softcap=5.0,
        group=team.group,
        sequence_parallel=parts,
        on_chunking=said.append,
    )
    found: list[Any] = []
    for grad in grads:
        loss = losses_of(hidden, weight, case.targets, call)
        assert said[-1].keeps
        found.append(Result(loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad)))
    return found


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_the_vocabulary(workers: WorkerPool, ranks: int, parts: bool) -> None:
    """The second gradient is no multiple of the mask."""
    case = make_case((8, 3))
    grads = [FACTOR * a_mask(case), case.grad]
    shares = workers.run(ranks, on_a_rank, case, parts, grads)
    for number, grad in enumerate(grads):
        whole = together([each[number] for each in shares], parts)
        expected = oracle(case, grad, label_smoothing=0.1, z_loss=1e-3, logit_softcap=5.0)
        assert max(errors(whole, expected)) < TOLERANCE


# Memory, and who keeps.

BIG = Sizes(tokens=16 * K, vocabulary=128 * K, hidden=4096, dtype=torch.bfloat16)


def sizes(**changes: Any) -> Sizes:
    return replace(BIG, **{"kept_apart": True, "fused": True, **changes})


def test_a_limit_decides_and_says_what_it_would_take() -> None:
    found = choose(sizes(), None, None)  # dW takes 2 GiB
    assert not found.keeps and found.products == 4 and found == choose(sizes(), None, None)
    for vocabulary in (128 * K, 20350, 50257, 151936):  # some are no whole MiB
        less = sizes(vocabulary=vocabulary, tokens=4096)
        said = re.search(r"\(once with (\d+) MiB\)$", str(choose(less, None, 64 * MIB)))
        assert said and choose(less, None, int(said[1]) * MIB).keeps
    enough = math.ceil(found.once)
    assert choose(sizes(), None, enough * MIB).keeps
    assert not choose(sizes(), None, (enough - 2) * MIB).keeps
    assert choose(sizes(), None, enough * MIB).peak <= enough * MIB
    assert "logits made once" in str(choose(sizes(), None, enough * MIB))


def test_by_default_a_small_dw_is_kept_or_one_that_is_there_anyhow() -> None:
    assert 4 * 128 * K * 2048 == KEPT_MB * MIB
    assert choose(sizes(hidden=2048), None, None).keeps
    assert not choose(sizes(hidden=2049), None, None).keeps
    assert choose(sizes(sums_apart=True), None, None).keeps
    plain = within(sizes(sums_apart=True), None)
    assert choose(sizes(sums_apart=True), None, None).peak == plain.peak
    free = sizes(dtype=torch.float32, fused=False, kept_apart=False)
    assert choose(free, None, 64 * MIB).keeps and choose(free, 5, None).keeps
    assert not choose(sizes(kept_apart=None), 5, None).keeps


def one_model() -> tuple[Case, Tensor, list[Chunking], Callable[[], Tensor]]:
    """Inputs that want gradients, a mask, what was said, and a forward with one keeper."""
    case, said = make_case(), []
    for x in (case.hidden, case.weight):
        x.requires_grad_()
    mask = a_mask(case)
    call = Call(weights=mask, keeper=Keeper(), on_chunking=said.append)
    return case, mask, said, lambda: losses_of(*case[:3], call)


def check_gradients(case: Case, expected: Result) -> None:
    for x, wanted in ((case.hidden, expected.d_hidden), (case.weight, expected.d_weight)):
        assert relative_error(x.grad, wanted) < TOLERANCE


def test_one_forward_at_a_time_keeps() -> None:
    case, mask, said, forward = one_model()
    first, second = (forward() for _ in range(2))
    first.backward(mask)
    third = forward()
    assert [chunking.keeps for chunking in said] == [True, False, True]
    second.backward(mask)
    third.backward(mask)
    check_gradients(case, oracle(case, 3 * mask))


def test_a_second_backward_computes_them() -> None:
    """What was kept is scaled in place."""
    case, mask, _, forward = one_model()
    loss = forward()
    for _ in range(2):
        loss.backward(FACTOR * mask, retain_graph=True)
    check_gradients(case, oracle(case, 2 * FACTOR * mask))


@pytest.mark.parametrize("lives", [True, False])
def test_who_keeps_depends_on_no_garbage(lives: bool) -> None:
    """Else ranks would differ: a loss that nobody uses may be in a cycle."""
    case, mask, said, forward = one_model()
    losses = [forward()]
    if not lives:
        losses.clear()
    losses += [forward() for _ in range(4)]
    assert [chunking.keeps for chunking in said] == [True, False, False, False, True]
    losses[0].backward(mask)  # that had kept first, and gave up
    losses[-1].backward(mask)
    check_gradients(case, oracle(case, 2 * mask))
    forward()
    assert said[-1].keeps


def test_three_wrong_in_a_row_end_it(caplog: pytest.LogCaptureFixture) -> None:
    case, mask, said, forward = one_model()
    for grad in (case.grad, case.grad, mask, *4 * [case.grad]):
        forward().backward(grad)
    assert [chunking.keeps for chunking in said] == [True] * 6 + [False]
    assert caplog.text.count("no multiple of the loss mask") == 1


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_gradients_of_zero_are_not_wrong(made: list[int], share: float) -> None:
    """As of a micro-batch that is masked whole, or whose loss is dropped."""
    case, call = make_case(), Call(weights=torch.full((3, 7), share))
    inputs = case.hidden.clone().requires_grad_(), case.weight
    for _ in range(4):
        losses_of(*inputs, case.targets, call).backward(torch.zeros(3, 7))
    made.clear()
    losses_of(*inputs, case.targets, replace(call, weights=torch.ones(3, 7))).sum().backward()
    assert sum(made) == (case.targets >= 0).sum(), "logits are still made once"
