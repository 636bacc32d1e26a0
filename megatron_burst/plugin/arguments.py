"""Our flags in Megatron's parser, and what they ask of Megatron's own."""

import argparse
import dataclasses
import importlib.util
import logging
import math
from collections.abc import Sequence
from typing import Any

from megatron_burst.config import (
    Algorithm,
    BurstConfig,
    FileChecks,
    FileConfig,
    LmHeadConfig,
    LmHeadLoss,
    Mla,
    MlpConfig,
    Topology,
    refuse,
)
from megatron_burst.kernels import check_kernel_name
from megatron_burst.plans.head_chunks import check_head_chunks
from megatron_burst.plans.head_parallel import kv_head_copies
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import make_layout
from megatron_burst.plugin import compat
from megatron_burst.plugin.attention.block_mask import load_block_mask
from megatron_burst.plugin.attention.layer_algorithms import algorithms, check_layers, config_of
from megatron_burst.plugin.flags import ENDED, all_flags, flags
from megatron_burst.plugin.limits import (
    LATENT_LIMITS,
    MEGATRON,
    MLP_LIMITS,
    MLP_WORKING,
    beyond,
    lm_head_refusals,
    refusals,
    refuse_all,
)

logger = logging.getLogger(__name__)

_METAVARS = {"kernel": "NAME", "block_mask": "FILE"}
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_DROPOUTS = ("attention_dropout", "hidden_dropout")


def asks_for_us(words: Sequence[str]) -> bool:
    """Whether a command line has a flag of ours, wants to see them, or names an algorithm of ours.

    Without any of these nothing of Megatron is replaced. The program's name is not among `words`.
    """
    names = {word.split("=")[0] for word in words}
    if names & {"-h", "--help", *ENDED, *(flag.name for flag in all_flags())}:
        return True
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cp-comm-type", nargs="*")
    parser.add_argument("--spec", nargs="*")
    given = parser.parse_known_args(list(words))[0]
    return given.spec is None and bool(algorithms(given.cp_comm_type))


def add_burst_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "burst", one flag for each field of our configurations; return the parser."""
    group = parser.add_argument_group(
        "burst", "context-parallel attention and chunked LM-head loss of megatron_burst"
    )
    for flag in all_flags():
        text, values, default = flag.help, flag.values, flag.default
        if flag.field == "algorithm":
            values, default = (MEGATRON, *values), MEGATRON
        if flag.type is bool:
            kind: dict[str, Any] = {"action": "store_true"}
        else:
            shown = "{" + ",".join(values) + "}" if values else _METAVARS.get(flag.field, "N")
            kind = {"default": default, "type": flag.type, "metavar": shown}
            text += "" if default is None else f" (default: {default})"
        group.add_argument(flag.name, help=text.replace("%", "%%"), **kind)
    for name in ENDED:
        hidden = argparse.SUPPRESS
        group.add_argument(name, nargs="?", action=_Ended, default=hidden, help=hidden)
    compat.mend_help(parser)
    # None tells that the user has not chosen; `configure` puts a value there. Megatron's is p2p.
    parser.set_defaults(
        cp_comm_type=None,
        **dict.fromkeys(_DROPOUTS),
        default_dropouts={name: parser.get_default(name) for name in _DROPOUTS},
    )
    return parser


class _Ended(argparse.Action):
    """Ends with what to do in the place of a flag of before."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        (name,) = self.option_strings
        parser.error(f"{name} is no more: {ENDED[name]}")


def set_dropouts(args: argparse.Namespace) -> None:
    """Set the dropouts that were not given: 0 with our attention, else Megatron's own.

    To be called on what `add_burst_arguments`' parser returned; again it does nothing.
    """
    defaults = vars(args).pop("default_dropouts", {})
    missing = {name: value for name, value in defaults.items() if getattr(args, name) is None}
    ours = args.context_parallel_algo != MEGATRON
    vars(args).update(dict.fromkeys(missing, 0.0) if ours else missing)
    if missing and ours:
        args.unset_dropouts = missing  # to be said later: Megatron parses more than once


def settle_dropouts(args: argparse.Namespace) -> None:
    """Where a model is built with our attention, say which dropouts are 0 though not given.

    The attention dropout that --use-checkpoint-args brought is set to 0: Megatron lets a checkpoint
    win over flags, so no flag could. The hidden dropout stays the checkpoint's.
    """
    if getattr(args, "context_parallel_algo", MEGATRON) == MEGATRON:
        return
    for name, default in vars(args).pop("unset_dropouts", {}).items():
        if default and not getattr(args, name):
            flag = name.replace("_", "-")
            logger.info("--%s is 0: it was not given; without our attention %s", flag, default)
    if args.use_checkpoint_args and args.attention_dropout:
        text = "--attention-dropout 0: the checkpoint's %s is left out"
        logger.info(text, args.attention_dropout)
        args.attention_dropout = 0.0


