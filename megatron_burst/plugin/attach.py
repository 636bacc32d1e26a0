"""The functions of Megatron that are replaced where a command line asks for the plug-in."""

import argparse
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import megatron.training.argument_utils as argument_utils
import megatron.training.arguments as arguments
import megatron.training.models.gpt as gpt
import megatron.training.training as training
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.training import get_args

from megatron_burst.config import BurstConfig, LayoutName
from megatron_burst.plugin import compat
from megatron_burst.plugin.arguments import (
    add_burst_arguments,
    burst_config_from_args,
    checks_files,
    configure,
    lm_head_config_from_args,
    mlp_config_from_args,
    settle_dropouts,
)
from megatron_burst.plugin.attention.ahead import Ahead, DataIterators
from megatron_burst.plugin.attention.core_attention import SharedState
from megatron_burst.plugin.attention.recompute import RecomputeHooks
from megatron_burst.plugin.attention.shapes import tokens_of_rank
from megatron_burst.plugin.compat import wrap
from megatron_burst.plugin.cpu import platform as cpu_platform
from megatron_burst.plugin.files import complete_checkpoints, data_indices
from megatron_burst.plugin.files.data_files import check_data_files
from megatron_burst.plugin.hooks.host_room import HostRoom, optimizer_share
from megatron_burst.plugin.hooks.lm_head import ChunkedHead
from megatron_burst.plugin.hooks.mlp import ChunkedMlps
from megatron_burst.plugin.hooks.mtp import MtpLosses, name_mtp_layers
from megatron_burst.plugin.hooks.offload import OffloadInputs
from megatron_burst.plugin.hooks.sequence_hooks import SequenceHooks
from megatron_burst.plugin.hooks.verify_positions import PositionHooks
from megatron_burst.plugin.layer_spec import LayerSpecProvider, mtp_spec, stack_spec
from megatron_burst.plugin.limits import MEGATRON, refusals, refuse_all
from megatron_burst.plugin.own_models import (
    REMEDY,
    check_attention,
    documents_must_come,
    with_our_parts,
)
from megatron_burst.plugin.rejections import with_reason

logger = logging.getLogger(__name__)


def attach(*, own_entry: bool = False) -> None:
    """Wrap Megatron's `parse_args` and what builds models; again, the originals are wrapped.

    Megatron offers a hook for more flags, but none between parsing and validation, and none for
    a script that passes no hook. It must come before the script imports these names. Our own
    entry, megatron_burst.pretrain, checks files by itself.
    """
    iterators = wrap(training, "build_train_valid_test_data_iterators", DataIterators)
    flags = functools.partial(_with_burst_flags, own_entry=own_entry, iterators=iterators)
    wrap(arguments, "parse_args", flags)
    for name in ("gpt_config_from_args", "hybrid_config_from_args"):
        wrap(argument_utils, name, functools.partial(_with_burst_spec, iterators=iterators))
    wrap(gpt, "mtp_block_spec", _with_burst_mtp)
    wrap(RerunStateMachine, "should_checkpoint_and_exit", with_reason)
    wrap(training, "get_model", functools.partial(_with_our_parts, iterators=iterators))


def shared_state(model_config: Any) -> SharedState | None:
    """Return what the layers of our attention share in a model that was configured here."""
    if hasattr(model_config, "hybrid_stack_spec"):
        return model_config.hybrid_stack_spec.params.get("shared")
    return model_config.transformer_layer_spec.shared


def _with_burst_flags(
    parse_args: Callable[..., Any], *, own_entry: bool, iterators: DataIterators
) -> Callable[..., Any]:
    def prepare(parser: argparse.ArgumentParser) -> None:
        if any(argument.split("=")[0] == "--yaml-cfg" for argument in sys.argv):
            sys.exit("megatron_burst: --yaml-cfg leaves no place for our flags; pass flags instead")
        if not cpu_platform.cpu_platform_active():
            compat.set_defaults_without_transformer_engine(parser)
        add_burst_arguments(parser)

    def settle(args: argparse.Namespace) -> None:
        configure(args)
        iterators.unattached = _unattached(args)
        if checks_files(args, own_entry=own_entry):
            check_data_files(args)
            data_indices.attach()
            complete_checkpoints.attach(args)

    return compat.around_parse_args(parse_args, prepare, settle)


def _with_burst_spec(
    config_from_args: Callable[..., Any], iterators: DataIterators
) -> Callable[..., Any]:
    @functools.wraps(config_from_args)
    def build(args: argparse.Namespace, *more: Any, **options: Any) -> Any:
        settle_dropouts(args)
        model_config = config_from_args(args, *more, **options)
        is_hybrid = hasattr(model_config, "hybrid_stack_spec")
        field = "hybrid_stack_spec" if is_hybrid else "transformer_layer_spec"
        spec = getattr(model_config, field)
        if args.spec is not None and spec is None:
            # Megatron would go on with its default spec.
            raise ValueError(f"--spec {' '.join(args.spec)} cannot be imported")
        if is_hybrid and args.qk_layernorm:
            logger.warning("--qk-layernorm has no effect: Megatron's hybrid stack has no such norm")
        shared, hooks = _parts(args, iterators)
        ours = stack_spec(spec, shared) if is_hybrid else LayerSpecProvider(spec, shared)
        setattr(model_config, field, ours)
        model_config.pre_wrap_hooks += hooks
        return model_config

    return build


