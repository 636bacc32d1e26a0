"""The attention that a command line asks for, and which kernels serve it."""

from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron_burst.config import BurstConfig, Refused
from megatron_burst.kernels import KERNELS, Request, select_kernel
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.plugin.arguments import parallel_sizes
from megatron_burst.tools.doctor.launch_line import Target
from megatron_burst.tools.doctor.parsing import Parsed
from megatron_burst.tools.flags import flags_of, heads_of, window_of


def request_of(parsed: Parsed, target: Target) -> Request | None:
    """Return what a kernel is asked; None under Megatron's own attention, or without a model."""
    args, config = parsed.args, parsed.config
    if args is None or config is None or not args.num_attention_heads:
        return None
    if min(parallel_sizes(args)) < 1:  # which was refused
        return None
    heads = heads_of(flags_of(vars(args)))
    if not heads.size:
        return None
    return Request(
        target.device,
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32,
        *heads.of_rank(args.tensor_model_parallel_size),
        heads.size,
        heads.value_size,
        is_banded=_has_bands(args, config),
        has_documents=args.dataloader_inter_document_masking or args.sft,
    )


def _has_bands(args: Namespace, config: BurstConfig) -> bool:
    """Whether the layout and the window make tiles that are neither full nor causal squares."""
    refused = Refused()  # what validation says
    window = refused.by(window_of, flags_of(vars(args)))
    layout, ranks = None, args.context_parallel_size
    if args.seq_length:
        layout = refused.by(make_layout, config, args.seq_length, ranks)
    if layout is None:
        return window is not None
    return Tiling(layout, Mask.causal(window=window)).needs.is_banded


@dataclass(frozen=True, slots=True)
class Served:
    """One kernel's answer to a request: no reasons against it, or these."""

    kernel: str
    reasons: tuple[str, ...]
    is_taken: bool


def served(request: Request, wanted: str = "auto") -> list[Served]:
    """Ask every kernel, in the order in which `auto` does; `wanted` is that of --burst-kernel."""
    try:
        taken = select_kernel(wanted, request).name.split(" ")[0]
    except ValueError:
        taken = ""
    return [
        Served(name, tuple(kernel.reasons_against(request)), taken == name)
        for name, kernel in KERNELS.items()
    ]
