"""Which algorithm each layer runs: Megatron's --cp-comm-type, one name for all layers or a list."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

from megatron_burst.config import Algorithm, BurstConfig, LayoutName
from megatron_burst.plugin.limits import refuse_all

MEGATRONS = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""The names that Megatron's own core attention, TransformerEngine's, knows."""

# What --context-parallel-algo is tuned by; it says nothing to another algorithm.
_TUNING = (
    *("backward", "topology", "memory_mb", "head_parallel_size"),
    *("head_chunks", "grad_dtype", "mla"),
)


def algorithms(cp_comm_type: str | Sequence[str] | None) -> tuple[Algorithm, ...]:
    """Return those of our algorithms that layers run, each once, in the order of the layers."""
    names = [cp_comm_type] if isinstance(cp_comm_type, str) else cp_comm_type or ()
    ours = [Algorithm(name) for name in names if name in list(Algorithm)]
    return tuple(dict.fromkeys(ours))


def config_of(config: BurstConfig, algorithm: Algorithm) -> BurstConfig:
    """Return the settings of the layers that run `algorithm` in a model configured by `config`.

    Layers of another algorithm share the tokens, the masks, the kernel and the recompute of
    `config`; how they send is left to their defaults.
    """
    if algorithm is config.algorithm:
        return config
    default = BurstConfig()
    changes: dict[str, Any] = {name: getattr(default, name) for name in _TUNING}
    return dataclasses.replace(config, algorithm=algorithm, **changes)


def check_layers(args: argparse.Namespace, config: BurstConfig, *, own_spec: bool) -> None:
    """Check the --cp-comm-type that goes with --context-parallel-algo.

    Where the layers come from a spec of the user's (`own_spec`), its core attention may run over
    context-parallel ranks in a way of its own.

    Raises:
        ValueError: it names another algorithm for all layers, not one for each layer or an unknown
            one; or a layer of Megatron's own cannot be in this model.
    """
    names = args.cp_comm_type
    given = f"--cp-comm-type {' '.join(names)}"
    if config.algorithm not in names:
        raise ValueError(
            f"{given} contradicts --context-parallel-algo {config.algorithm}; drop one of them"
        )
    if len(names) > 1 and (layers := _layers(args)) not in (None, len(names)):
        raise ValueError(
            f"{given} has {len(names)} names for the {layers} layers of the model: give one for "
            "each layer or one for all"
        )
    known = (*Algorithm, *MEGATRONS)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{given}: {unknown[0]} is unknown; there are: {', '.join(known)}")
    refuse_all(f"{given} cannot run this", _beside_megatrons(args, config, own_spec))


def _layers(args: argparse.Namespace) -> int | None:
    """Return how many layers the arguments describe; Megatron lets a pattern win over a number."""
    if pattern := getattr(args, "hybrid_layer_pattern", None):
        return len(pattern.partition("/")[0].replace("|", ""))
    return args.num_layers


def _beside_megatrons(args: argparse.Namespace, config: BurstConfig, own_spec: bool) -> list[str]:
    """Say why Megatron's own attention cannot run some layers of this model, if it is to."""
    theirs = [name for name in args.cp_comm_type if name in MEGATRONS]
    if not theirs or args.context_parallel_size == 1:  # where Megatron hands out no names
        return []
    lacks_te = not own_spec and importlib.util.find_spec("transformer_engine") is None
    ours = f"name one of {', '.join(Algorithm)}"
    cases = (
        (lacks_te, f"need TransformerEngine, which is not installed: {ours}"),
        (
            config.layout is not LayoutName.ZIGZAG,
            f"know no --burst-layout {config.layout}: drop it",
        ),
        (config.block_mask, "know no --burst-block-mask: drop it"),
        (
            args.dataloader_inter_document_masking,
            "want documents that are padded: drop --dataloader-inter-document-masking",
        ),
        (
            args.sft,
            f"beside ours were not shown to be right with --sft: drop it, or {ours} for all",
        ),
    )
    return [f"layers with {theirs[0]} {why}" for holds, why in cases if holds]
