"""Stand-ins for flash-attn's packages: their signatures and conventions, the reference's numbers.

A signature is written as a string of names, "=" before a default. They are those of flash-attn
2.7.0 to 2.8.3.post1 (flash_attn/flash_attn_interface.py), flash_attn_3 3.0.0
(hopper/flash_attn_interface.py) and flash-attn-4 4.0.0b36 (flash_attn/cute/interface.py).
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels import KERNELS, KernelInput
from megatron_burst.plans.visibility.band import Band

SIGNATURES: dict[str, dict[str, str]] = {
    "flash2": {
        "_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left "
        "window_size_right softcap alibi_slopes return_softmax",
        "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale "
        "causal window_size_left window_size_right softcap alibi_slopes deterministic "
        "rng_state=None",
        # Of sequences of many lengths.
        "_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        "dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 "
        "alibi_slopes=None return_softmax=False block_table=None leftpad_k=None seqused_k=None "
        "zero_tensors=False",
        "_flash_attn_varlen_backward": "dout q k v out softmax_lse dq dk dv cu_seqlens_q "
        "cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left "
        "window_size_right softcap alibi_slopes deterministic rng_state=None zero_tensors=False",
    },
    "flash3": {
        "_flash_attn_forward": "q k v k_new=None v_new=None qv=None out_=None "
        "cu_seqlens_q=None cu_seqlens_k=None cu_seqlens_k_new=None seqused_q=None "
        "seqused_k=None max_seqlen_q=None max_seqlen_k=None "
        "page_table=None kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None "
        "seqlens_rotary=None q_descale=None k_descale=None v_descale=None softmax_scale=None "
        "causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 "
        "rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0",
        "_flash_attn_backward": "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None "
        "sequed_q=None sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None "
        "softmax_scale=None is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 "
        "deterministic=False sm_margin=0",
    },
    "flash4": {
        "_flash_attn_fwd": "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None seqused_q=None "
        "seqused_k=None max_seqlen_q=None max_seqlen_k=None min_seqlen_k=None page_table=None "
        "softmax_scale=None causal=False softcap=None window_size_left=None "
        "window_size_right=None learnable_sink=None tile_mn=None mma_pv_is_rs=None "
        "intra_wg_overlap=None num_threads=384 num_splits=1 pack_gqa=None _arch=None "
        "score_mod=None mask_mod=None block_sparse_tensors=None return_lse=False out=None "
        "lse=None aux_tensors=None aux_scalars=None q_descale=None k_descale=None v_descale=None "
        "gather_kv_indices=None scheduler_metadata=None seqlen_k_per_split=None "
        "disable_scheduler_metadata=False gather_bwd_recompute_p=False",
        "_flash_attn_bwd": "q k v out dout lse softmax_scale=None causal=False softcap=0.0 "
        "window_size_left=None window_size_right=None m_block_size=64 n_block_size=128 "
        "num_threads=256 pack_gqa=False "
        "num_stages_Q=2 num_stages_dO=2 SdP_swapAB=False dKV_swapAB=False dQ_swapAB=False "
        "AtomLayoutMSdP=2 AtomLayoutNdKV=2 AtomLayoutMdQ=2 V_in_regs=False cu_seqlens_q=None "
        "cu_seqlens_k=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None "
        "deterministic=False dq=None dk=None dv=None score_mod=None score_mod_bwd=None "
        "mask_mod=None aux_tensors=None aux_scalars=None block_sparse_tensors=None dlse=None "
        "learnable_sink=None",
    },
}
# What an adapter has a say in; all else must stay as it is by default, or as flash-attn 2 wants it.
OURS = frozenset(
    "q k v out dout lse softmax_lse dq dk dv softmax_scale causal is_causal window_size_left "
    "window_size_right softcap deterministic return_lse cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k sm_margin score_mod score_mod_bwd".split()
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


@dataclass(frozen=True, eq=False)
class Modifier:
    """What flash-attn 4 makes of a soft cap: it finds the compiled kernel by the object."""

    cap: float
    kind: str


class StandIn(ModuleType):
    """The module that has a package's functions, which note the arguments of their last call."""

    def __init__(self, kernel_name: str) -> None:
        super().__init__(f"stand-in for {kernel_name}")
        self.last: Arguments = {}
        self.calls = 0
        self.utils = SimpleNamespace(
            create_softcap_scoremod=lambda cap: Modifier(cap, "scores"),
            create_softcap_scoremod_bwd=lambda cap: Modifier(cap, "gradients"),
        )
        self._none = None if kernel_name == "flash4" else -1  # says that a side has no limit
        for name, text in SIGNATURES[kernel_name].items():
            compute = self._backward if "dout" in text else self._forward
            setattr(self, name, self._bound(signature(text), compute))

    def _bound(self, expected: Signature, compute: Callable[[Arguments], Any]) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            bound = expected.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                default = FIXED.get(name, expected.parameters[name].default)
                assert name in OURS or value == default, (name, value)
            self.last = bound.arguments
            self.calls += 1
            return compute(bound.arguments)

        return function

    def _tiles(self, a: Arguments) -> Iterator[tuple[slice, KernelInput]]:
        """The sequences one by one, each with its queries, [1, S, H, D]."""
        begins = [a.get("cu_seqlens_q"), a.get("cu_seqlens_k")]
        if begins[0] is None:
            assert begins[1] is None and a["q"].ndim == 4
            yield slice(None), self._tile(a, a["q"], a["k"], a["v"])
            return
        assert all(x.dtype == torch.int32 and x.device == a["q"].device for x in begins)
        queries, keys = ([*pairwise(x.tolist())] for x in begins)
        for side, x, pairs in (("q", a["q"], queries), ("k", a["k"], keys)):
            assert (pairs[0][0], pairs[-1][1]) == (0, len(x)) and x.ndim == 3
            assert a[f"max_seqlen_{side}"] == max(stop - start for start, stop in pairs)
        for rows, seen in zip(queries, keys, strict=True):
            of_keys = (a[name][None, slice(*seen)] for name in "kv")
            yield slice(*rows), self._tile(a, a["q"][None, slice(*rows)], *of_keys)

    def _tile(self, a: Arguments, q: Tensor, k: Tensor, v: Tensor) -> KernelInput:
        """Undo what the package does: a window is counted from the last corner's diagonal."""
        left, right = (
            None if a[f"window_size_{side}"] == self._none else a[f"window_size_{side}"]
            for side in ("left", "right")
        )
        if a.get("causal", a.get("is_causal")):
            right = 0
        assert left is None or left >= 0
        assert right is None or right >= 0
        shift = k.shape[1] - q.shape[1]
        band = Band(
            None if left is None else left - shift, None if right is None else right + shift
        )
        return KernelInput(q, k, v, band, _scale(a), _cap(a))

    def _forward(self, a: Arguments) -> tuple[Tensor | None, ...]:
        results = [KERNELS["reference"].forward(tile) for _, tile in self._tiles(a)]
        out, lse = torch.cat([x for x, _ in results], 1), torch.cat([x for _, x in results], 2)
        assert a.get("return_lse", True)
        if a["q"].ndim == 3:
            out, lse = out[0], lse[0]
        return out, lse.float(), None, None

    def _backward(self, a: Arguments) -> Any:
        lse, is_packed = a.get("lse", a.get("softmax_lse")), a["q"].ndim == 3
        *batch, tokens, heads, _ = a["q"].shape
        assert lse.shape == (*batch, heads, tokens)
        assert lse.dtype == torch.float32 and lse.is_contiguous()
        dout, out, lse_BHS = (x[None] if is_packed else x for x in (a["dout"], a["out"], lse))
        each = [
            KERNELS["reference"].backward(tile, dout[:, rows], out[:, rows], lse_BHS[:, :, rows])
            for rows, tile in self._tiles(a)
        ]
        gradients = [torch.cat(parts, 1) for parts in zip(*each, strict=True)]
        gradients = [x[0] if is_packed else x for x in gradients]
        if a["dq"] is None:
            return gradients
        for given, gradient in zip((a["dq"], a["dk"], a["dv"]), gradients, strict=True):
            given.copy_(gradient)
        return torch.zeros_like(lse)  # delta


def _cap(a: Arguments) -> float | None:
    given, of_gradient = a.get("score_mod"), a.get("score_mod_bwd")
    if given is None:
        assert of_gradient is None
        return a["softcap"] or None
    assert not a["softcap"], "one of both"
    is_backward = "dout" in a
    assert (given.kind, is_backward) == ("scores", of_gradient is not None)
    assert of_gradient is None or (of_gradient.kind, of_gradient.cap) == ("gradients", given.cap)
    return given.cap


def _scale(a: Arguments) -> float:
    return a["q"].shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]
