"""A training script, as forks have them, that builds its model by itself; run by tests.

`--build` says how: a GPTModel by `model_provider` (gpt), another model so (bert), or by a
configuration that no function of Megatron made of the arguments (config).
"""

import argparse
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.training import argument_utils, arguments, get_args, pretrain

from megatron_burst.plugin import pretraining


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--build", choices=["gpt", "bert", "config"], default="gpt")
    return parser


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> Any:
    args = get_args()
    config = argument_utils.core_transformer_config_from_args(args)
    common = {"pre_process": pre_process, "post_process": post_process}
    if args.build == "bert":
        sizes = args.padded_vocab_size, args.max_position_embeddings
        return BertModel(config, 0, bert_layer_local_spec, *sizes, **common)
    layer = get_gpt_layer_local_spec()
    mtp = None
    if args.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return GPTModel(
        config,
        layer,
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        **common,
    )


def main() -> None:
    args = arguments.parse_and_validate_args(extra_args_provider=add_arguments)
    config = None
    if args.build == "config":
        wrapped: Any = argument_utils.gpt_config_from_args
        config = wrapped.original(args)
    pretrain(
        argument_utils.pretrain_cfg_container_from_args(args, config),
        pretraining.datasets_provider,
        ModelType.encoder_or_decoder,
        pretraining.forward_step,
        model_provider=None if config else model_provider,
    )
