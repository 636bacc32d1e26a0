"""dW of the LM head into Megatron's `main_grad`, in the contract of its data parallelism."""

import inspect
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.loss.products import LogitsGradient, OwnSum, WeightSum, add_product

type Kernel = Callable[[Tensor, Tensor, Tensor], None]  # input, gradient of the output, main_grad


class MainGradSum:
    """Sums dW in `weight.main_grad`, as Megatron's layers do under gradient accumulation fusion.

    Megatron's data parallelism then finds `grad_added_to_main_grad` set and leaves `weight.grad`
    alone, but wants a tensor there, so that its hook runs on autograd's own thread. Where the
    weight is also the embedding's (`zero_out_wgrad`) the hook adds that tensor, which autograd has
    added to the embedding's gradient, so it has to be zero.

    Args:
        weight: with `main_grad` and `grad_added_to_main_grad`.
        kernel: what adds a product to a float32 `main_grad`; None for torch's own operations.
    """

    def __init__(self, weight: Tensor, kernel: Kernel | None = None) -> None:
        self._weight, self._kernel, self._own = weight, kernel, OwnSum(weight)
        self._main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
        self.apart = self._main_grad.dtype != accumulation_dtype(weight.dtype)
        self.kept_apart = True  # the forward must not touch `main_grad`

    def add_product(self, gradient: LogitsGradient, hidden: Tensor) -> None:
        """Add `gradient.T @ hidden`; into a narrower `main_grad` the sum of all chunks at last."""
        if self.apart:
            self._own.add_product(gradient, hidden)
        elif self._kernel is not None and hidden.is_cuda:
            self._kernel(hidden, gradient.narrow, self._main_grad)
        else:
            add_product(self._main_grad, gradient, hidden)

    def add(self, total: Tensor, factor: float) -> None:
        """Add `factor * total`."""
        self._main_grad.add_(total, alpha=factor)

    def add_rows(self, rows: slice, total: Tensor) -> None:
        """Add the sum of some rows."""
        self._main_grad[rows].add_(total)

    def result(self) -> Tensor:
        """Set `grad_added_to_main_grad`; return the tensor without meaning that Megatron wants."""
        weight = self._weight
        if self.apart and self._own.used:
            self._main_grad.add_(self._own.total)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zero = getattr(weight, "zero_out_wgrad", False)
        if layers.HAVE_TE and weight.is_cuda:  # one such tensor for all layers
            return layers.get_dummy_wgrad(list(weight.shape), weight.dtype, zero=zero)
        return torch.zeros_like(weight) if zero else torch.empty_like(weight)


def weight_sum(weight: Tensor, kernel: Kernel | None = None) -> WeightSum:
    """Return where dW of `weight` goes: `main_grad` where Megatron's data parallelism made one.

    Megatron-FSDP makes one when the gradient is there.
    """
    has_one = hasattr(weight, "main_grad") and hasattr(weight, "grad_added_to_main_grad")
    return MainGradSum(weight, kernel) if has_one and not is_sharded(weight) else OwnSum(weight)


def is_sharded(weight: Tensor) -> bool:
    """Whether Megatron-FSDP gathers a weight for use."""
    return hasattr(weight, "__fsdp_param__")


def fused_kernel(gradient_accumulation_fusion: bool) -> tuple[str, Kernel | None]:
    """Return the fused product and sum that is installed, and its name: Apex's, then TE's."""
    if gradient_accumulation_fusion and layers._grad_accum_fusion_available:
        return "Apex", layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except ImportError:
        return "torch", None
    if "workspace" in inspect.signature(general_gemm).parameters:
        return "torch", None  # a TransformerEngine before 2.9, whose call differs
    options = {"layout": "NT", "accumulate": True, "grad": True}

    def multiply_and_add(input_: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
        general_gemm(input_, d_output, out_dtype=main_grad.dtype, out=main_grad, **options)

    return "TransformerEngine", multiply_and_add
