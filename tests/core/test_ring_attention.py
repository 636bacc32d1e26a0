"""Ring attention against the float64 dense oracle: output, lse and all gradients. (fast tier)"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.cost import bytes_sent, kv_ring_bytes
from megatron_burst.kernels import KERNELS
from megatron_burst.layout import zigzag
from megatron_burst.mask import Relation
from megatron_burst.plan import flat_kv_backward, flat_ring_forward
from tests import oracle
from tests.workers import WorkerPool

FLOAT32_TOLERANCE = 3e-6
BFLOAT16_OVER_FLASH = 1.5
HEADS = {"mha": (4, 4), "gqa 4:1": (8, 2), "gqa 8:1": (8, 1)}


def make_inputs(
    batch: int, tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randn(batch, tokens, n, dim, generator=generator).to(dtype)

    return draw(heads[0]), draw(heads[1]), draw(heads[1]), draw(heads[0])


def attend(group: Any, inputs: tuple[Tensor, ...], mask: Mask, kernel: str) -> dict[str, Any]:
    """One rank's part, from whole tensors to its shards of all results and the bytes it sent."""
    context = BurstContext.create(BurstConfig(kernel=kernel), group)
    q, k, v, dout = (context.shard(x, dim=1) for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = ring_attention(q, k, v, context, mask=mask, return_lse=True)
    forward_bytes = context.bytes_sent
    out.backward(dout)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return {
        "results": (out.detach(), lse.transpose(1, 2), q.grad, k.grad, v.grad),
        "bytes": (forward_bytes, context.bytes_sent - forward_bytes),
        "round_trip": torch.equal(context.unshard(dout, dim=1), inputs[3]),
    }


def run_ring(
    workers: WorkerPool, ranks: int, inputs: tuple[Tensor, ...], mask: Mask, kernel: str
) -> tuple[oracle.Result, list[dict[str, Any]]]:
    replies = workers.run(ranks, attend, inputs, mask, kernel)
    layout = zigzag(inputs[0].shape[1], ranks)
    out, lse, dq, dk, dv = (
        layout.unshard([reply["results"][i] for reply in replies], dim=1) for i in range(5)
    )
    return oracle.Result(out, lse.transpose(1, 2), dq, dk, dv), replies


def expect(inputs: tuple[Tensor, ...], mask: Mask) -> oracle.Result:
    return oracle.attention(*inputs, oracle.visible_pairs(inputs[0].shape[1], mask.is_causal))


def errors(found: oracle.Result, expected: oracle.Result) -> dict[str, float]:
    return {
        name: oracle.relative_error(getattr(found, name), getattr(expected, name))
        for name in oracle.Result._fields
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.full()], ids=["causal", "full"])
def test_float32_equals_the_dense_oracle(
    workers: WorkerPool, ranks: int, heads: tuple[int, int], mask: Mask
) -> None:
    # The shortest legal length (one token a chunk), an odd chunk and an odd head size.
    for batch, chunk, dim in itertools.product((1, 2), (1, 13), (5, 16)):
        inputs = make_inputs(batch, 2 * ranks * chunk, heads, dim, torch.float32)
        found, replies = run_ring(workers, ranks, inputs, mask, "auto")
        worst = errors(found, expect(inputs, mask))
        assert max(worst.values()) < FLOAT32_TOLERANCE, (batch, chunk, dim, worst)
        assert all(reply["round_trip"] for reply in replies)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_reference_kernel_in_float64_is_exact(workers: WorkerPool, ranks: int) -> None:
    inputs = make_inputs(2, 2 * ranks * 5, (8, 2), 6, torch.float64)
    found, _ = run_ring(workers, ranks, inputs, Mask.causal(), "reference")
    assert max(errors(found, expect(inputs, Mask.causal())).values()) < 1e-14


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_bfloat16_is_nearly_as_exact_as_flash_attention_in_one_process(
    workers: WorkerPool, heads: tuple[int, int]
) -> None:
    inputs = make_inputs(1, 1024, heads, 32, torch.bfloat16)
    expected = expect(inputs, Mask.causal())
    flash = errors(one_process_flash(inputs), expected)
    for ranks in (2, 4, 8):
        found, _ = run_ring(workers, ranks, inputs, Mask.causal(), "auto")
        for name, error in errors(found, expected).items():
            assert error <= BFLOAT16_OVER_FLASH * flash[name], (ranks, name, error, flash)


