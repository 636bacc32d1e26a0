"""Whether the host has room for what --recompute-offload puts there, counted before training."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from megatron.core.num_microbatches_calculator import (
    StepBatchsizeNumMicroBatchesCalculator,
    get_current_global_batch_size,
    get_num_microbatches,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.plugin.attention.core_attention import BurstCoreAttention
from megatron_burst.plugin.models import mtp_layers, need_language_models
from megatron_burst.transport.host import pinned_bytes

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES = "memory.max", "memory.current"  # of a control group: its limit, what it holds
_OLD_FILES = "memory.limit_in_bytes", "memory.usage_in_bytes"  # of version 1
_GIB = 2**30
_OPTIMIZER = 16  # bytes of a weight: four numbers in float32


class HostRoom:
    """A pre-wrap hook of Megatron's model builders that refuses what a node's memory does not hold.

    Args:
        tokens: of a micro-batch on this rank.
        fraction: of attention that is recomputed; None: all.
        hosted: the share of the optimizer that is there, of experts' weights and of others.
        batches: those of a schedule of global batches, of which the largest counts.
    """

    def __init__(
        self,
        tokens: int,
        fraction: float | None,
        hosted: tuple[float, float] = (0.0, 0.0),
        batches: Sequence[int] = (),
    ) -> None:
        self._tokens, self._fraction, self._hosted = tokens, fraction, hosted
        self._batches = batches
        self._stages: list[Any] = []

    def __call__(self, models: list[Any]) -> list[Any]:
        """Count what the pipeline stages of a model put there, and return them."""
        need_language_models("--recompute-offload", models)
        if not getattr(models[0], "vp_stage", None):  # virtual stages may come one by one
            self._stages.clear()
        self._stages += models
        hosted = sum(optimizer_bytes(model, self._hosted) for model in self._stages) / _GIB
        needed = hosted + self._offloaded() / _GIB
        ranks, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available_bytes() / _GIB
        text = (
            f"--recompute-offload puts {needed:.1f} GiB of a rank into the host's memory, of "
            f"{ranks} ranks on this node {ranks * needed:.1f} GiB, and {there:.1f} GiB are "
            "available: give the job more memory or more nodes, or drop --recompute-offload"
        )
        if hosted:
            text += f" or --optimizer-cpu-offload ({hosted:.1f} GiB of a rank are its)"
        if ranks * needed > there:
            raise ValueError(text)
        return models

    def _offloaded(self) -> float:
        config, virtual = self._stages[0].config, len(self._stages)
        waiting = ranks = config.pipeline_model_parallel_size
        if virtual > 1:  # interleaved: the first rank's warm-up, in parts of a stage
            group = config.microbatch_group_size_per_vp_stage
            waiting = ((virtual - 1) * group + 2 * ranks - 1) / virtual
        at_once, tensors = min(waiting, self._micro_batches()), Counter[int]()
        for stage in self._stages:
            tensors.update(offloaded(stage, self._tokens, self._fraction))
        return sum(pinned_bytes(size, math.ceil(n * at_once)) for size, n in tensors.items())

    def _micro_batches(self) -> int:
        now = get_num_microbatches()  # of the first step
        return now * max(self._batches) // get_current_global_batch_size() if self._batches else now


def scheduled_batches(args: Any) -> list[int]:
    """Return the global batches of --step-batch-size-schedule "FROM:BATCH FROM:BATCH ..."."""
    parse = StepBatchsizeNumMicroBatchesCalculator._parse_schedule  # of 1K, too
    return [batch for _, batch in parse(args.step_batch_size_schedule or "", None)]


def optimizer_share(args: Any) -> tuple[float, float]:
    """Return how much of the optimizer of a rank's weights --optimizer-cpu-offload puts there.

    Of experts' weights and of others, which the distributed optimizer shards over other ranks.
    """
    if not args.optimizer_cpu_offload:
        return 0.0, 0.0
    share: float = args.optimizer_offload_fraction
    if not args.use_distributed_optimizer:
        return share, share
    stage = args.world_size // args.pipeline_model_parallel_size
    stage //= args.num_distributed_optimizer_instances  # each of which has all of it
    experts = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return share * experts / stage, share * args.tensor_model_parallel_size / stage


def optimizer_bytes(model: Any, hosted: tuple[float, float]) -> float:
    """Return the bytes there of a copy of the weights, their gradients and Adam's two moments."""
    return sum(
        weight.numel() * hosted[getattr(weight, "allreduce", True)] * _OPTIMIZER
        for weight in model.parameters()
    )


def offloaded(model: Any, tokens: int, fraction: float | None) -> Counter[int]:
    """Count by their bytes a micro-batch's: checkpoints' inputs, and rows that attention saves."""
    config: TransformerConfig = model.config
    tensor, element = config.tensor_model_parallel_size, config.params_dtype.itemsize
    spread = tensor if config.sequence_parallel or config.distribute_saved_activations else 1
    wide = 4 if config.fp32_residual_connection else element  # of what is between layers
    inputs = tokens * config.hidden_size * wide // spread
    heads, head = config.num_attention_heads / tensor, config.kv_channels or 0
    if config.multi_latent_attention:
        head = config.v_head_dim
    kept = 0.0 if fraction is None else (1 - fraction) * tokens * heads
    sizes = Counter({inputs: _inputs(model)})
    if kept:
        sizes.update(dict.fromkeys((round(kept * head * element), round(kept * 4)), _calls(model)))
    return sizes


def _calls(model: Any) -> int:
    """Count the attention that is recomputed and keeps rows: no layer of MTP's does as a whole."""
    config, layers = model.config, model.decoder.layers
    parts = [model] if config.recompute_granularity != "full" else layers
    if config.recompute_method == "block":
        parts = islice(layers, config.recompute_num_layers)
    each = (module for part in parts for module in part.modules())
    return sum(isinstance(module, BurstCoreAttention) for module in each)


def _inputs(model: Any) -> int:
    """Count what checkpoints save; one of MTP, whose layers have none under `block`, two inputs."""
    config, layers = model.config, len(model.decoder.layers)
    if config.recompute_granularity != "full":
        return 0
    number = config.recompute_num_layers or 1
    if config.recompute_method == "block":
        return min(number, layers)
    depths = config.mtp_num_layers if [*mtp_layers(model)] else 0  # of one layer, maybe
    return math.ceil(layers / number) + 2 * depths


def available_bytes() -> int:
    """Return what the machine, and the control groups of this process, can still give to it."""
    left = [psutil.virtual_memory().available]
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_old = "memory" in controllers.split(",")  # version 1 has a tree for each controller
        root = _CGROUPS / "memory" if is_old else _CGROUPS
        limit, held = _OLD_FILES if is_old else _FILES
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if (file := group / limit).is_file() and (text := file.read_text().strip()) != "max":
                left.append(int(text) - _held(group, held))
    return max(0, min(left))


def _held(group: Path, file: str) -> int:
    """Return what a control group holds, without the files that it has read: these give way."""
    stat = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
    of_all = "total_" if "total_active_file" in stat else ""  # version 1 tells its own first
    cached = int(stat[f"{of_all}active_file"]) + int(stat[f"{of_all}inactive_file"])
    return int((group / file).read_text()) - cached
