"""What a check may look at, and what it answers: a finding, how bad it is and what to set."""

import importlib.util
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from unittest.mock import patch

import torch

from megatron_burst.plugin.arguments import MEGATRON
from megatron_burst.tools.doctor.launch_line import LaunchLine


class Level(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the command line does not run
    WRONG = "wrong"  # it runs, and its numbers are not what was meant
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, by which check, and what to set instead."""

    check: str  # the name of the check
    level: Level
    text: str
    remedy: str = ""  # the flag or variable to set


@dataclass(frozen=True, slots=True)
class Target:
    """The machines of a job: this one, or a cluster that options describe."""

    nodes: int
    ranks_per_node: int  # processes that each node starts, one a GPU
    capability: tuple[int, int] | None  # compute capability of a cluster's GPUs; None: this machine
    device: str  # of the tensors of attention

    @property
    def ranks(self) -> int:
        """The processes of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def is_cluster(self) -> bool:
        """Whether options describe machines that are not this one."""
        return self.capability is not None

    def __str__(self) -> str:
        ranks = f"{self.nodes} x {self.ranks_per_node} ranks"
        if self.capability is None:
            return f"on this machine ({self.device}): {ranks}"
        major, minor = self.capability
        return f"for the cluster: {ranks}, GPUs of compute capability {major}.{minor}"

    @contextmanager
    def pretended(self) -> Iterator[None]:
        """Let torch answer as on a cluster's GPUs."""
        with ExitStack() as stack:
            if self.capability is not None:
                major, minor = self.capability
                answers = {
                    "is_available": True,
                    "device_count": 1,  # cuDNN's version comes after a look at every device
                    "get_device_capability": self.capability,
                    "get_device_properties": type("P", (), {"major": major, "minor": minor}),
                }
                for name, answer in answers.items():
                    stack.enter_context(
                        patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer)
                    )
            yield


@dataclass(frozen=True, slots=True)
class Situation:
    """A command line whose flags were read, where it is to run, and in which environment."""

    args: Namespace  # as they were given
    line: LaunchLine
    target: Target
    environment: Mapping[str, str]

    @property
    def is_ours(self) -> bool:
        """Whether our attention runs."""
        return names_our_spec(self.args) or str(self.args.context_parallel_algo) != MEGATRON

    @property
    def comm_types(self) -> set[str]:
        """What Megatron's layers are told; Megatron's default is p2p."""
        return set(self.args.cp_comm_type or ["p2p"])

    @property
    def has_transformer_engine(self) -> bool:
        """Whether the layers are TransformerEngine's."""
        there = importlib.util.find_spec("transformer_engine") is not None
        return there and self.args.transformer_impl == "transformer_engine"


def names_our_spec(args: Namespace) -> bool:
    """Whether Megatron's --spec names our layers."""
    return bool(args.spec) and args.spec[0] == "megatron_burst.plugin.spec"
