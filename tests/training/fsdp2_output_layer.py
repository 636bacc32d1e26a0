"""Trains with an output layer that FSDP2 shards by itself, as beside TE's layers; run by tests."""

from typing import Any

from torch import nn


def main() -> None:
    from megatron_burst import pretrain_gpt
    from megatron_burst.cpu_platform import platform

    platform.activate()
    from megatron.core.distributed import torch_fully_sharded_data_parallel as megatrons

    def shard(module: nn.Module, **options: Any) -> None:
        if hasattr(module, "output_layer"):  # the model comes last
            fully_shard(module.output_layer, **options)
        fully_shard(module, **options)

    fully_shard = megatrons.fully_shard
    megatrons.fully_shard = shard
    pretrain_gpt.main()