def burst_config_from_args(args: argparse.Namespace) -> BurstConfig | None:
    """Return the configuration that the flags describe; None for Megatron's own attention.

    Raises:
        ValueError: a value is unknown or not built yet, or a flag would have no effect.
    """
    values = _values(args, BurstConfig)
    if values["algorithm"] != MEGATRON:
        config = BurstConfig(**values, timeout_seconds=60.0 * args.distributed_timeout_minutes)
        return _settle_heads(args, _settle_mla(args, config))
    idle = [
        f"{flag.name} {values[flag.field]}"
        for flag in flags()
        if flag.field != "algorithm" and str(values[flag.field]) != str(flag.default)
    ]
    text = f"has no effect under --context-parallel-algo {MEGATRON}"
    refuse((bool(idle), f"{', '.join(idle)} {text}; add --context-parallel-algo burst"))
    return None


def _settle_mla(args: argparse.Namespace, config: BurstConfig) -> BurstConfig:
    """Return the settings with K and V sent where it is known that latents cannot be."""
    reasons, has_latents = beyond(LATENT_LIMITS, args), args.multi_latent_attention
    if config.mla is Mla.LATENT:
        missing = [] if has_latents else ["the model has none: add --multi-latent-attention"]
        refuse_all(f"--burst-mla {config.mla} cannot run this", [*reasons, *missing])
    elif reasons and has_latents and config.mla is Mla.AUTO:
        logger.info("--burst-mla %s: %s", Mla.HEADS, "; ".join(reasons))
        return dataclasses.replace(config, mla=Mla.HEADS)
    return config


def _settle_heads(args: argparse.Namespace, config: BurstConfig) -> BurstConfig:
    """Return the settings with no heads shared out where rings send less, or are asked for."""
    if config.head_parallel_size or config.algorithm is not Algorithm.BURST:
        return config
    why = "rings are asked for by --hierarchical-context-parallel-sizes"
    if args.dataloader_inter_document_masking or args.sft:
        why = "rings send less under documents"
    elif not args.hierarchical_context_parallel_sizes:
        return config
    logger.info("--burst-head-parallel-size 1: %s", why)
    return dataclasses.replace(config, head_parallel_size=1)


def lm_head_config_from_args(args: argparse.Namespace) -> LmHeadConfig | None:
    """Return the settings of the chunked loss; None for Megatron's own.

    Raises:
        ValueError: a value is unknown, a flag would have no effect, or an argument of Megatron
            cannot be honoured.
    """
    config = LmHeadConfig(**_values(args, LmHeadConfig))
    if config.loss is LmHeadLoss.MEGATRON:
        return None
    refuse_all(f"--lm-head-loss {config.loss} cannot run this", lm_head_refusals(args))
    return config


def mlp_config_from_args(args: argparse.Namespace) -> MlpConfig | None:
    """Return the settings of MLPs in chunks; None for Megatron's own.

    Raises:
        ValueError: the number is not positive, or an argument of Megatron cannot be honoured.
    """
    config = MlpConfig(**_values(args, MlpConfig))
    if config.chunks == 1:
        return None
    modules = {"mlp", "shared_experts", "moe"} & set(args.recompute_modules or ())
    again = args.recompute_granularity == "selective" and bool(modules)
    text = f"--recompute-modules {' '.join(sorted(modules))}: chunks recompute it: drop it there"
    reasons = [*beyond(MLP_LIMITS, args, MLP_WORKING), *[text] * again]
    refuse_all("--mlp-chunks cannot run this", reasons)
    return config


def checks_files(args: argparse.Namespace, *, own_entry: bool) -> bool:
    """Return whether --burst-check-files asks for the checks; ValueError for an unknown value."""
    asked = FileConfig(**_values(args, FileConfig)).check_files
    return own_entry if asked is FileChecks.AUTO else asked is FileChecks.ON


def _values(args: argparse.Namespace, config: type) -> dict[str, Any]:
    return {x.field: getattr(args, x.name[2:].replace("-", "_")) for x in flags(config)}


def configure(args: argparse.Namespace) -> None:
    """Check the parsed arguments and set what our flags imply, before Megatron validates them.

    Sets `cp_comm_type`, by which Megatron tells each layer's core attention what to do, and the
    dropouts that were not given, and switches off the data loader's dense attention mask.

    Raises:
        ValueError: something cannot work, with the numbers and the flag to change.
    """
    set_dropouts(args)
    lm_head_config_from_args(args)
    mlp_config_from_args(args)
    config = burst_config_from_args(args)
    if config is None:
        _check_megatron_algorithm(args)
        args.cp_comm_type = args.cp_comm_type or ["p2p"]
        return
    check_kernel_name(config.kernel)
    _check_length(args, config)
    _check_hierarchy(args, config)
    names = args.cp_comm_type or [config.algorithm.value]
    args.cp_comm_type = names if len(set(names)) > 1 else names[:1]
    check_layers(args, config, own_spec=args.spec is not None)
    for algorithm in algorithms(args.cp_comm_type):
        _check_head_parallelism(args, config_of(config, algorithm))
    _check_recompute(args, config)
    refuse(
        (
            config.check_nan and args.fp16 and args.loss_scale is None,
            "--burst-check-nan: the dynamic loss scale of --fp16 makes Inf on purpose: "
            "add --loss-scale N, or take --bf16",
        ),
        (
            args.profile
            and args.use_pytorch_profiler
            and args.profile_step_end > (args.train_iters or math.inf),
            f"--profile-step-end {args.profile_step_end} is beyond --train-iters "
            f"{args.train_iters}: a profiler that is not stopped writes nothing, crashes at exit",
        ),
    )
    refuse_all(f"--context-parallel-algo {config.algorithm} cannot run this", refusals(args))
    args.create_attention_mask_in_dataloader = False  # at a million tokens, 10^12 booleans
    if hasattr(args, "fallback_to_eager_attn") and args.transformer_impl == "local":  # dev
        refuse(
            (
                len(args.cp_comm_type) > 1,
                f"--cp-comm-type {' '.join(args.cp_comm_type)}: local layers of this Megatron know "
                "all_gather alone: give no --cp-comm-type, or take TransformerEngine's layers",
            )
        )
        args.cp_comm_type = [None]  # the layers get no name, and run --context-parallel-algo


