"""Pretrain a language model with Megatron's own loop, from the PyPI wheel of megatron-core alone.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 -m megatron_burst.pretrain \\
        --context-parallel-size 4 --context-parallel-algo burst ...

takes every flag of Megatron's pretrain_gpt.py and pretrain_hybrid.py: a HybridModel is what
`--hybrid-layer-pattern` describes, without it the model is a GPTModel. The flags of the plug-in are
the group "burst" of `--help`. Without a GPU it trains on the CPU over gloo, with no more flags than
with one.
"""

import sys

from megatron_burst.launch import started


def main() -> None:
    """Parse the command line and train."""
    with started(own_entry=True):
        _train()


def _train() -> None:
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments, pretrain

    from megatron_burst.plugin import attach, pretraining

    # As upstream's scripts have it: --vocab-file and --merge-file alone name a tokenizer.
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    if reason := pretraining.refusal(args):
        sys.exit(f"megatron_burst: {reason}")
    pretraining.hold_checkpoints(args)
    model_config = pretraining.model_config(args)
    container = argument_utils.pretrain_cfg_container_from_args(args, model_config)
    try:
        pretrain(
            container,
            pretraining.datasets_provider,
            ModelType.encoder_or_decoder,
            pretraining.forward_step,
        )
    except SystemExit as leaving:  # after a signal, --exit-interval or --exit-duration-in-mins
        if leaving.code != 0:
            raise
    pretraining.write_run_figures(args, attach.shared_state(container.model))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
