"""`megatron-burst doctor`: what is installed, and whether a training command will run."""

import argparse
import os
from collections.abc import Iterator, Sequence

import torch

from megatron_burst.kernels import Request
from megatron_burst.tools import hardware, options
from megatron_burst.tools.arguments.doctor import parser
from megatron_burst.tools.doctor import checks, machine, memory
from megatron_burst.tools.doctor.attention import Served, request_of, served
from megatron_burst.tools.doctor.launch_line import LaunchLine, Target, split
from megatron_burst.tools.doctor.parsing import parse, see_beside
from megatron_burst.tools.doctor.report import Finding, Level, Report
from megatron_burst.tools.plan.configs import Configs

_HOPPER = 9, 0


def main(argv: list[str]) -> int:
    """Run the verb; return its exit status."""
    own, words = options.split_at_dashes(argv)
    given = parser().parse_args(own)
    report = _report(given, words)
    if os.environ.get("RANK", "0") == "0":  # under torchrun every rank is here
        print(report.as_json(given.strict) if given.json else report.as_text(given.strict))
    return 0 if report.verdict(given.strict) == "ok" else 1


def _report(given: argparse.Namespace, words: Sequence[str] | None) -> Report:
    line: LaunchLine | None = None
    findings: list[Finding] = []
    try:
        line = None if words is None else split(words, torch.cuda.device_count(), given.nodes)
    except ValueError as error:
        findings = [Finding("command", Level.ERROR, str(error))]
    target = _target(given, line)
    here = hardware.read()
    environment = {**os.environ, **(line.environment if line else {})}
    findings += checks.variable_findings(environment)
    if line is not None:
        see_beside(line)
    parts = machine.parts()  # before the CPU platform hides some
    request, kernel = None, "auto"
    if given.shape is not None:
        request = Request(target.device, getattr(torch, given.dtype), *given.shape)
    elif words is None:
        missing = (part for part in parts if part.name == "megatron-core" and not part.version)
        findings += (Finding("megatron", Level.ERROR, part.use) for part in missing)
    args = None  # of a training that nothing stops
    with target.pretended():
        if line is not None:
            parsed = parse(line, target)
            findings += checks.findings(line, target, parsed)
            args, config = None if parsed.stops else parsed.args, parsed.config
            if args and config and not (request or parsed.unknown):
                request, kernel = request_of(args, config, target), config.kernel
        kernels = served(request, kernel) if request else []
    findings += _unserved(kernel, kernels)
    if line is not None and args is not None:
        findings += memory.findings(args, line.flags, target, given.cluster)
    settings, shape = hardware.settings(environment), _described(request)
    return Report(str(target), parts, here, settings, shape, kernels, findings, words is not None)


def _unserved(named: str, kernels: Sequence[Served]) -> Iterator[Finding]:
    """The kernel that a command names, where it does not serve: another one is no answer."""
    if named != "auto" and kernels and not any(each.is_taken for each in kernels):
        reasons = "; ".join(why for each in kernels if each.kernel == named for why in each.reasons)
        text = f"--burst-kernel {named} cannot serve this attention: {reasons}"
        yield Finding("kernel", Level.ERROR, text, "--burst-kernel auto")


def _target(given: argparse.Namespace, line: LaunchLine | None) -> Target:
    """The options count before the launcher's words, these before the launcher's environment."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    nodes, per_node = max(world // local, 1), local
    if line is not None:
        nodes, per_node = line.nodes or nodes, line.ranks_per_node or per_node
    if not (given.gpus_per_node or given.nodes or given.cluster or given.compute_capability):
        return Target(nodes, per_node)
    capability = given.compute_capability or _HOPPER
    if given.cluster and not given.compute_capability:
        capability = Configs.read().cluster(given.cluster).capability or _HOPPER
    return Target(given.nodes or nodes, given.gpus_per_node or per_node, capability)


def _described(request: Request | None) -> str:
    if request is None:
        return ""
    sizes = " and ".join(map(str, dict.fromkeys((request.head_dim, request.value_head_dim))))
    bands = ", with bands" if request.is_banded else ""
    heads = f"{request.query_heads} query and {request.kv_heads} kv heads of {sizes} a rank"
    return f"{request.dtype} on {request.device.type}, {heads}{bands}"
