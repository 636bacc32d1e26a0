"""Everything about one training command: does it run, and is it what was meant."""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from megatron_burst.config import BurstConfig, LmHeadLoss
from megatron_burst.kernels import Request
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import make_layout
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plugin.arguments import burst_config_from_args
from megatron_burst.plugin.limits import lm_head_refusals, refusals
from megatron_burst.tools.doctor import divisibility, late_checks, nodes, silent_checks
from megatron_burst.tools.doctor.check import (
    Check,
    Finding,
    Level,
    Situation,
    Target,
    names_our_spec,
)
from megatron_burst.tools.doctor.launch_line import LaunchLine
from megatron_burst.tools.doctor.machine import timeout_finding
from megatron_burst.tools.doctor.parsing import parse

CHECKS: tuple[Check, ...] = (*silent_checks.CHECKS, *late_checks.CHECKS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about a command line, and the attention that it asks for."""

    findings: list[Finding] = field(default_factory=list)
    request: Request | None = None  # to a kernel; None where Megatron's own attention runs
    kernel: str = "auto"


def judge(line: LaunchLine, target: Target, environment: Mapping[str, str] = os.environ) -> Verdict:
    """Parse the command line and make every check on what was parsed."""
    parsed = parse(line, target)
    args, findings = parsed.given, list(parsed.findings)
    if args is None:
        return Verdict(findings)
    environment = {**environment, **line.environment}
    config = _config(args)
    findings += _refused(args, config, findings)
    findings += divisibility.findings(args, target.ranks)
    findings += nodes.findings(args, config, target)
    findings += silent_errors(Situation(args, line, target, environment))
    findings.append(timeout_finding(environment, args.distributed_timeout_minutes))
    return Verdict(findings, _request(args, config, target), args.burst_kernel)


def silent_errors(situation: Situation) -> list[Finding]:
    """Make every check on errors that Megatron's parser lets pass."""
    answers = ((check.name, check.look(situation)) for check in CHECKS)
    return [Finding(name, *answer) for name, answer in answers if answer is not None]


def contradictions(line: LaunchLine, target: Target) -> list[Finding]:
    """Compare what the launcher is told with what the options say."""
    here = torch.cuda.device_count()
    if not target.is_cluster and target.device == "cuda" and target.ranks_per_node > here:
        text = f"{target.ranks_per_node} ranks a node, but this machine has {here} GPUs"
        return [
            Finding(
                "ranks", Level.ERROR, text, "--nproc-per-node, or --gpus-per-node for a cluster"
            )
        ]
    if line.nodes is not None and line.ranks_per_node is None and not target.is_cluster:
        text = "torchrun's --nproc-per-node gpu, but this machine has no GPU"
        return [
            Finding(
                "ranks", Level.ERROR, text, "--nproc-per-node, or --gpus-per-node for a cluster"
            )
        ]
    asked = (
        ("--nodes", target.nodes, "--nnodes", line.nodes),
        ("--gpus-per-node", target.ranks_per_node, "--nproc-per-node", line.ranks_per_node),
    )
    return [
        Finding("ranks", Level.ERROR, f"torchrun's {theirs} is {said}, {ours} is {meant}", theirs)
        for ours, meant, theirs, said in asked
        if said is not None and said != meant
    ]


def _config(args: Namespace) -> BurstConfig | None:
    try:
        if names_our_spec(args):
            from megatron_burst.plugin import spec  # imports Megatron: after the platform

            return spec.config_from_args(args)
        return burst_config_from_args(args)
    except ValueError:  # among the findings of the parser already
        return None


def _refused(
    args: Namespace, config: BurstConfig | None, known: list[Finding]
) -> Iterator[Finding]:
    """Yield what we refuse beside the first reason, with which the program would stop."""
    reasons = refusals(args) if config is not None else []
    if args.lm_head_loss == LmHeadLoss.CHUNKED:
        reasons += lm_head_refusals(args)
    said = "\n".join(finding.text for finding in known)
    for reason in dict.fromkeys(reasons):
        if reason not in said:
            yield Finding("refused", Level.ERROR, reason)


def _request(args: Namespace, config: BurstConfig | None, target: Target) -> Request | None:
    if config is None or not args.num_attention_heads:
        return None
    tensor = args.tensor_model_parallel_size
    heads = args.num_attention_heads // tensor
    kv_heads = args.num_query_groups // tensor if args.group_query_attention else heads
    sizes = _head_sizes(args)
    if sizes is None:
        return None
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    device = torch.device(target.device)
    return Request(
        *(device, dtype, heads, max(kv_heads, 1), *sizes),
        is_banded=_has_bands(args, config),
        has_documents=args.dataloader_inter_document_masking,
    )


def _head_sizes(args: Namespace) -> tuple[int, int] | None:
    if args.multi_latent_attention:
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    if not args.kv_channels and not args.hidden_size:
        return None
    size = args.kv_channels or args.hidden_size // args.num_attention_heads
    return size, size


def _has_bands(args: Namespace, config: BurstConfig) -> bool:
    """Whether the layout and the window make tiles that are neither full nor causal squares."""
    window = args.window_size[0] if args.window_size and args.window_size[0] >= 0 else None
    if not args.seq_length:
        return window is not None
    try:
        layout = make_layout(config, args.seq_length, args.context_parallel_size)
    except ValueError:
        return window is not None
    return any(tile.is_banded for tile in Tiling(layout, Mask.causal(window=window)).all())
