"""Trains on this machine alone."""

import argparse
import subprocess

from megatron_burst.tools.launch import node, site
from megatron_burst.tools.launch.processes import run_logged

ABOUT = """Trains on this machine, on its GPUs, or with none or MEGATRON_BURST_CPU=1 on the CPU.

  megatron-burst launch local --run toy --ranks-per-node 4 --train-iters 20

Ends with the status of the training. A rank that dies ends all ranks; so does SIGTERM, Ctrl-C, or
the end of this process, however it comes.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no option: those of all launchers are enough."""


def run(args: argparse.Namespace) -> int:
    """Train to the end; return the status."""
    output = site.output_of(args)
    more = "--dry-run" if args.dry_run else "--end-with-input"
    command = [site.python_of_training(), *node.command(args, output, more)]
    if args.dry_run:
        return subprocess.call(command)
    site.prepare_output(args, output)
    return run_logged([("this machine", command)], output)
