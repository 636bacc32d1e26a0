"""What `--spec megatron_burst.plugin.spec gpt` or `hybrid` names: our attention, no launcher.

    torchrun ... pretrain_gpt.py --spec megatron_burst.plugin.spec gpt --cp-comm-type burst \
        --attention-dropout 0 --no-create-attention-mask-in-dataloader ...

Megatron imports it by that flag, so an unmodified script needs nothing else; pretrain_hybrid.py
takes `hybrid`. It brings attention alone, with the default settings.
"""

import argparse
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import get_args
from megatron.training.models.gpt import GPTModelConfig

from megatron_burst.config import Algorithm, BurstConfig
from megatron_burst.plugin import attachment_points
from megatron_burst.plugin.attention.core_attention import SharedState
from megatron_burst.plugin.attention.layer_algorithms import algorithms, check_layers
from megatron_burst.plugin.attention.shapes import tokens_of_rank
from megatron_burst.plugin.layer_spec import LayerSpecProvider, stack_spec
from megatron_burst.plugin.limits import beyond, refusals, refuse_all

_FORM = "--spec megatron_burst.plugin.spec"
_ONLY_WITH_A_LAUNCHER = {
    "create_attention_mask_in_dataloader": (
        "a dense mask cannot be honoured in a ring: pass --no-create-attention-mask-in-dataloader"
    ),
    "dataloader_inter_document_masking": (
        "documents need hooks of the model: start with python -m megatron_burst.run SCRIPT"
    ),
    "mtp_num_layers": (
        "Megatron builds MTP layers from a spec of its own: start with python -m "
        "megatron_burst.run SCRIPT"
    ),
}


def gpt(model_config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Return Megatron's own spec of a pipeline stage, with the attention of --cp-comm-type.

    Raises:
        ValueError: --cp-comm-type names none of our algorithms, or Megatron's arguments ask for
            what our attention cannot do, or cannot do without a launcher.
    """
    attachment_points.check()
    provider = LayerSpecProvider(None, _shared_state())
    # Megatron asks once for each virtual stage: all of them share the process groups.
    model_config.transformer_layer_spec = provider
    return provider(model_config, vp_stage)


class _Stack:
    """Builds the stack of a pipeline stage; raises what `gpt` raises."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return the stack."""
        attachment_points.check()
        spec = stack_spec(None, _shared_state())
        return spec.module(*args, submodules=spec.submodules, **spec.params, **options)


hybrid = ModuleSpec(module=_Stack)


def _shared_state() -> SharedState:
    args = get_args()
    return SharedState(config_from_args(args), tokens_of_rank(args))


def config_from_args(args: argparse.Namespace) -> BurstConfig:
    """Return the settings that --cp-comm-type asks for; ValueError as `gpt` raises it."""
    named = algorithms(args.cp_comm_type)
    if not named:
        raise ValueError(
            f"{_FORM} takes the algorithm from --cp-comm-type: add --cp-comm-type "
            f"{Algorithm.BURST} (there are: {', '.join(Algorithm)})"
        )
    config = BurstConfig(
        algorithm=named[0], timeout_seconds=60.0 * args.distributed_timeout_minutes
    )
    check_layers(args, config, own_spec=False)
    reasons = [*refusals(args), *beyond(_ONLY_WITH_A_LAUNCHER, args)]
    refuse_all(f"{_FORM} cannot run this", reasons)
    return config
