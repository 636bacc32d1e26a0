"""Which layers are ours: Megatron's --cp-comm-type, one name for all layers or a list."""

import argparse
import importlib.util
from collections.abc import Sequence

from megatron_burst.config import Algorithm, BurstConfig
from megatron_burst.plugin.refusals import refuse_all

MEGATRONS = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""The names that Megatron's own core attention, TransformerEngine's, knows."""


def names_ours(cp_comm_type: str | Sequence[str] | None) -> bool:
    """Whether a --cp-comm-type has an algorithm of ours for some layer."""
    names = [cp_comm_type] if isinstance(cp_comm_type, str) else cp_comm_type or ()
    return not {*Algorithm}.isdisjoint(names)


def check_layers(args: argparse.Namespace, config: BurstConfig, *, own_spec: bool) -> None:
    """Check the --cp-comm-type that goes with --context-parallel-algo.

    Where the layers come from a spec of the user's (`own_spec`), its core attention may run over
    context-parallel ranks in a way of its own.

    Raises:
        ValueError: it names another algorithm of ours, or an unknown one; or a layer of Megatron's
            own cannot be in this model.
    """
    names = args.cp_comm_type
    given = f"--cp-comm-type {' '.join(names)}"
    if config.algorithm not in names:
        raise ValueError(
            f"{given} contradicts --context-parallel-algo {config.algorithm}; drop one of them"
        )
    known = (config.algorithm, *MEGATRONS)
    if others := [name for name in names if name not in known]:
        raise ValueError(
            f"{given}: layers run {config.algorithm}, as --context-parallel-algo says, or one of "
            f"Megatron's own ({', '.join(MEGATRONS)}), not {others[0]}"
        )
    refuse_all(f"{given} cannot run this", _beside_megatrons(args, config, own_spec))


def _beside_megatrons(args: argparse.Namespace, config: BurstConfig, own_spec: bool) -> list[str]:
    """Say why Megatron's own attention cannot run some layers of this model, if it is to."""
    theirs = [name for name in args.cp_comm_type if name in MEGATRONS]
    if not theirs or args.context_parallel_size == 1:  # where Megatron hands out no names
        return []
    lacks_te = not own_spec and importlib.util.find_spec("transformer_engine") is None
    ours = f"name {config.algorithm}"
    cases = (
        (lacks_te, f"need TransformerEngine, which is not installed: {ours}"),
        (not config.is_zigzag, f"know no --burst-layout {config.layout}: drop it"),
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
