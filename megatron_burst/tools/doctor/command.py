"""`megatron-burst doctor`: what is installed, and whether a training command will run."""

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from megatron_burst.kernels import Request
from megatron_burst.plugin.cpu import platform as cpu_platform
from megatron_burst.tools import hardware, options
from megatron_burst.tools.doctor import judge, machine
from megatron_burst.tools.doctor.attention import served
from megatron_burst.tools.doctor.launch_line import LaunchLine, split
from megatron_burst.tools.doctor.report import Report, as_json, as_text
from megatron_burst.tools.doctor.situation import Finding, Level, Target

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ABOUT = """What is installed, what serves, and whether a training command will run. It starts none.

The command may begin with variables, torchrun or python, or be flags alone. Megatron's parser and
all validation run on it, then the checks on known silent errors. It is judged for this machine, or
with --gpus-per-node or --nodes for a cluster, on the packages of this machine. The exit status is 0
if the command line will run, else 1."""


def main(argv: list[str] | None = None) -> int:
    """Run the verb; return its exit status."""
    own, words = options.split_at_dashes(sys.argv[1:] if argv is None else argv)
    given = _parser().parse(own)
    report = _report(given, words)
    if os.environ.get("RANK", "0") == "0":  # under torchrun every rank is here
        print((as_json if given.json else as_text)(report, given.strict))
    return 1 if report.verdict(given.strict) else 0


def _parser() -> options.Parser:
    parser = options.Parser(
        "doctor",
        _ABOUT,
        "megatron-burst doctor",
        "megatron-burst doctor --shape 32,8,128",
        "megatron-burst doctor --gpus-per-node 8 --nodes 4 -- torchrun ... -m "
        "megatron_burst.pretrain_gpt FLAGS",
    )
    add = parser.add
    options.add_cluster(parser, was_gpus=("--gpus",))
    add(
        "--compute-capability",
        default="9.0",
        metavar="X.Y",
        help="of the cluster's GPUs (default: %(default)s, Hopper; 8.0 is Ampere, 10.0 Blackwell)",
    )
    add(
        "--shape",
        metavar="HEADS,KV_HEADS,SIZE[,VALUE_SIZE]",
        help="of one rank's attention, to ask the kernels about (default: the command's)",
    )
    add("--dtype", choices=DTYPES, default="bfloat16", help="of --shape (default: %(default)s)")
    add("--strict", action="store_true", help="exit status 1 for what runs but is wrong, too")
    options.add_json(parser)
    return parser


def _report(given: argparse.Namespace, words: Sequence[str] | None) -> Report:
    line, findings = _split(words)
    target = _target(given, line)
    here = hardware.read()
    environment = {**os.environ, **(line.environment if line else {})}
    findings += [*machine.device_findings(here), *machine.variable_findings(environment)]
    if line is not None and line.folder is not None:
        sys.path.insert(0, str(line.folder))  # a checkout before the wheel, as Python does
    parts = machine.parts()  # before the CPU platform hides some
    verdict = judge.judge(line, target) if line else judge.Verdict()
    own = _shape(given, target)
    request, kernel = (own, "auto") if own else (verdict.request, verdict.kernel)
    return Report(
        target=str(target),
        parts=parts,
        hardware=here,
        settings=hardware.settings(environment),
        shape=_described(request),
        kernels=served(request, target, kernel) if request else (),
        findings=[*findings, *verdict.findings],
        has_command=words is not None,
    )


def _split(words: Sequence[str] | None) -> tuple[LaunchLine | None, list[Finding]]:
    try:
        return (None if words is None else split(words, torch.cuda.device_count())), []
    except ValueError as error:
        return None, [Finding("command", Level.ERROR, str(error))]


def _target(given: argparse.Namespace, line: LaunchLine | None) -> Target:
    """The options count before the launcher's words, these before the launcher's environment."""
    nodes, per_node = (line.nodes, line.ranks_per_node) if line else (None, None)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    per_node = given.gpus_per_node or per_node or local
    nodes = given.nodes or nodes or max(world // local, 1)
    if given.gpus_per_node is None and given.nodes is None:
        device = "cpu" if cpu_platform.cpu_platform_wanted() else "cuda"
        return Target(nodes, per_node, None, device)
    major, _, minor = given.compute_capability.partition(".")
    return Target(nodes, per_node, (int(major), int(minor or 0)), "cuda")


def _shape(given: argparse.Namespace, target: Target) -> Request | None:
    if given.shape is None:
        return None
    heads, kv_heads, size, *value_size = map(int, given.shape.split(","))
    device, dtype = torch.device(target.device), DTYPES[given.dtype]
    return Request(device, dtype, heads, kv_heads, size, value_size[0] if value_size else size)


def _described(request: Request | None) -> str:
    if request is None:
        return ""
    sizes = {request.head_dim, request.value_head_dim}
    return (
        f"{request.dtype} on {request.device.type}, {request.query_heads} query and "
        f"{request.kv_heads} kv heads of {' and '.join(map(str, sorted(sizes, reverse=True)))} "
        f"a rank{', with bands' if request.is_banded else ''}"
    )
