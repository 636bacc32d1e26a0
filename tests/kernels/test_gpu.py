"""Ring attention of several processes on one GPU over gloo, and kernels in corners where some were
wrong, against the oracle. (needs a GPU; the corners run on the CPU, too, in the fast tier)
"""

import pytest
import torch

from megatron_burst import BurstConfig
from megatron_burst.kernels import KERNELS, Request, TileCall
from megatron_burst.plans.mask import Band
from tests import oracle
from tests.attention.cases import HEADS, Case, errors, run_cases, variants
from tests.kernels.test_kernels import visible
from tests.workers import Team, WorkerPool

BFLOAT16_OVER_ONE_CALL = 1.5
DIM = 64
GPU_KERNELS = ("flash4", "flash3", "cudnn", "flash2", "aten_flash")


def reasons(kernel: str) -> str:
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    request = Request(torch.device("cuda"), torch.bfloat16, 8, 2, DIM, DIM)
    return "; ".join(KERNELS[kernel].reasons_against(request))


EVERY_KERNEL = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(k, marks=pytest.mark.skipif(bool(reasons(k)), reason=reasons(k)))
        for k in GPU_KERNELS
    ],
)


def cases_of(kernel: str, heads: tuple[int, int], ranks: int, per_node: int) -> list[Case]:
    topology = "double" if per_node < ranks else "flat"
    return [
        Case(
            config={**setting, "kernel": kernel, "ranks_per_node": per_node},
            chunk=512 // ranks,
            heads=heads,
            dim=DIM,
            dtype=torch.bfloat16,
        )
        for setting in variants((topology,))
        if setting["algorithm"] in ("burst", "allgather") or heads[1] % ranks == 0
    ]


@EVERY_KERNEL
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("ranks", "per_node"), [(2, 8), (4, 8), (4, 2)])
def test_bfloat16_is_nearly_as_exact_as_one_call_of_the_kernel(
    workers: WorkerPool, kernel: str, heads: tuple[int, int], ranks: int, per_node: int
) -> None:
    cases = cases_of(kernel, heads, ranks, per_node)
    expected = cases[0].expected(ranks)
    one_call = errors(cases[0].one_kernel_call(ranks, kernel, "cuda"), expected)
    for case, answer in zip(cases, run_cases(workers, ranks, cases, device="cuda"), strict=True):
        for name, error in errors(answer.found, expected).items():
            assert error <= BFLOAT16_OVER_ONE_CALL * one_call[name], (case, name, error, one_call)


@EVERY_KERNEL
def test_the_true_output_and_the_surrogate_serve_alike(workers: WorkerPool, kernel: str) -> None:
    # The kv ring passes the output itself, the query ring a surrogate.
    kv, query = (
        Case(
            config={"kernel": kernel, "backward": backward},
            chunk=256,
            heads=(8, 2),
            dim=DIM,
            dtype=torch.bfloat16,
        )
        for backward in ("kv", "query")
    )
    by_kv, by_query = run_cases(workers, 4, [kv, query], device="cuda")
    expected = kv.expected(4)
    with_output, with_surrogate = (errors(a.found, expected) for a in (by_kv, by_query))
    for name, error in with_surrogate.items():
        assert error <= 1.1 * with_output[name], (name, error, with_output)


def pinned(team: Team) -> list[bool]:
    communicator = team.context(BurstConfig()).communicator
    x = torch.randn(3, 4, device="cuda")
    wire = communicator._wire(x)
    return [wire.device.type == "cpu", wire.is_pinned(), wire.shape == x.shape]


@EVERY_KERNEL
def test_gloo_reaches_cuda_tensors_through_pinned_memory(workers: WorkerPool, kernel: str) -> None:
    assert workers.run(2, pinned) == [[True] * 3] * 2


@EVERY_KERNEL
def test_results_do_not_depend_on_the_run(workers: WorkerPool, kernel: str) -> None:
    cases = [
        Case(
            config={"kernel": kernel, "backward": backward, "ranks_per_node": 2},
            chunk=256,
            dim=DIM,
            dtype=torch.bfloat16,
        )
        for backward in ("kv", "query")
    ]
    first, second = (run_cases(workers, 4, cases, device="cuda") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        # Their backward adds with atomics, so only the forward is bound to be the same.
        assert torch.equal(a.found.out, b.found.out) and torch.equal(a.found.lse, b.found.lse)


# Where kernels returned NaN or wrong numbers: band, queries, keys, kv heads, and the score that
# all others are around. Below -88.7 = -log(largest float32) exp(-lse) is infinite.
CORNERS = {
    "64 keys in the last 128, causal": (Band.CAUSAL, 192, 192, 8, -120.0),
    "64 keys in the last 128, full": (Band.FULL, 128, 704, 8, -120.0),
    "64 queries and keys": (Band.FULL, 64, 64, 8, -120.0),
    "one query": (Band.FULL, 1, 128, 8, -128.0),
    "one query, a number of keys that is no multiple": (Band.FULL, 1, 97, 8, -128.0),
    "4 kv heads": (Band.CAUSAL, 512, 512, 4, 0.0),
    "2 kv heads": (Band.CAUSAL, 512, 512, 2, 0.0),
    "1 kv head": (Band.CAUSAL, 512, 512, 1, 0.0),
    "1 kv head of many keys": (Band.FULL, 128, 1024, 1, 0.0),
}
KERNELS_IN_CORNERS = pytest.mark.parametrize(
    ("kernel", "device"),
    [
        ("cpu", "cpu"),
        *(
            pytest.param(k, "cuda", marks=pytest.mark.skipif(bool(reasons(k)), reason=reasons(k)))
            for k in GPU_KERNELS
        ),
    ],
)


@KERNELS_IN_CORNERS
@pytest.mark.parametrize("corner", CORNERS)
def test_a_kernel_in_a_corner_equals_the_oracle(kernel: str, device: str, corner: str) -> None:
    band, queries, keys, kv_heads, score = CORNERS[corner]
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, tokens, heads, DIM, generator=generator).to(device, torch.bfloat16)
        for tokens, heads in ((queries, 8), (keys, kv_heads), (keys, kv_heads), (queries, 8))
    )
    q[..., 0], k[..., 0] = 1.0, score * DIM**0.5
    tile = TileCall(q, k, v, band, DIM**-0.5)
    out, lse = KERNELS[kernel].forward(tile)
    gradients = KERNELS[kernel].backward(tile, dout, out, lse)
    expected = oracle.attention(q, k, v, dout, visible(band, queries, keys, device))
    assert score == 0 or lse.max() < -88.7
    # The first column of dq is a sum that comes to 0 of terms as large as the score.
    found = oracle.Result(out, lse, gradients[0][..., 1:], *gradients[1:])
    expected = expected._replace(dq=expected.dq[..., 1:])
    assert gradients[0].isfinite().all()
    for name in ("out", "lse", "dq", "dk", "dv"):
        error = oracle.relative_error(getattr(found, name), getattr(expected, name))
        assert error < 2e-2, (name, error)