def _check_length(args: argparse.Namespace, config: BurstConfig) -> None:
    """The sequence divides over the ranks, in the data loader and in our layout, and into blocks.

    A rest would have to be padded or dropped.
    """
    table = None if config.block_mask is None else load_block_mask(config.block_mask)
    if args.seq_length is not None:
        zigzag(args.seq_length, args.context_parallel_size)
        make_layout(config, args.seq_length, args.context_parallel_size)
        Mask.causal(block_table=table).check_length(args.seq_length)


def _check_recompute(args: argparse.Namespace, config: BurstConfig) -> None:
    """Attention's outputs are saved, and inputs offloaded, only where Megatron recomputes."""
    if config.recompute_fraction is None:
        refuse(
            (
                config.recompute_offload and args.recompute_granularity != "full",
                "--recompute-offload has no effect where Megatron recomputes no whole layers: add "
                f"{_FULL}, or drop it",
            )
        )
        return
    given = f"--recompute-attention-fraction {config.recompute_fraction}"
    selective = args.recompute_granularity == "selective" or args.recompute_activations
    attention = selective and "core_attn" in (args.recompute_modules or ["core_attn"])
    refuse(
        (
            args.recompute_granularity != "full" and not attention,
            f"{given} has no effect where Megatron does not recompute attention: add {_FULL}, or "
            "drop it",
        ),
        (
            args.distribute_saved_activations,
            f"{given} finds what it saved by the inputs that Megatron saves, which "
            "--distribute-saved-activations replaces: drop one of them",
        ),
    )


def _check_hierarchy(args: argparse.Namespace, config: BurstConfig) -> None:
    """Megatron makes a group for each size; ours are those within the node and between nodes."""
    sizes = args.hierarchical_context_parallel_sizes
    if not sizes:
        return
    given = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
    is_flat = config.shape_of_rings is Topology.FLAT
    refuse(
        (
            len(sizes) != 2,
            f"{given}: a double ring takes two sizes, the ranks of a node and the nodes",
        ),
        (
            config.ranks_per_node is not None,
            f"--burst-ranks-per-node {config.ranks_per_node} and {given} say the same: drop one of "
            "them",
        ),
        (is_flat, f"{given} needs a double ring: take --burst-topology double or drop it"),
    )


def _check_head_parallelism(args: argparse.Namespace, config: BurstConfig) -> None:
    """An all-to-all spreads the heads of a tensor-parallel rank over a part of the CP ranks."""
    ranks, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    size = ranks if config.algorithm is Algorithm.ULYSSES else config.head_parallel_size or 1
    flag = f"--burst-head-parallel-size {size}"
    refuse((ranks % size != 0, f"{flag} does not divide --context-parallel-size {ranks}"))
    if sizes := args.hierarchical_context_parallel_sizes:
        given = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} gives"
        text = f"{flag} must divide the {sizes[0]} ranks of a node that {given}"
        refuse((sizes[0] % size != 0, text))
    if args.num_attention_heads is not None:
        heads = args.num_attention_heads
        kv_heads = args.num_query_groups if args.group_query_attention else heads
        # Megatron, too, gives every tensor-parallel rank a kv head where there are fewer of them.
        copies = kv_head_copies(heads // tensor, max(kv_heads // tensor, 1), size)
        check_head_chunks(config.head_chunks or 1, max(kv_heads // tensor, 1) * copies // size)


def _check_megatron_algorithm(args: argparse.Namespace) -> None:
    ours, ranks = algorithms(args.cp_comm_type), args.context_parallel_size
    refuse(
        (
            bool(ours) and args.spec is None,
            f"--cp-comm-type {' '.join(args.cp_comm_type or ())} needs --context-parallel-algo "
            f"{Algorithm.BURST}",
        ),
        (
            ranks > 1 and not ours and importlib.util.find_spec("transformer_engine") is None,
            f"--context-parallel-algo {MEGATRON} with --context-parallel-size {ranks} needs "
            "TransformerEngine, which is not installed: install transformer-engine[pytorch]==2.17.1"
            f" (it needs an NVIDIA GPU), or take --context-parallel-algo {Algorithm.BURST}",
        ),
    )
