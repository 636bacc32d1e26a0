"""Our flags in Megatron's parser, and what they ask of Megatron's own."""

import argparse
import importlib.util
import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_burst.config import Algorithm, BurstConfig, Refused, Topology, positive, refuse
from megatron_burst.kernels import check_kernel_name
from megatron_burst.plans.choice.head_chunks import check_head_chunks
from megatron_burst.plans.choice.head_parallel import kv_head_copies
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.plugin.attention.block_mask import load_block_mask
from megatron_burst.plugin.attention.layer_algorithms import check_layers, names_ours
from megatron_burst.plugin.flags import ENDED, all_flags
from megatron_burst.plugin.limits import MEGATRON
from megatron_burst.plugin.refusals import ranks_refusal, refusals, refuse_all
from megatron_burst.plugin.settings import Settings, read_settings
from megatron_burst.plugin.training_config import Check

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
    return given.spec is None and names_ours(given.cp_comm_type)


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
    for action in parser._actions:  # one text of Megatron's has a bare percent sign
        if action.help:
            action.help = re.sub(r"(?<!%)%(?![%(])", "%%", action.help)
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


def set_default_dropouts(args: argparse.Namespace) -> None:
    """Set the dropouts that were not given: 0 with our attention, else Megatron's own.

    To be called on what `add_burst_arguments`' parser returned; again it does nothing.
    """
    defaults = vars(args).pop("default_dropouts", {})
    missing = {name: value for name, value in defaults.items() if getattr(args, name) is None}
    ours = args.context_parallel_algo != MEGATRON
    vars(args).update(dict.fromkeys(missing, 0.0) if ours else missing)
    if missing and ours:
        args.unset_dropouts = missing  # to be said later: Megatron parses more than once


def report_dropouts(args: argparse.Namespace) -> None:
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


def configure(args: argparse.Namespace) -> Settings:
    """Check the parsed arguments and set what our flags imply, before Megatron validates them.

    Returns what they ask for. Sets `cp_comm_type`, by which Megatron tells each layer's core
    attention what to do, and the dropouts that were not given, and switches off the data loader's
    dense attention mask.

    Raises:
        ValueError: something cannot work, all of it, with the numbers and the flags to change.
    """
    names = ("tensor-model", "pipeline-model", "context")
    sizes = zip(names, parallel_sizes(args), strict=True)
    refuse(positive({f"--{name}-parallel-size": size for name, size in sizes}))  # else we divide
    set_default_dropouts(args)
    refused = Refused()
    settings = read_settings(args, refused)
    if args.context_parallel_algo == MEGATRON:
        refused += _megatron_refusals(args)
        args.cp_comm_type = args.cp_comm_type or ["p2p"]
    else:
        _configure_attention(args, settings.attention, refused)
    refuse(refused)
    return settings


def _configure_attention(
    args: argparse.Namespace, config: BurstConfig | None, refused: Refused
) -> None:
    """Set what our attention implies, and check what goes with it; None: it was refused itself."""
    algorithm = args.context_parallel_algo
    names = args.cp_comm_type or [str(algorithm)]
    names = args.cp_comm_type = names if len(set(names)) > 1 else names[:1]
    args.create_attention_mask_in_dataloader = False  # at a million tokens, 10^12 booleans
    what = f"--context-parallel-algo {algorithm} cannot run this"
    refused.by(refuse_all, what, refusals(args))
    if config is None:
        return
    refused.by(check_kernel_name, config.kernel)
    refused.by(check_layers, args, config, own_spec=args.spec is not None)
    refused.by(_check_length, args, config)
    refused += _hierarchy_refusals(args, config)
    refused.by(_check_head_parallelism, args, config)
    refused += _recompute_refusals(args, config)
    refused += _run_refusals(args)
    if hasattr(args, "fallback_to_eager_attn") and args.transformer_impl == "local":  # dev
        if len(names) > 1:
            refused.append(
                f"--cp-comm-type {' '.join(names)}: local layers of this Megatron know all_gather "
                "alone: give no --cp-comm-type, or take TransformerEngine's layers"
            )
        args.cp_comm_type = [None]  # the layers get no name, and run --context-parallel-algo


def _run_refusals(args: argparse.Namespace) -> Iterator[str]:
    """A dynamic loss scale, and a profiler, that would not go well with the run."""
    if args.burst_check == Check.NAN and args.fp16 and args.loss_scale is None:
        yield (
            f"--burst-check {Check.NAN}: the dynamic loss scale of --fp16 makes Inf on purpose: "
            "add --loss-scale N, or take --bf16"
        )
    profiles = args.profile and args.use_pytorch_profiler
    if profiles and args.profile_step_end > (args.train_iters or math.inf):
        yield (
            f"--profile-step-end {args.profile_step_end} is beyond --train-iters "
            f"{args.train_iters}: a profiler that is not stopped writes nothing, crashes at exit"
        )


def check_ranks(args: argparse.Namespace) -> None:
    """Refuse a number of ranks over which the parallel sizes do not divide.

    Unless sizes come from a checkpoint, which is read later.
    """
    reason = ranks_refusal(args.world_size, *parallel_sizes(args))
    if reason and not args.use_mp_args_from_checkpoint_args:
        raise ValueError(reason)


