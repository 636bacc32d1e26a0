"""The attention that a command line asks for, and which kernels serve it."""

from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron_burst.config import BurstConfig
from megatron_burst.kernels import KERNELS, Request, select_kernel
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.doctor.launch_line import Target
from megatron_burst.tools.flags import flags_of, heads_of, window_of


def request_of(args: Namespace, config: BurstConfig, target: Target) -> Request:
    """Return what arguments that nothing refuses ask of a kernel.

    Tiles have bands where the layout or a window makes some that are neither full nor causal.
    """
    flags = flags_of(vars(args))
    heads, mask = heads_of(flags), Mask.causal(window=window_of(flags))
    tokens = args.seq_length or args.encoder_seq_length  # either is Megatron's
    layout = make_layout(config, tokens, args.context_parallel_size)
    return Request(
        target.device,
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32,
        *heads.of_rank(args.tensor_model_parallel_size),
        heads.size,
        heads.value_size,
        is_banded=Tiling(layout, mask).needs.is_banded,
        has_documents=args.dataloader_inter_document_masking or args.sft,
    )


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
