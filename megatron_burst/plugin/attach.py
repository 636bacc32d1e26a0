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
import megatron.training.utils as training_utils
from megatron.core import utils as core_utils
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.training import get_args

from megatron_burst.config import BurstConfig, LayoutName, Refused, refuse
from megatron_burst.plugin import compat
from megatron_burst.plugin.arguments import (
    add_burst_arguments,
    check_ranks,
    configure,
    report_dropouts,
)
from megatron_burst.plugin.attention.latent_layers import attach_to_megatrons
from megatron_burst.plugin.attention.recompute import RecomputeHooks
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.compat import wrap
from megatron_burst.plugin.hooks.batch_cut import BatchCut
from megatron_burst.plugin.hooks.host_room import HostRoom, optimizer_share, scheduled_batches
from megatron_burst.plugin.hooks.lm_head import ChunkedHead
from megatron_burst.plugin.hooks.mlp import ChunkedMlps
from megatron_burst.plugin.hooks.mtp import MtpLosses, name_mtp_layers
from megatron_burst.plugin.hooks.offload import OffloadInputs
from megatron_burst.plugin.hooks.sequence_hooks import SequenceHooks
from megatron_burst.plugin.hooks.verify_positions import PositionHooks
from megatron_burst.plugin.layer_spec import LayerSpecProvider, mtp_spec, stack_spec
from megatron_burst.plugin.limits import flag_of
from megatron_burst.plugin.own_models import (
    REMEDY,
    check_attention,
    documents_must_come,
    with_our_parts,
)
from megatron_burst.plugin.refusals import documents_flag, refusals, refuse_all
from megatron_burst.plugin.rejections import with_reason
from megatron_burst.plugin.scans.choice import states_are_passed
from megatron_burst.plugin.settings import Settings, checks_files, settings_of, tokens_of_rank

logger = logging.getLogger(__name__)


class _Batches:
    """Megatron's `build_train_valid_test_data_iterators`, which it calls when the model is built.

    With what cuts the batches.

    Raises:
        ValueError: the model has nothing of what was asked for.
    """

    unattached: str | None = None  # why the model is not what was asked for

    def __init__(self, cut: BatchCut, original: Callable[..., Any]) -> None:
        self.cut, self.original = cut, original

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.unattached:
            raise ValueError(self.unattached)
        return self.original(*args, **options)


def attach(
    look: Callable[[argparse.Namespace], object] = lambda _: None, *, own_entry: bool = False
) -> None:
    """Wrap Megatron's `parse_args` and what builds models; again, the originals are wrapped.

    Megatron offers a hook for more flags, but none between parsing and validation, and none for
    a script that passes no hook. It must come before the script imports these names.

    Args:
        look: looks at the files that parsed arguments name, where --burst-check-files asks for it.
        own_entry: whether it is our own entry, megatron_burst.pretrain, which asks by itself.
    """
    cut = wrap(core_utils, "get_batch_on_this_cp_rank", BatchCut)
    if hasattr(training_utils, "get_batch_on_this_cp_rank"):  # dev's scripts take it from there
        wrap(training_utils, "get_batch_on_this_cp_rank", lambda _: cut)
    built = functools.partial(_Batches, cut)
    batches = wrap(training, "build_train_valid_test_data_iterators", built)

    def flags(parse_args: Callable[..., Any]) -> Callable[..., Any]:
        def add(parser: argparse.ArgumentParser) -> None:
            if any(argument.split("=")[0] == "--yaml-cfg" for argument in sys.argv):
                sys.exit("megatron_burst: --yaml-cfg leaves no place for our flags; pass flags")
            compat.set_defaults_without_transformer_engine(parser)
            add_burst_arguments(parser)

        def settle(args: argparse.Namespace) -> None:
            refused = Refused()
            settings = refused.by(configure, args)
            refused.by(check_ranks, args)
            if refused.by(checks_files, args, own_entry=own_entry):
                refused.by(look, args)
            refuse(refused)
            assert settings is not None
            flags, text = settings.flags, "the model was built, and nothing of ours is in it"
            batches.unattached = f"{flags}: {text}: {REMEDY}" if flags else None

        return compat.around_parse_args(parse_args, add, settle)

    wrap(arguments, "parse_args", flags)
    for name in ("gpt_config_from_args", "hybrid_config_from_args"):
        wrap(argument_utils, name, functools.partial(_with_burst_spec, batches=batches))
    wrap(gpt, "mtp_block_spec", _with_burst_mtp)
    wrap(RerunStateMachine, "should_checkpoint_and_exit", with_reason)
    wrap(training, "get_model", functools.partial(_with_our_parts, batches=batches))


