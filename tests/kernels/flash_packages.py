"""Stand-ins for flash-attn's packages: their signatures and conventions, the reference's numbers.

A signature is written as a string of names, "=" before a default. They are those of flash-attn
2.7.0 to 2.8.3.post1 (flash_attn/flash_attn_interface.py), flash_attn_3 3.0.0
(hopper/flash_attn_interface.py) and flash-attn-4 4.0.0b36 (flash_attn/cute/interface.py; 4.0.0b27
lacks the last name).
"""

import ast
from collections.abc import Callable
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels import KERNELS, TileCall
from megatron_burst.plans.mask import Band

SIGNATURES = {
    "flash2": (
        "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap "
        "alibi_slopes return_softmax",
        "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
        "window_size_right softcap alibi_slopes deterministic rng_state=None",
    ),
    "flash3": (
        "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None "
        "cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None "
        "page_table=None kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None "
        "seqlens_rotary=None q_descale=None k_descale=None v_descale=None softmax_scale=None "
        "causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 "
        "rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0",
        "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None "
        "sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None "
        "softmax_scale=None is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 "
        "deterministic=False sm_margin=0",
    ),
    "flash4": (
        "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None seqused_q=None seqused_k=None "
        "max_seqlen_q=None max_seqlen_k=None min_seqlen_k=None page_table=None "
        "softmax_scale=None causal=False softcap=None window_size_left=None "
        "window_size_right=None learnable_sink=None tile_mn=None mma_pv_is_rs=None "
        "intra_wg_overlap=None num_threads=384 num_splits=1 pack_gqa=None _arch=None "
        "score_mod=None mask_mod=None block_sparse_tensors=None return_lse=False out=None "
        "lse=None aux_tensors=None aux_scalars=None q_descale=None k_descale=None v_descale=None "
        "gather_kv_indices=None scheduler_metadata=None seqlen_k_per_split=None "
        "disable_scheduler_metadata=False gather_bwd_recompute_p=False",
        "q k v out dout lse softmax_scale=None causal=False softcap=0.0 window_size_left=None "
        "window_size_right=None m_block_size=64 n_block_size=128 num_threads=256 pack_gqa=False "
        "num_stages_Q=2 num_stages_dO=2 SdP_swapAB=False dKV_swapAB=False dQ_swapAB=False "
        "AtomLayoutMSdP=2 AtomLayoutNdKV=2 AtomLayoutMdQ=2 V_in_regs=False cu_seqlens_q=None "
        "cu_seqlens_k=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None "
        "deterministic=False dq=None dk=None dv=None score_mod=None score_mod_bwd=None "
        "mask_mod=None aux_tensors=None aux_scalars=None block_sparse_tensors=None dlse=None "
        "learnable_sink=None",
    ),
}
NAMES = {
    "flash2": ("_flash_attn_forward", "_flash_attn_backward"),
    "flash3": ("_flash_attn_forward", "_flash_attn_backward"),
    "flash4": ("_flash_attn_fwd", "_flash_attn_bwd"),
}
# What an adapter has a say in; all else must stay as it is by default, or as flash-attn 2 wants it.
OURS = frozenset(
    "q k v out dout lse softmax_lse dq dk dv softmax_scale causal is_causal window_size_left "
    "window_size_right softcap deterministic return_lse".split()
)
FIXED = {"dropout_p": 0.0, "alibi_slopes": None, "return_softmax": False}

type Arguments = dict[str, Any]


def signature(text: str) -> Signature:
    parameters = []
    for word in text.split():
        name, _, default = word.partition("=")
        value = ast.literal_eval(default) if default else Parameter.empty
        parameters.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value))
    return Signature(parameters)


class StandIn(ModuleType):
    """The module that has a package's functions, which note the arguments of their last call."""

    def __init__(self, kernel_name: str) -> None:
        super().__init__(f"stand-in for {kernel_name}")
        self.last: Arguments = {}
        self._none = None if kernel_name == "flash4" else -1  # says that a side has no limit
        both = zip(NAMES[kernel_name], SIGNATURES[kernel_name], strict=True)
        for (name, text), compute in zip(both, (self._forward, self._backward), strict=True):
            setattr(self, name, self._bound(signature(text), compute))

    def _bound(self, expected: Signature, compute: Callable[[Arguments], Any]) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            bound = expected.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                default = FIXED.get(name, expected.parameters[name].default)
                assert name in OURS or value == default, (name, value)
            self.last = bound.arguments
            return compute(bound.arguments)

        return function

    def _tile(self, a: Arguments) -> TileCall:
        """Undo what the package does: a window is counted from the last corner's diagonal."""
        left, right = (
            None if a[f"window_size_{side}"] == self._none else a[f"window_size_{side}"]
            for side in ("left", "right")
        )
        if a.get("causal", a.get("is_causal")):
            right = 0
        assert left is None or left >= 0
        assert right is None or right >= 0
        shift = a["k"].shape[1] - a["q"].shape[1]
        band = Band(
            None if left is None else left - shift, None if right is None else right + shift
        )
        return TileCall(a["q"], a["k"], a["v"], band, _scale(a), a["softcap"] or None)

    def _forward(self, a: Arguments) -> tuple[Tensor | None, ...]:
        out, lse = KERNELS["reference"].forward(self._tile(a))
        assert a.get("return_lse", True)
        return out, lse.float(), None, None

    def _backward(self, a: Arguments) -> Any:
        lse = a.get("lse", a.get("softmax_lse"))
        batch, tokens, heads, _ = a["q"].shape
        assert lse.shape == (batch, heads, tokens)
        assert lse.dtype == torch.float32 and lse.is_contiguous()
        gradients = KERNELS["reference"].backward(self._tile(a), a["dout"], a["out"], lse)
        if a["dq"] is None:
            return gradients
        for given, gradient in zip((a["dq"], a["dk"], a["dv"]), gradients, strict=True):
            given.copy_(gradient)
        return torch.zeros_like(lse)  # delta


def _scale(a: Arguments) -> float:
    return a["q"].shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]
