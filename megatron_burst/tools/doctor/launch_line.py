"""A training command taken apart, and the machines that it is judged for."""

import contextlib
import io
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.distributed.run import get_args_parser

from megatron_burst.cpu_platform.platform import cpu_platform_wanted
from megatron_burst.plugin.arguments import asks_for_us

OUR_ENTRY = "megatron_burst.pretrain"
OUR_ENTRIES = (OUR_ENTRY, "megatron_burst.pretrain_gpt")  # two names of one program
OUR_RUNNER = "megatron_burst.run"
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
STARTS = re.compile(r"(^|/)(torchrun|python[\d.]*)$")
"""A word that starts a program; what is ahead of it starts a container or a job."""


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A command line's parts."""

    program: str  # a module's name or a script's path; ours where only flags were given
    flags: tuple[str, ...]
    starts_us: bool = True  # or a script that calls our launcher
    nodes: int | None = None  # of torchrun; None where it is not told
    ranks_per_node: int | None = None
    environment: dict[str, str] = field(default_factory=dict)  # set in front of the command

    @property
    def is_attached(self) -> bool:
        """Whether the plug-in is there when it runs: a script of Megatron's has to ask for it."""
        return self.starts_us and (self.program in OUR_ENTRIES or asks_for_us(self.flags))


def split(words: Sequence[str], gpus_here: int = 1, nodes: int | None = None) -> LaunchLine:
    """Take the words of a command apart.

    Args:
        words: with or without variables, `torchrun` or `python`; or flags alone.
        gpus_here: what torchrun's `--nproc-per-node gpu` means.
        nodes: what its `--nnodes` means where that is a variable.

    Raises:
        ValueError: there is no training program in it, or torchrun refuses its options.
    """
    if not words or words[0].startswith("--"):
        return LaunchLine(OUR_ENTRY, tuple(words))
    environment = {}
    for i, word in enumerate(words):
        rest = words[i + 1 :]
        if _VARIABLE.match(word):
            name, _, value = word.partition("=")
            environment[name] = value
        elif Path(word).name == "torchrun" or (word == "-m" and rest[:1] and rest[0] in _LAUNCHERS):
            found = _of_torchrun(rest[word == "-m" :], gpus_here, nodes)
            return replace(found, environment=environment)
        elif word == "-m" and any(map(STARTS.search, rest)):
            continue  # an option of what starts a container or a job
        elif (word == "-m" and rest) or word.endswith(".py"):
            return replace(_program(*words[i + (word == "-m") :]), environment=environment)
    raise ValueError(f"there is no training program in: {' '.join(words)}")


def _of_torchrun(words: Sequence[str], gpus_here: int, known: int | None) -> LaunchLine:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            options = get_args_parser().parse_args(list(words))
    except SystemExit as leaving:
        why = said.getvalue().strip().rpartition("error: ")[2]
        raise ValueError(f"torchrun: {why}") from leaving
    nodes = str(options.nnodes).split(":")[0]  # elastic: the fewest
    if not (nodes.isdigit() or known):
        raise ValueError(f"torchrun: --nnodes {options.nnodes} is no number")
    ranks = str(options.nproc_per_node)  # None where those are the GPUs of another machine
    meant = {"gpu": gpus_here or None, "auto": gpus_here or os.cpu_count(), "cpu": os.cpu_count()}
    per_node = int(ranks) if ranks.isdigit() else meant.get(ranks)
    program = _program(options.training_script, *options.training_script_args)
    return replace(program, nodes=int(nodes) if nodes.isdigit() else known, ranks_per_node=per_node)


def _program(name: str, *flags: str) -> LaunchLine:
    if name != OUR_RUNNER:
        file = Path(name)  # which may have been patched to start us
        is_patched = file.is_file() and "megatron_burst" in file.read_text(errors="replace")
        return LaunchLine(name, flags, name.startswith("megatron_burst.") or is_patched)
    if not flags:
        raise ValueError(f"{OUR_RUNNER} wants a script: {OUR_RUNNER} PATH/pretrain_gpt.py")
    return LaunchLine(flags[0], flags[1:])


class Target(NamedTuple):
    """This machine, or a cluster that options describe."""

    nodes: int
    ranks_per_node: int  # processes that each node starts, one a GPU
    capability: tuple[int, int] | None = None  # of a cluster's GPUs; None: this machine

    @property
    def is_cluster(self) -> bool:
        """Whether options describe machines that are not this one."""
        return self.capability is not None

    @property
    def device(self) -> torch.device:
        """Of the tensors of attention."""
        return torch.device("cuda" if self.is_cluster or not cpu_platform_wanted() else "cpu")

    def __str__(self) -> str:
        ranks = f"{self.nodes} x {self.ranks_per_node} ranks"
        if self.capability is None:
            return f"on this machine ({self.device}): {ranks}"
        major, minor = self.capability
        return f"for the cluster: {ranks}, GPUs of compute capability {major}.{minor}"

    def pretended(self) -> AbstractContextManager[object]:
        """Let torch answer as on a cluster's GPUs."""
        if self.capability is None:
            return nullcontext()
        major, minor = self.capability
        return patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 1,  # cuDNN's version comes after a look at every device
            get_device_capability=lambda *_: (major, minor),
            get_device_properties=lambda *_: SimpleNamespace(major=major, minor=minor, name="GPU"),
        )
