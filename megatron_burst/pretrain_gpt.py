"""Pretrain a GPT with Megatron's own training loop, from the PyPI wheel of megatron-core alone.

    torchrun --nproc-per-node 4 -m megatron_burst.pretrain_gpt \
        --context-parallel-size 4 --context-parallel-algo burst ...

takes every flag of Megatron's pretrain_gpt.py; those of the plug-in are the group "burst" of
`--help`. Without a GPU it trains on the CPU over gloo, with no more flags than with one.
"""

import sys
from typing import Any

from megatron_burst import launch


def main() -> None:
    """Parse the command line and train."""
    launch.start()
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

    pretrain(
        container,
        gpt_training.datasets_provider,
        ModelType.encoder_or_decoder,
        gpt_training.forward_step,
    )
    _report_bytes(args, provider.pool)
    if dist.is_initialized():
        dist.destroy_process_group()


def _report_bytes(args: Any, pool: Any) -> None:
    """Write to TensorBoard what this rank sent for attention a training step, on average."""
    from megatron.training import get_tensorboard_writer

    writer = get_tensorboard_writer()
    if writer is None or pool is None:
        return
    # args.iteration is where training started; there is no curr_iteration if it never did.
    steps = getattr(args, "curr_iteration", -1) + 1 - args.iteration
    if steps > 0:
        sent = pool.bytes_sent - pool.bytes_sent_in_evaluation
        writer.add_scalar("burst/bytes-sent-per-rank", sent / steps, args.curr_iteration)
        writer.flush()


if __name__ == "__main__":
    main()
