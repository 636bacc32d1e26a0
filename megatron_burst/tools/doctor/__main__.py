"""What is installed, what serves, and whether a training command will run, without running it.

    python -m megatron_burst.tools.doctor [options] [-- the training command]

The command may begin with variables, torchrun or python, or be flags alone. Megatron's parser and
all validation run on it, then the checks on known silent errors. It is judged for this machine, or
with --gpus or --nodes for a cluster, on the packages of this machine. The exit status is 0 if the
command line will run, else 1.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator

import torch

from megatron_burst.kernels import Request
from megatron_burst.plugin.cpu import platform as cpu_platform
from megatron_burst.tools.doctor import command, hardware, installed, kernels, settings, silent
from megatron_burst.tools.doctor.finding import Finding, Level
from megatron_burst.tools.doctor.launch_line import LaunchLine, split
from megatron_burst.tools.doctor.report import Report, as_json, as_text
from megatron_burst.tools.doctor.target import Target

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    if options.list_checks:
        for check in silent.CHECKS:
            print(f"{check.name:<20} {check.about} ({check.seen})")
        return 0
    report = _report(options, words[cut + 1 :], has_command=cut < len(words))
    if os.environ.get("RANK", "0") == "0":  # under torchrun every rank is here
        print((as_json if options.json else as_text)(report, options.strict))
    return 1 if report.verdict(options.strict) else 0


def _parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="python -m megatron_burst.tools.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gpus", type=int, metavar="L", help="GPUs, and ranks, of a node of the cluster")
    add("--nodes", type=int, metavar="M", help="nodes of the cluster")
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
    add("--json", action="store_true", help="print one JSON object")
    add("--list-checks", action="store_true", help="print the checks on command lines and leave")
    return parser


def _report(options: argparse.Namespace, words: list[str], *, has_command: bool) -> Report:
    findings: list[Finding] = []
    line = None
    if has_command:
        try:
            line = split(words, torch.cuda.device_count())
        except ValueError as error:
            findings.append(Finding("command", Level.ERROR, str(error)))
    target = _target(options, line)
    machine = hardware.read()
    findings += hardware.findings(machine)
    environment = {**os.environ, **(line.environment if line else {})}
    findings += settings.findings(environment)
    if line is not None and line.folder is not None:
        sys.path.insert(0, str(line.folder))  # a checkout before the wheel, as Python does
    parts = installed.parts()  # before the CPU platform hides some
    request, kernel = _shape(options, target), "auto"
    if line is not None:
        findings += command.contradictions(line, target)
        with _quiet():
            verdict = command.judge(line, target)
        findings += verdict.findings
        if request is None:
            request, kernel = verdict.request, verdict.kernel
    return Report(
        target=str(target),
        parts=parts,
        hardware=machine,
        settings=settings.shown(environment),
        shape=_described(request),
        kernels=kernels.served(request, target, kernel) if request else (),
        findings=findings,
        has_command=has_command,
    )


def _target(options: argparse.Namespace, line: LaunchLine | None) -> Target:
    """The options count before the launcher's words, these before the launcher's environment."""
    nodes, per_node = (line.nodes, line.ranks_per_node) if line else (None, None)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    per_node = options.gpus or per_node or local
    nodes = options.nodes or nodes or max(world // local, 1)
    if options.gpus is None and options.nodes is None:
        device = "cpu" if cpu_platform.cpu_platform_wanted() else "cuda"
        return Target(nodes, per_node, None, device)
    major, _, minor = options.compute_capability.partition(".")
    return Target(nodes, per_node, (int(major), int(minor or 0)), "cuda")


def _shape(options: argparse.Namespace, target: Target) -> Request | None:
    if options.shape is None:
        return None
    heads, kv_heads, size, *value_size = map(int, options.shape.split(","))
    device, dtype = torch.device(target.device), DTYPES[options.dtype]
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what importing Megatron prints and logs out of the report."""
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
