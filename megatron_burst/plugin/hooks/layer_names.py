"""Names for the layers of MTP, which Megatron numbers from 1 as it does the decoder's."""

from typing import Any

from megatron_burst.plugin.attention.core_attention import BurstCoreAttention


def name_mtp_layers(models: list[Any]) -> list[Any]:
    """Let --burst-verify and --burst-check-nan call them by their place: a pre-wrap hook."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, BurstCoreAttention) and name.startswith("mtp."):
                module.call_layer(name.removesuffix(".self_attention.core_attention"))
    return models
