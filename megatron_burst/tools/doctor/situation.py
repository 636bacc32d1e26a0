"""What a check on a command line may look at."""

import importlib.util
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_burst.plugin.arguments import MEGATRON
from megatron_burst.tools.doctor.launch_line import LaunchLine
from megatron_burst.tools.doctor.target import Target


def names_our_spec(args: Namespace) -> bool:
    """Whether Megatron's --spec names our layers."""
    return bool(args.spec) and args.spec[0] == "megatron_burst.plugin.spec"


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