def parallel_sizes(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return those of tensor, pipeline and context parallelism."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    return tensor, pipeline, args.context_parallel_size


def _check_length(args: argparse.Namespace, config: BurstConfig) -> None:
    """The sequence divides over the ranks, in the data loader and in our layout, and into blocks.

    A rest would have to be padded or dropped.
    """
    table = None if config.block_mask is None else load_block_mask(config.block_mask)
    if args.seq_length is not None:
        zigzag(args.seq_length, args.context_parallel_size)
        make_layout(config, args.seq_length, args.context_parallel_size)
        Mask.causal(block_table=table).check_length(args.seq_length)


def _recompute_refusals(args: argparse.Namespace, config: BurstConfig) -> Iterator[str]:
    """What has no effect where Megatron recomputes nothing, and modules in which it fails."""
    is_full, fraction = args.recompute_granularity == "full", config.recompute_fraction
    selective = args.recompute_granularity == "selective" or args.recompute_activations
    modules = args.recompute_modules or ["core_attn"]
    norms = sorted({"layernorm", "gdn_norm_out"} & {*modules})
    if selective and norms and importlib.util.find_spec("transformer_engine") is None:
        yield (
            f"--recompute-modules {' '.join(norms)}: Megatron asks TransformerEngine there, which "
            "is not installed: leave them out"
        )
    if selective and "mlp" in modules and args.add_bias_linear and not (args.fp8 or args.fp4):
        yield (
            "--recompute-modules mlp: Megatron's backward of an MLP with biases calls itself until "
            "no memory is left: add --disable-bias-linear, or take --mlp-chunks auto for it"
        )
    if args.recompute_offload and not is_full and fraction in (None, 1):
        yield (
            "--recompute-offload has no effect where Megatron recomputes no whole layers: add "
            f"{_FULL}, or drop it"
        )
    if fraction is None:
        return
    given = f"--recompute-attention-fraction {fraction}"
    attention = selective and "core_attn" in modules
    if not (is_full or attention):
        yield (
            f"{given} has no effect where Megatron does not recompute attention: add {_FULL}, or "
            "drop it"
        )
    if args.distribute_saved_activations:
        yield (
            f"{given} finds what it saved by the inputs that Megatron saves, which "
            "--distribute-saved-activations replaces: drop one of them"
        )


def _hierarchy_refusals(args: argparse.Namespace, config: BurstConfig) -> Iterator[str]:
    """Megatron makes a group for each size; ours are those within the node and between nodes."""
    sizes = args.hierarchical_context_parallel_sizes
    if not sizes:
        return
    given = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
    if len(sizes) != 2:
        yield f"{given}: a double ring takes two sizes, the ranks of a node and the nodes"
    if config.ranks_per_node is not None:
        yield (
            f"--burst-ranks-per-node {config.ranks_per_node} and {given} say the same: drop one of "
            "them"
        )
    if config.shape_of_rings is Topology.FLAT:
        yield f"{given} needs a double ring: take --burst-topology double or drop it"


def _check_head_parallelism(args: argparse.Namespace, config: BurstConfig) -> None:
    """An all-to-all spreads the heads of a tensor-parallel rank over a part of the CP ranks."""
    ranks, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    size = ranks if config.algorithm is Algorithm.ULYSSES else config.head_parallel_size or 1
    flag = f"--burst-head-parallel-size {size}"
    if ranks % size:
        raise ValueError(f"{flag} does not divide --context-parallel-size {ranks}")
    sizes = args.hierarchical_context_parallel_sizes
    if sizes and sizes[0] % size:
        raise ValueError(
            f"{flag} must divide the {sizes[0]} ranks of a node that "
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} gives"
        )
    if args.num_attention_heads is not None:
        heads = args.num_attention_heads
        kv_heads = args.num_query_groups if args.group_query_attention else heads
        # Megatron, too, gives every tensor-parallel rank a kv head where there are fewer of them.
        copies = kv_head_copies(heads // tensor, max(kv_heads // tensor, 1), size)
        check_head_chunks(config.head_chunks or 1, max(kv_heads // tensor, 1) * copies // size)


def _megatron_refusals(args: argparse.Namespace) -> Iterator[str]:
    """What attention of Megatron's own lacks."""
    ranks = args.context_parallel_size
    if names_ours(args.cp_comm_type):
        if args.spec is None:
            yield (
                f"--cp-comm-type {' '.join(args.cp_comm_type)} needs --context-parallel-algo "
                f"{Algorithm.BURST}"
            )
    elif ranks > 1 and importlib.util.find_spec("transformer_engine") is None:
        yield (
            f"--context-parallel-algo {MEGATRON} with --context-parallel-size {ranks} needs "
            "TransformerEngine, which is not installed: install transformer-engine[pytorch]==2.17.1"
            f" (it needs an NVIDIA GPU), or take --context-parallel-algo {Algorithm.BURST}"
        )
