"""Everything about one training command: does it run, and is it what was meant."""

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron_burst.config import BurstConfig, LmHeadLoss
from megatron_burst.kernels import Request
from megatron_burst.plugin.arguments import burst_config_from_args
from megatron_burst.plugin.limits import lm_head_refusals, refusals
from megatron_burst.tools.doctor import attention, checks
from megatron_burst.tools.doctor.launch_line import LaunchLine
from megatron_burst.tools.doctor.parsing import as_first_rank, parse
from megatron_burst.tools.doctor.situation import (
    Finding,
    Level,
    Situation,
    Target,
    names_our_spec,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about a command line, and the attention that it asks for."""

    findings: list[Finding] = field(default_factory=list)
    request: Request | None = None  # to a kernel; None where Megatron's own attention runs
    kernel: str = "auto"


def judge(line: LaunchLine, target: Target) -> Verdict:
    """Parse the command line and make every check on what was parsed."""
    findings = list(contradictions(line, target))
    with as_first_rank(line, target) as said:
        args, found = parse(line, target, said)
        findings += found
        if args is None:
            return Verdict(findings)
        config = _config(args)
        findings += _refused(args, config, findings)
        findings += attention.grid_findings(args, config, target)
        findings += checks.findings(Situation(args, line, target, os.environ))
        request = attention.request_of(args, config, target)
        return Verdict(findings, request, args.burst_kernel)


def contradictions(line: LaunchLine, target: Target) -> Iterator[Finding]:
    """Compare what the launcher is told with the machine, or with what the options say."""
    here, per_node = torch.cuda.device_count(), target.ranks_per_node
    text = f"{per_node} ranks a node, but this machine has {here} GPUs"
    too_many = target.device == "cuda" and per_node > here
    if line.nodes is not None and line.ranks_per_node is None:
        text = "torchrun's --nproc-per-node gpu, but this machine has no GPU"
        too_many = True
    if too_many and not target.is_cluster:
        remedy = "--nproc-per-node, or --gpus-per-node for a cluster"
        yield Finding("ranks", Level.ERROR, text, remedy)
        return
    for ours, meant, theirs, said in (
        ("--nodes", target.nodes, "--nnodes", line.nodes),
        ("--gpus-per-node", per_node, "--nproc-per-node", line.ranks_per_node),
    ):
        if said is not None and said != meant:
            text = f"torchrun's {theirs} is {said}, {ours} is {meant}"
            yield Finding("ranks", Level.ERROR, text, theirs)


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
