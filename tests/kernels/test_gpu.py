"""Ring attention of several processes on one GPU over gloo, against the oracle. (needs a GPU)

Kernels by themselves, in corners where some were wrong, are a stage of gpu-check.
"""

import pytest
import torch

from megatron_burst import BurstConfig
from megatron_burst.kernels import KERNELS, Request
from tests.attention.cases import HEADS, Case, errors, run_cases, variants
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
    wire = communicator.wire(x)
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
