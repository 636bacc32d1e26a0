"""Ring attention of several processes on one GPU over gloo, against the oracle. (needs a GPU)

Kernels by themselves, in corners where some were wrong, are a stage of gpu-check.
"""

from typing import Any

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


def case(kernel: str, chunk: int = 256, heads: tuple[int, int] = (4, 2), **config: Any) -> Case:
    made = {"kernel": kernel, **config}
    return Case(config=made, chunk=chunk, heads=heads, dim=DIM, dtype=torch.bfloat16)


def cases_of(kernel: str, heads: tuple[int, int], ranks: int, per_node: int) -> list[Case]:
    topology = "double" if per_node < ranks else "flat"
    return [
        case(kernel, 512 // ranks, heads, ranks_per_node=per_node, **setting)
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


def pinned(team: Team) -> list[bool]:
    communicator = team.context(BurstConfig()).communicator
    x = torch.randn(3, 4, device="cuda")
    wire = communicator.wire(x)
    return [wire.device.type == "cpu", wire.is_pinned(), wire.shape == x.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_gloo_reaches_cuda_tensors_through_pinned_memory(workers: WorkerPool) -> None:
    assert workers.run(2, pinned) == [[True] * 3] * 2


@EVERY_KERNEL
def test_results_do_not_depend_on_the_run(workers: WorkerPool, kernel: str) -> None:
    cases = [case(kernel, backward=ring, ranks_per_node=2) for ring in ("kv", "query")]
    first, second = (run_cases(workers, 4, cases, device="cuda") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        # Their backward adds with atomics, so only the forward is bound to be the same.
        assert torch.equal(a.found.out, b.found.out) and torch.equal(a.found.lse, b.found.lse)
