"""Whether the host has room for what --recompute-offload puts there, counted before training."""

import math
import os
from pathlib import Path
from typing import Any

import psutil
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.config import refuse
from megatron_burst.plugin.attention.core_attention import BurstCoreAttention
from megatron_burst.plugin.models import need_language_models

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_GIB = 2**30


class HostRoom:
    """A pre-wrap hook of Megatron's model builders that refuses what a node's memory does not hold.

    Args:
        tokens: of a micro-batch on this rank.
        fraction: of attention that is recomputed; None: all.
    """

    def __init__(self, tokens: int, fraction: float | None) -> None:
        self._tokens, self._fraction = tokens, fraction

    def __call__(self, models: list[Any]) -> list[Any]:
        """Count what the parts of the model on this rank put there, and return them.

        Raises:
            ValueError: with the numbers and what to change, or for a model without such layers.
        """
        need_language_models("--recompute-offload", models)
        waiting = models[0].config.pipeline_model_parallel_size
        waiting *= 1 + 1 / len(models) if len(models) > 1 else 1  # interleaved: a longer warm-up
        needed = sum(offloaded_bytes(model, self._tokens, self._fraction) for model in models)
        needed *= min(waiting, get_num_microbatches()) / _GIB
        ranks, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available_bytes() / _GIB
        text = (
            f"--recompute-offload puts {needed:.1f} GiB of a rank into the host's memory, of "
            f"{ranks} ranks on this node {ranks * needed:.1f} GiB, and {there:.1f} GiB are "
            "available: give the job more memory or more nodes, or drop --recompute-offload"
        )
        refuse((ranks * needed > there, text))
        return models


def offloaded_bytes(model: Any, tokens: int, fraction: float | None) -> float:
    """Return those of a micro-batch: checkpoints' inputs, and rows that attention saves."""
    config: TransformerConfig = model.config
    tensor, element = config.tensor_model_parallel_size, config.params_dtype.itemsize
    spread = tensor if config.sequence_parallel or config.distribute_saved_activations else 1
    inputs = _checkpoints(config, len(model.decoder.layers)) * config.hidden_size * element / spread
    heads, head = config.num_attention_heads / tensor, config.kv_channels or 0
    if config.multi_latent_attention:
        head = config.v_head_dim
    calls = sum(isinstance(module, BurstCoreAttention) for module in model.modules())
    kept = 0.0 if fraction is None else 1 - fraction
    return tokens * (inputs + kept * calls * heads * (head * element + 4))


def _checkpoints(config: TransformerConfig, layers: int) -> int:
    if config.recompute_granularity != "full":
        return 0
    number = config.recompute_num_layers or 1
    return min(number, layers) if config.recompute_method == "block" else math.ceil(layers / number)


def available_bytes() -> int:
    """Return what the machine, and the control groups of this process, can still give to it."""
    left = [psutil.virtual_memory().available]
    for line in _OWN_CGROUPS.read_text().splitlines():
        folder = _CGROUPS / line.rpartition(":")[2].lstrip("/")
        for group in (folder, *folder.parents):
            limit, used = group / "memory.max", group / "memory.current"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                left.append(int(text) - int(used.read_text()))
    return max(0, min(left))