def shared_state(model_config: Any) -> SharedState | None:
    """Return what the layers of our attention share in a model that was configured here."""
    if hasattr(model_config, "hybrid_stack_spec"):
        return model_config.hybrid_stack_spec.params.get("shared")
    return model_config.transformer_layer_spec.shared


def _with_burst_spec(config_from_args: Callable[..., Any], batches: _Batches) -> Callable[..., Any]:
    @functools.wraps(config_from_args)
    def build(args: argparse.Namespace, *more: Any, **options: Any) -> Any:
        report_dropouts(args)
        model_config = config_from_args(args, *more, **options)
        is_hybrid = hasattr(model_config, "hybrid_stack_spec")
        field = "hybrid_stack_spec" if is_hybrid else "transformer_layer_spec"
        spec = getattr(model_config, field)
        if args.spec is not None and spec is None:
            # Megatron would go on with its default spec.
            raise ValueError(f"--spec {' '.join(args.spec)} cannot be imported: correct or drop it")
        shared, hooks = _parts(args, batches)
        ours = stack_spec(spec, shared) if is_hybrid else LayerSpecProvider(spec, shared)
        setattr(model_config, field, ours)
        model_config.pre_wrap_hooks += hooks
        return model_config

    return build


def _with_our_parts(get_model: Callable[..., Any], batches: _Batches) -> Callable[..., Any]:
    """Megatron's way to build a model by the script's `model_provider`, not by a configuration."""

    @functools.wraps(get_model)
    def build(model_provider_func: Callable[..., Any], *more: Any, **options: Any) -> Any:
        args = get_args()
        report_dropouts(args)
        provider = with_our_parts(model_provider_func, *_parts(args, batches))
        return get_model(provider, *more, **options)

    return build


def _parts(
    args: argparse.Namespace, batches: _Batches
) -> tuple[SharedState | None, list[Callable[..., Any]]]:
    """Return what goes into the specs of a model, and the hooks of what is built of them."""
    settings = settings_of(args)  # again: a script may have changed the arguments
    shared = _make_shared_state(args, settings)
    hooks = [*_hooks(args, settings, shared, batches)]

    def check(models: list[Any]) -> list[Any]:
        if shared is not None:
            check_attention(models, shared)
        batches.unattached = None
        return models

    return shared, [*hooks, check]


def _with_burst_mtp(mtp_block_spec: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's spec of a GPT's MTP layers, which it makes of its own layer spec."""

    @functools.wraps(mtp_block_spec)
    def build(config: Any, *more: Any, **options: Any) -> Any:
        spec, provider = mtp_block_spec(config, *more, **options), config.transformer_layer_spec
        return mtp_spec(spec, provider.shared) if isinstance(provider, LayerSpecProvider) else spec

    return build


def _make_shared_state(args: argparse.Namespace, settings: Settings) -> SharedState | None:
    """Return what the layers of our attention share; None where attention is Megatron's."""
    if (config := settings.attention) is None:
        return None
    what = "cannot run what --use-checkpoint-args or the script has set"
    refuse_all(f"--context-parallel-algo {config.algorithm} {what}", refusals(args))
    logger.info("%s, %s", config, settings.layers)
    if args.context_parallel_size > 1:
        _say_layout(config, has_documents=args.dataloader_inter_document_masking)
    moves = states_are_passed(args, config, documents=documents_flag(args) is not None)
    sizes = tokens_of_rank(args), args.micro_batch_size or 1
    return SharedState(config, *sizes, layer_config=settings.layers, moves=moves)


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


def _hooks(
    args: argparse.Namespace, settings: Settings, shared: SharedState | None, batches: _Batches
) -> Iterator[Callable[..., Any]]:
    """Yield what attaches to the built model, in this order."""
    if shared is not None:
        if not shared.follows_layout:
            yield SequenceHooks(shared, batches.cut, documents_apart=args.sft)
        if documents := documents_flag(args):
            yield functools.partial(documents_must_come, flag=flag_of(documents))
        if shared.checkpoints is not None:
            yield RecomputeHooks(shared.checkpoints)
        if shared.layer_config.recompute_offload:
            tokens = tokens_of_rank(args)
            assert tokens is not None
            of_node = optimizer_share(args), scheduled_batches(args)
            yield HostRoom(tokens, shared.config.recompute_fraction, *of_node)
            if args.recompute_granularity == "full":
                yield OffloadInputs(shared.checkpoints)
        yield name_mtp_layers
        yield attach_to_megatrons  # in MTP's stacks, which Megatron builds past ours
        if shared.verification is not None:
            yield PositionHooks(shared, ids_begin_anew=args.reset_position_ids)
    if settings.head is not None:
        yield ChunkedHead(settings.head)
    if settings.mlp is not None:
        yield ChunkedMlps(settings.mlp)
    if args.mtp_num_layers and (shared is not None or settings.head is not None):
        yield MtpLosses()
