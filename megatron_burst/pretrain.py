"""Pretrain a GPT with Megatron's own training loop, from the PyPI wheel of megatron-core alone.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 -m megatron_burst.pretrain_gpt \\
        --context-parallel-size 4 --context-parallel-algo burst ...

takes every flag of Megatron's pretrain_gpt.py; those of the plug-in are the group "burst" of
`--help`. Without a GPU it trains on the CPU over gloo, with no more flags than with one.
"""

import sys
from typing import Any

from megatron_burst import launch
from megatron_burst.transport import failure


def main() -> None:
    """Parse the command line and train."""
    with failure.reported():
        launch.start(own_entry=True)
        _train(*_configure())


def _configure() -> tuple[Any, Any, Any]:
    from megatron.training import argument_utils, arguments

    from megatron_burst.plugin import gpt_training

    args = arguments.parse_and_validate_args()
    if missing := gpt_training.unsupported(args):
        sys.exit(f"megatron_burst: {missing}")
    model_config = argument_utils.gpt_config_from_args(args)
    container = argument_utils.pretrain_cfg_container_from_args(args, model_config)
    return args, container, model_config.transformer_layer_spec


def _train(args: Any, container: Any, provider: Any) -> None:
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron_burst.plugin import gpt_training

    try:
        pretrain(
            container,
            gpt_training.datasets_provider,
            ModelType.encoder_or_decoder,
            gpt_training.forward_step,
        )
    except SystemExit as leaving:  # after a signal, --exit-interval or --exit-duration-in-mins
        if leaving.code != 0:
            raise
    gpt_training.write_run_figures(args, provider.shared)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
