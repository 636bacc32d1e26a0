"""Trains a tiny GPT with Megatron's own loop on the CPU platform; run by tests."""

from functools import partial

import torch

from megatron_burst import launch
from megatron_burst.cpu_platform import platform as cpu_platform


def main() -> None:
    cpu_platform.activate()
    launch.mend_wheel()

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.models.gpt import default_layer_spec

    from megatron_burst.plugin.local_layers import block_spec

    def layer_spec(config, vp_stage=None):
        return block_spec(default_layer_spec(config, vp_stage), config.transformer, vp_stage)

    args = parse_and_validate_args()
    config = gpt_config_from_args(args)
    config.transformer_layer_spec = layer_spec
    datasets.is_distributed = True  # every rank reads its own data, TP ranks the same
    container = pretrain_cfg_container_from_args(args, config)
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.destroy_process_group()


def datasets(samples, vp_stage=None):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="90,5,5",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


def forward_step(batches, model):
    batch = {name: value.cuda() for name, value in next(batches).items() if torch.is_tensor(value)}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(sum_of_losses, batch["loss_mask"])


def sum_of_losses(loss_mask, losses):
    total = (losses.float() * loss_mask).sum()
    tokens = loss_mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}
