"""Memory stays within the limit asked for, counted in live bytes. (fast tier; long ones slow)

On the device "meta" nothing is computed, so that real sizes can be counted; a few cases are
computed, which must give the same counts.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_burst import linear_cross_entropy
from megatron_burst.loss import products
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk_size import MIB, Chunking
from megatron_burst.loss.function import apply
from megatron_burst.tools.live_bytes import LiveBytes
from tests.loss.oracle import OBJECTIVES
from tests.tier import one_in, slow_if

K = 1024
VOCABULARIES = (32 * K, 128 * K, 256 * K)
TOKENS = (8 * K, 16 * K, 32 * K, 64 * K)
LIMIT_MB = 512


def peak_bytes(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    tokens: int,
    vocabulary: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    device: str = "meta",
) -> int:
    """Bytes of the largest moment of forward and backward, without inputs, weight, gradients.

    And without what no limit is for: 32 bytes a token, 48 in float64.
    """
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    # Small logits: probabilities that are no normal floats would take a CPU many times as long.
    weight = torch.randn(vocabulary, hidden, device=device, dtype=dtype) * hidden**-0.5
    weight.requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    with LiveBytes((states, weight, targets)) as live:
        made = function(states, weight, targets)
        sum(x.sum() for x in ([made] if isinstance(made, Tensor) else made)).backward()
    gradients = (tokens + vocabulary) * hidden * dtype.itemsize
    assert live.now >= gradients, "the gradients have been counted"
    return live.peak - gradients - tokens * (48 if dtype == torch.float64 else 32)


def test_hooks_of_saved_tensors_may_let_go_of_the_weight() -> None:
    """As those of a checkpoint and an offload do, of one that was cast for the call."""
    hidden, leaf = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    weight, targets = leaf * 1, torch.arange(3)
    alive = StorageWeakRef(weight.untyped_storage())
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        loss = linear_cross_entropy(hidden, weight, targets).sum()
    del weight
    assert alive.expired()
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ leaf.t(), targets), leaf)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], 3 * expected)


@pytest.fixture(autouse=True)
def meta_tensors_have_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    # The way of a GPU: products are made in parts, in memory that the logits have left.
    monkeypatch.setattr(products, "best_way", lambda *_: products.rounded_parts)


def chunked(**arguments: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda *tensors: linear_cross_entropy(*tensors, **arguments)


def unfused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 64), (torch.bfloat16, 4096)])
@pytest.mark.parametrize("tokens", slow_if(TOKENS[1:], TOKENS))
@pytest.mark.parametrize("vocabulary", slow_if({128 * K}, VOCABULARIES))
def test_the_limit_holds(vocabulary: int, tokens: int, dtype: torch.dtype, hidden: int) -> None:
    size = {"tokens": tokens, "vocabulary": vocabulary, "hidden": hidden, "dtype": dtype}
    peak = peak_bytes(chunked(memory_mb=LIMIT_MB), **size)
    assert 0.4 * LIMIT_MB * MIB < peak <= LIMIT_MB * MIB


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    ("objective", "dtype"), one_in(5, itertools.product(OBJECTIVES, DTYPES)), ids=str
)
def test_the_limit_holds_for_every_objective(objective: str, dtype: torch.dtype) -> None:
    function = chunked(memory_mb=48, **OBJECTIVES[objective])
    size = {"tokens": 2 * K, "vocabulary": 32 * K, "hidden": 64, "dtype": dtype}
    assert peak_bytes(function, **size) <= 48 * MIB


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_takes_what_is_foretold(dtype: torch.dtype, keeps: bool) -> None:
    """Whether the forward keeps gradients or not."""
    foretold: list[Chunking] = []

    def function(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        mask = torch.ones(len(targets)) if keeps else None
        call = Call(memory_mb=64, on_chunking=foretold.append, weights=mask)
        return apply(hidden, weight, targets, call)[0]

    size = {"tokens": 4 * K, "vocabulary": 4 * K, "hidden": 64, "dtype": dtype}
    computed = peak_bytes(function, **size, device="cpu")
    assert foretold[0].keeps is keeps and foretold[0].tokens < 4 * K
    assert 0.9 * foretold[0].peak < computed <= foretold[0].peak <= 64 * MIB


def test_no_length_needs_more_than_the_limit() -> None:
    """The statistics of all tokens would take 1.75 MiB."""
    size = {"tokens": 16 * K, "vocabulary": 256, "hidden": 8, "dtype": torch.bfloat16}
    assert peak_bytes(chunked(memory_mb=1), **size) <= MIB


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(8 * K, 32 * K), (16 * K, 128 * K)])
def test_the_limit_holds_when_computed(tokens: int, vocabulary: int) -> None:
    size = {"tokens": tokens, "vocabulary": vocabulary, "hidden": 16}
    assert peak_bytes(chunked(memory_mb=LIMIT_MB), **size, device="cpu") <= LIMIT_MB * MIB


def test_sixteen_times_less_than_all_logits() -> None:
    """Measured at 1k x 8k; beyond, what all logits take grows with tokens x vocabulary."""
    small = {"tokens": 1 * K, "vocabulary": 8 * K, "hidden": 16}
    measured = peak_bytes(unfused, **small, device="cpu")
    assert measured == pytest.approx(peak_bytes(unfused, **small), rel=0.01)
    copies = measured / (K * 8 * K * 4)
    assert 2 <= copies < 4
    large = {"tokens": 32 * K, "vocabulary": 128 * K, "hidden": 16}
    by_formula = copies * large["tokens"] * large["vocabulary"] * 4
    assert by_formula == pytest.approx(peak_bytes(unfused, **large), rel=0.01)
    ours = peak_bytes(chunked(), **large)
    print(f"all logits {by_formula / MIB:.0f} MiB, in chunks {ours / MIB:.0f} MiB")
    assert by_formula >= 16 * ours


@pytest.mark.parametrize("parts", ["with the limit", "with the chunk size"])
def test_memory_grows_with_the_tokens_by_some_numbers_each(parts: str) -> None:
    """Between forward and backward one log-sum-exp a token is kept, not a row of logits."""
    arguments = {"memory_mb": 64} if parts == "with the limit" else {"chunk_size": 1000}
    weight = torch.randn(32 * K, 16, device="meta").requires_grad_()
    kept = []
    for tokens in (4 * K, 16 * K):
        hidden = torch.randn(tokens, 16, device="meta").requires_grad_()
        targets = torch.zeros(tokens, dtype=torch.long, device="meta")
        with LiveBytes((hidden, weight, targets)) as live:
            loss = linear_cross_entropy(hidden, weight, targets, **arguments)
        kept.append(live.now / tokens)
        del loss
    assert kept == [8, 8]  # the loss and the log-sum-exp
