"""What every launcher runs on every node: the settings of this node, then torchrun to its end."""

import argparse
import json
import os
import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_burst.tools import hardware
from megatron_burst.tools.flags import names
from megatron_burst.tools.launch import site
from megatron_burst.tools.launch.processes import Signals, say, supervise

ABOUT = """Started by the launchers: the ranks of one node.

All of them end when one dies, when this is told to by SIGTERM, or, with --end-with-input, when its
standard input ends: so nothing is left running where the launcher or the connection to it is gone.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the launchers tell a node beside what the user gave them."""
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    parser.add_argument("--master", default="", help="the first node")
    parser.add_argument("--port", type=int, default=0, help="to meet at")
    parser.add_argument("--end-with-input", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Run the ranks of this node to their end; return torchrun's status."""
    signals = Signals(with_input=args.end_with_input)
    who = f"node {args.node_rank} ({platform.node()})"
    status = 2
    try:
        status = _run_ranks(args, signals, who)
        if status:
            say(f"the ranks of this node ended with status {status}", who=who)
    except (ValueError, OSError) as error:  # as where there is no such Python
        say(str(error), who=who)
    finally:
        # As soon as a node fails srun ends the others and may drop what it has not read yet.
        if status and "SLURM_STEP_ID" in os.environ:
            time.sleep(1)
    return status


def meeting(nodes: int, master: str, port: int) -> list[str]:
    """Return the options that say where the ranks of several nodes meet."""
    return ["--nodes", str(nodes), "--master", master, "--port", str(port)]


def command(args: argparse.Namespace, output: Path, *more: str) -> list[str]:
    """Return the words after `python` that run a node, with what the user gave a launcher."""
    return [*site.LAUNCH, "node", *more, "--output", str(output), *given(args)]


def given(args: argparse.Namespace) -> list[str]:
    """Return the options that all launchers take, less --output, and Megatron's flags again.

    Raises:
        ValueError: with --save Megatron wants --save-interval, and says so only when ranks run; or
            what torchrun would refuse.
    """
    ranks_of(args)
    said = names([*args.named, *args.flags])
    if "save" in said and not said & {"save-interval", "persistent-save-interval"}:
        raise ValueError("--save wants --save-interval N, after how many steps it saves")
    options = []
    for name in ("run", "ranks_per_node", "script"):
        if (value := getattr(args, name)) is not None:
            options += [f"--{name.replace('_', '-')}", str(value)]
    return [*options, *["--gpt"] * args.gpt, "--", *args.flags]


def ranks_of(args: argparse.Namespace) -> str:
    """Return how many ranks a node has, in the words of torchrun.

    Raises:
        ValueError: it is no number of ranks.
    """
    ranks = args.ranks_per_node or os.environ.get("BURST_RANKS_PER_NODE") or "gpu"
    if ranks not in ("gpu", "cpu", "auto") and not (ranks.isdecimal() and int(ranks)):
        raise ValueError(f"--ranks-per-node {ranks} is neither a number of ranks nor gpu")
    return str(ranks)


def _run_ranks(args: argparse.Namespace, signals: Signals, who: str) -> int:
    ranks = ranks_of(args)
    on_cpu = os.environ.get("MEGATRON_BURST_CPU") == "1"
    if ranks == "gpu" and not args.dry_run and (on_cpu or not hardware.gpus()):
        raise ValueError(
            "no GPU is used here: say how many ranks with --ranks-per-node N or "
            "BURST_RANKS_PER_NODE"
        )
    settings, torchrun = _settings(args), _torchrun(args, ranks)
    if args.dry_run:
        print(shlex.join(["env", *(f"{k}={v}" for k, v in settings.items()), *torchrun]))
        return 0
    os.environ.update(settings)
    _describe(args, torchrun, who)
    return supervise([(who, torchrun)], signals)


def _settings(args: argparse.Namespace) -> dict[str, str]:
    settings = site.defaults([*args.named, *args.flags])
    settings["PYTHONUNBUFFERED"] = "1"  # lines of several ranks appear when they are written
    settings["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    several = args.nodes > 1 and not args.dry_run  # which may be far from them
    return settings | (site.network_settings(args.master) if several else {})


def _torchrun(args: argparse.Namespace, ranks: str) -> list[str]:
    meeting = [*site.ONE_MACHINE]
    if args.nodes > 1:
        meeting = ["--nnodes", str(args.nodes), "--node-rank", str(args.node_rank)]
        meeting += ["--master-addr", args.master, "--master-port", str(args.port)]
    start = [site.python_of_training(), "-m", "torch.distributed.run", *meeting]
    entry = ["megatron_burst.run", str(args.script)] if args.script else ["megatron_burst.pretrain"]
    logs = args.output / f"node-{args.node_rank}"  # a file a rank; here its lines have its number
    start += ["--nproc-per-node", ranks, "--tee", "3", "--log-dir", str(logs), "-m", *entry]
    record = ["--flight-recorder-dump-path", str(args.output / "flight-recorder-rank-")]
    board = ["--log-timers-to-tensorboard", "--tensorboard-dir", str(args.output / "tensorboard")]
    return [*start, *record, *board, *args.named, *args.flags]


def _describe(args: argparse.Namespace, command: Sequence[str], who: str) -> None:
    text = json.dumps(hardware.describe(args.run or "", command), indent=2)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        file = args.output / f"node-{args.node_rank}.json"
        file.touch(mode=0o600)  # the settings are nobody else's
        file.write_text(f"{text}\n")
    except OSError as error:
        say(f"no description of this node was written: {error}", who=who)