def _with_our_parts(get_model: Callable[..., Any], iterators: DataIterators) -> Callable[..., Any]:
    """Megatron's way to build a model by the script's `model_provider`, not by a configuration."""

    @functools.wraps(get_model)
    def build(model_provider_func: Callable[..., Any], *more: Any, **options: Any) -> Any:
        args = get_args()
        settle_dropouts(args)
        provider = with_our_parts(model_provider_func, *_parts(args, iterators))
        return get_model(provider, *more, **options)

    return build


def _parts(
    args: argparse.Namespace, iterators: DataIterators
) -> tuple[SharedState | None, list[Callable[..., Any]]]:
    """Return what goes into the specs of a model, and the hooks of what is built of them."""
    shared = _make_shared_state(args)
    iterators.ahead = _ahead(args, shared)
    hooks = [*_hooks(args, shared, iterators.ahead)]

    def check(models: list[Any]) -> list[Any]:
        if shared is not None:
            check_attention(models, shared)
        iterators.unattached = None
        return models

    return shared, [*hooks, check]


def _unattached(args: argparse.Namespace) -> str | None:
    """Say what no model has yet of what the flags ask for, if they ask for anything in it."""
    asked = {"--context-parallel-algo": args.context_parallel_algo}
    asked |= {"--lm-head-loss": args.lm_head_loss}
    flags = [f"{name} {value}" for name, value in asked.items() if value != MEGATRON]
    flags += [f"--mlp-chunks {args.mlp_chunks or 'auto'}"] * (args.mlp_chunks != 1)
    text = f"{' and '.join(flags)}: the model was built, and nothing of ours is in it: {REMEDY}"
    return text if flags else None


def _with_burst_mtp(mtp_block_spec: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's spec of a GPT's MTP layers, which it makes of its own layer spec."""

    @functools.wraps(mtp_block_spec)
    def build(config: Any, *more: Any, **options: Any) -> Any:
        spec, provider = mtp_block_spec(config, *more, **options), config.transformer_layer_spec
        return mtp_spec(spec, provider.shared) if isinstance(provider, LayerSpecProvider) else spec

    return build


def _make_shared_state(args: argparse.Namespace) -> SharedState | None:
    """Return what the layers of our attention share; None where attention is Megatron's."""
    config = burst_config_from_args(args)
    if config is None:
        return None
    # Again: they may have changed since they were parsed.
    what = "cannot run what --use-checkpoint-args or the script has set"
    refuse_all(f"--context-parallel-algo {config.algorithm} {what}", refusals(args))
    logger.info("%s", config)
    if args.context_parallel_size > 1:
        _say_layout(config, has_documents=args.dataloader_inter_document_masking)
    return SharedState(config, tokens_of_rank(args))


def _say_layout(config: BurstConfig, *, has_documents: bool) -> None:
    """Say what the layout leaves undone."""
    if config.cuts_for_recompute and config.layout is not LayoutName.SEGMENTED_ZIGZAG:
        logger.info(
            "--recompute-attention-fraction %g: under %s the ranks recompute unequal parts; "
            "--burst-layout segmented-zigzag spreads them evenly",
            *(config.recompute_fraction, config.layout),
        )
    if config.layout is LayoutName.BALANCED and not has_documents:
        logger.info(
            "--burst-layout %s is zigzag: without --dataloader-inter-document-masking there are no "
            "documents to balance",
            config.layout,
        )


def _ahead(args: argparse.Namespace, shared: SharedState | None) -> Ahead | None:
    """Return what plans documents one micro-batch ahead, where that can be known.

    An iterator from outside Megatron may save how far it was read. Under --burst-verify every
    mask is compared over the ranks.
    """
    documents = args.dataloader_inter_document_masking or args.sft
    documents = documents and args.dataloader_type != "external"
    if shared is None or not documents or shared.verification is not None:
        return None
    return Ahead(shared, args.seq_length)


def _hooks(
    args: argparse.Namespace, shared: SharedState | None, ahead: Ahead | None
) -> Iterator[Callable[..., Any]]:
    """Yield what attaches to the built model, in this order."""
    if shared is not None:
        moves = shared.config.layout is not LayoutName.ZIGZAG
        if moves or args.dataloader_inter_document_masking or args.sft:
            yield SequenceHooks(shared, ahead, documents_apart=args.sft)
        if args.dataloader_inter_document_masking:
            yield documents_must_come
        if shared.checkpoints is not None:
            yield RecomputeHooks(shared.checkpoints)
        if shared.config.recompute_offload:
            tokens = tokens_of_rank(args)
            assert tokens is not None
            yield HostRoom(tokens, shared.config.recompute_fraction, optimizer_share(args))
            if args.recompute_granularity == "full":
                yield OffloadInputs(shared.checkpoints)
        yield name_mtp_layers
        if shared.verification is not None:
            yield PositionHooks(shared, ids_begin_anew=args.reset_position_ids)
    head = lm_head_config_from_args(args)  # again: a script may have changed the arguments
    if head is not None:
        yield ChunkedHead(head)
    if (mlp := mlp_config_from_args(args)) is not None:
        yield ChunkedMlps(mlp)
    if args.mtp_num_layers and (shared is not None or head is not None):
        yield MtpLosses()
