"""What a check may look at, and what it answers: a finding, how bad it is and what to set."""

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatron_burst.plugin.arguments import MEGATRON
from megatron_burst.tools.doctor.launch_line import LaunchLine


class Level(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the command line does not run
    WRONG = "wrong"  # it runs, and its numbers are not what was meant
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, by which check, and what to set instead."""

    check: str  # the name of the check
    level: Level
    text: str
    remedy: str = ""  # the flag or variable to set


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level among the findings."""
    return min((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


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


@dataclass(frozen=True, slots=True)
class Situation:
    """A command line whose flags were read, where it is to run, and in which environment."""

    args: Namespace  # as they were given
    line: LaunchLine
    target: Target
    environment: Mapping[str, str]

    @property
    def has_our_spec(self) -> bool:
        """Whether --spec names our layers, which needs no launcher of ours."""
        return names_our_spec(self.args)

    @property
    def is_ours(self) -> bool:
        """Whether our attention runs."""
        return self.has_our_spec or str(self.args.context_parallel_algo) != MEGATRON

    @property
    def on_megatrons_ring(self) -> bool:
        """Whether TransformerEngine's context parallelism runs."""
        return not self.is_ours and self.args.context_parallel_size > 1

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


type Answer = tuple[Level, str, str] | None  # how bad, why, and what to set


@dataclass(frozen=True, slots=True)
class Check:
    """One known error of command lines that Megatron's parser lets pass."""

    name: str  # by which findings and the documentation call it
    about: str  # what goes wrong
    seen: str  # where it was reported; MC is Megatron-LM, TE is TransformerEngine
    look: Callable[[Situation], Answer]  # None where a command line is not concerned


def check(name: str, about: str, seen: str) -> Callable[[Callable[[Situation], Answer]], Check]:
    """Make a check of a function that looks at a command line; see `Check`."""
    return lambda look: Check(name, about, seen, look)