def one_process_flash(inputs: tuple[Tensor, ...]) -> oracle.Result:
    q, k, v, dout = inputs
    kernel, scale = KERNELS["cpu"], q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, Relation.CAUSAL, scale)
    return oracle.Result(
        out, lse, *kernel.backward(dout, q, k, v, out, lse, Relation.CAUSAL, scale)
    )


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 8),
    batch=st.integers(1, 3),
    chunk=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 8]),
    dim=st.integers(1, 20),
    causal=st.booleans(),
    kernel=st.sampled_from(["cpu", "reference"]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_dense_oracle(
    workers: WorkerPool,
    ranks: int,
    batch: int,
    chunk: int,
    kv_heads: int,
    group: int,
    dim: int,
    causal: bool,
    kernel: str,
    seed: int,
) -> None:
    mask = Mask.causal() if causal else Mask.full()
    heads = (kv_heads * group, kv_heads)
    inputs = make_inputs(batch, 2 * ranks * chunk, heads, dim, torch.float32, seed)
    found, _ = run_ring(workers, ranks, inputs, mask, kernel)
    expected = expect(inputs, mask)
    for name in oracle.Result._fields:
        got, want = getattr(found, name), getattr(expected, name)
        # Tiny cases cancel: dq of a single visible key is exactly 0, so allow an absolute floor.
        assert (got.double() - want).norm() < FLOAT32_TOLERANCE * (
            want.norm() + want.numel() ** 0.5
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_counted_bytes_equal_the_plan(workers: WorkerPool, ranks: int) -> None:
    batch, chunk, (query_heads, kv_heads), dim = 2, 3, (8, 2), 6
    tokens = 2 * ranks * chunk
    inputs = make_inputs(batch, tokens, (query_heads, kv_heads), dim, torch.bfloat16)
    _, replies = run_ring(workers, ranks, inputs, Mask.causal(), "auto")
    sizes = kv_ring_bytes(
        local_tokens=batch * tokens // ranks,
        kv_heads=kv_heads,
        head_dims=2 * dim,
        element_bytes=2,
        gradient_bytes=4,
    )
    layout = zigzag(tokens, ranks)
    for rank, reply in enumerate(replies):
        forward = flat_ring_forward(layout, Mask.causal(), rank)
        backward = flat_kv_backward(layout, Mask.causal(), rank)
        assert reply["bytes"] == (bytes_sent(forward, sizes), bytes_sent(backward, sizes))
    # A hop of the backward is n·Hkv·(dk + dv)·(e + g); there are P-1.
    hop = batch * 2 * chunk * kv_heads * 2 * dim * (2 + 4)
    assert replies[0]["bytes"][1] == (ranks - 1) * hop


def test_results_do_not_depend_on_the_run(workers: WorkerPool) -> None:
    inputs = make_inputs(1, 128, (4, 2), 16, torch.bfloat16)
    first, _ = run_ring(workers, 4, inputs, Mask.causal(), "auto")
    second, _ = run_ring(workers, 4, inputs, Mask.causal(), "auto")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_lse_carries_no_gradient_and_inputs_may_be_strided() -> None:
    context = BurstContext.create(BurstConfig())
    base = torch.randn(6, 1, 4, 3 * 8, requires_grad=True)  # Megatron's [s, b, h, 3 x d]
    q, k, v = (x.transpose(0, 1) for x in base.split(8, dim=-1))
    out, lse = ring_attention(q, k, v, context, mask=Mask.causal(), return_lse=True)
    assert not lse.requires_grad
    out.sum().backward()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.detach().transpose(1, 2) for x in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(out.detach().transpose(1, 2), expected)
    assert base.grad is not None
