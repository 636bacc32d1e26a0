"""What a training under Megatron can choose beside attention and loss; see `config`."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from megatron_burst.config import FlagConfig, size_or_auto

Check = StrEnum("Check", "OFF NAN REFERENCE")
FileChecks = StrEnum("FileChecks", "AUTO ON OFF")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig(FlagConfig):
    """Settings of layers with our attention that attention itself does not read."""

    recompute_offload: bool = field(default=False, metadata={"flag": "--recompute-offload"})
    """Keep what recompute saves in the host's pinned memory: the inputs of layers under
    --recompute-granularity full, and the outputs that --recompute-attention-fraction saves. Copies
    run beside the layers, back one layer ahead; of either at most two layers' are on the GPU."""

    check: Check = Check.OFF
    """What is looked at to find a fault. off: nothing. nan: NaN and Inf in what attention is given
    and makes, forward and backward; stops at the first with its layer, rank, pass and tensor. Every
    look waits for the device. reference: the first micro-batch of a training, beside the unsharded
    reference that every rank computes in float64 without our rings: in every layer output,
    log-sum-exp and gradients, and the positions of the tokens. Prints the errors beside what is
    allowed and stops on a difference; the first step takes much longer, the later ones nothing
    more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig(FlagConfig):
    """Settings of the layers' MLPs."""

    prefix: ClassVar[str] = "--mlp-"
    chunks: int | None = field(default=1, metadata={"type": size_or_auto})
    """Into how many chunks of tokens a dense MLP, or shared experts, cut a rank's tokens: between
    their two products one chunk lives, and the backward computes each again. auto: as many as make
    that no more than the hidden states, with at least 2048 tokens each. It goes with every
    --context-parallel-algo. 1 (the default): Megatron's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileConfig(FlagConfig):
    """What is looked at on the disk."""

    check_files: FileChecks = FileChecks.AUTO
    """Whether files are looked at before they are used: those of the data set, whose indices and
    tokens must be in range, and checkpoints, of which the newest complete one is loaded, and none
    is mixed with those of another training; a save that fails says where, and one over an earlier
    checkpoint leaves no mixture that counts as complete. on: looked at. off: Megatron's own
    behaviour. auto: on in python -m megatron_burst.pretrain, off where another script is run."""
