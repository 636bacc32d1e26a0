"""Reads what is predicted from Megatron's and our flags; refuses what it would predict wrongly."""

import math
import random
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from functools import cache

import torch

from megatron_burst.config import BurstConfig, LayoutName, LmHeadConfig, LmHeadLoss
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk_size import Chunking, Sizes
from megatron_burst.plans.choice.mlp_chunks import choose_mlp_chunks
from megatron_burst.plugin.flags import flags
from megatron_burst.plugin.limits import LATENT_LIMITS, MLP_LIMITS, flag_of
from megatron_burst.plugin.settings import mlp_config_from_args, with_sendable_latents
from megatron_burst.plugin.training_config import LayerConfig, MlpConfig
from megatron_burst.tools.flags import Flags, cut, kept, staged, whole, window_of
from megatron_burst.tools.model import model_of
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.unmodelled import BYTES, MOMENTS, refuse_unmodelled
from megatron_burst.tools.plan.workload import Workload

_VIRTUAL = "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
_flags = cache(flags)
_ASKED = {*LATENT_LIMITS, *MLP_LIMITS}
_SELECTIVE = ("core_attn", "layernorm", "mlp", "moe_act", "moe")


def workload_of(given: Flags, cluster: Cluster, gpus: int) -> Workload:
    """Read a step of training from Megatron's and our flags.

    Raises:
        ValueError: something is missing, is not modelled or does not fit together.
    """
    refuse_unmodelled(given)
    element_bytes, gradient_bytes = _widths(given)
    args = _as_parsed(given)
    mlp_config_from_args(args)  # which refuses what does not go with chunks
    chunking, fsdp = loss_chunking(given), bool(given.get("use-megatron-fsdp"))
    stages, virtual = whole(given, "pipeline-model-parallel-size"), _virtual(given)
    load = Workload(
        model=model_of(given),
        cluster=cluster,
        gpus=gpus,
        tensor=(tensor := whole(given, "tensor-model-parallel-size")),
        context=whole(given, "context-parallel-size"),
        hides_experts=bool(given.get("overlap-moe-expert-parallel-comm")),
        pipeline=stages,
        virtual=virtual,
        group=whole(given, "microbatch-group-size-per-virtual-pipeline-stage"),
        expert=whole(given, "expert-model-parallel-size"),
        expert_tensor=whole(given, "expert-tensor-parallel-size", tensor),
        gathers_tokens=given.get("moe-token-dispatcher-type", "allgather") == "allgather",
        tokens=whole(given, "seq-length"),
        sequences=whole(given, "global-batch-size"),
        micro=whole(given, "micro-batch-size"),
        config=_attention(given, args),
        window=window_of(given),
        documents=_documents(given),
        recompute=given.get("recompute-granularity") == "full",
        selective=selective_modules(given),
        chunked_loss=chunking is not None,
        recompute_offload=config_of(LayerConfig, given).recompute_offload,
        mlp_chunks=_mlp_chunks(given),
        replays_mlps=_replays_mlps(given, stages * virtual),
        loss_bytes=chunking.peak if chunking else 0,
        head_products=chunking.products if chunking else 3,
        zero3=fsdp,
        sharded=fsdp or bool(given.get("use-distributed-optimizer")),
        gradient_bytes=gradient_bytes,
        hides_gradients=fsdp or bool(given.get("overlap-grad-reduce")),
        hides_weights=fsdp or bool(given.get("overlap-param-gather")),
        optimizer_bytes=_optimizer_bytes(given, element_bytes),
        offload=_offloaded(given),
        sequence_parallel=bool(given.get("sequence-parallel")),
        fp8=bool(given.get("fp8-format")),
        element_bytes=element_bytes,
    )
    if load.offload and not (load.sharded and given.get("use-precision-aware-optimizer")):
        raise ValueError(
            "--optimizer-cpu-offload: Megatron wants --use-distributed-optimizer and "
            "--use-precision-aware-optimizer, too"
        )
    if load.shards > 1 and not load.sharded and gradient_bytes == 2:
        raise ValueError(
            "--grad-reduce-in-bf16 without --use-distributed-optimizer cannot be predicted here: "
            "its step copies gradients to float32"
        )
    if load.model.mtp and load.pipeline > 1:
        raise ValueError(
            f"MTP beside --pipeline-model-parallel-size {load.pipeline} cannot be predicted here: "
            "the last stage has all of it"
        )
    if load.fp8 and cluster.fp8_speedup == 1:
        raise ValueError(f"--fp8-format: the GPUs of {cluster.name} have no FP8")
    return load


def _as_parsed(given: Flags) -> Namespace:
    """What Megatron's parser makes of the flags by which training refuses, or changes, ours."""
    asked = {name: given.get(flag_of(name).removeprefix("--")) for name in _ASKED}
    return Namespace(
        multi_latent_attention=given.get("multi-latent-attention"),
        mlp_chunks=config_of(MlpConfig, given).chunks,
        recompute_granularity=given.get("recompute-granularity"),
        recompute_modules=selective_modules(given),
        **{name: int(str(x)) if str(x).isdecimal() else x for name, x in asked.items()},
    )


def _attention(given: Flags, args: Namespace) -> BurstConfig:
    """Its settings, as training changes them for the rest."""
    config = with_sendable_latents(args, config_of(BurstConfig, given))
    stays = args.cuda_graph_impl not in (None, "none")
    stays |= bool(given.get("overlap-moe-expert-parallel-comm"))
    if stays and config.layout is LayoutName.AUTO:  # no row can move to a layer with a state
        return replace(config, layout=LayoutName.ZIGZAG)
    return config


def config_of[T: (BurstConfig, LayerConfig, LmHeadConfig, MlpConfig)](
    config: type[T], given: Flags
) -> T:
    """Read one of our configurations from the flags, with its defaults where they do not say.

    Raises:
        ValueError: a flag's text means nothing.
    """
    known: type = config
    given, values = kept(given), {}
    for flag in _flags(known):
        if (name := flag.name.removeprefix("--")) in given:
            try:
                values[flag.field] = flag.type(given[name])
            except ValueError as error:
                raise ValueError(f"--{name} {given[name]}: {error}") from error
    return config(**values)


def _mlp_chunks(given: Flags) -> int:
    """Return into how many chunks training will cut the tokens of a dense MLP."""
    model, tensor, tokens = model_of(given), *_shares(given)
    between = model.others["mlp"].saved - 2 * model.hidden
    if given.get("sequence-parallel"):
        tokens //= tensor
    else:
        between //= tensor
    chunks = config_of(MlpConfig, given).chunks
    return chunks or choose_mlp_chunks(tokens, model.hidden, between)


def _replays_mlps(given: Flags, parts: int) -> bool:
    """Whether layers are behind dense MLPs in their checkpoints, of two layers of a pattern."""
    pattern = str(staged(given, parts).get("hybrid-layer-pattern", "")).partition("/")[0]
    return any("-" in part[:-1:2] for part in pattern.split("|"))


def loss_chunking(given: Flags) -> Chunking | None:
    """Return the chunks of the loss as training will choose them; None for Megatron's own loss.

    Raises:
        ValueError: they cannot be.
    """
    config = config_of(LmHeadConfig, given)
    if config.loss is not LmHeadLoss.CHUNKED:
        return None
    model, tensor, tokens = model_of(given), *_shares(given)
    call = Call(chunk_size=config.chunk_size, memory_mb=config.memory_mb)
    element_bytes, gradient_bytes = _widths(given)
    sizes = Sizes(
        tokens=tokens,
        vocabulary=model.vocabulary // tensor,
        hidden=model.hidden,
        dtype=torch.bfloat16 if element_bytes == 2 else torch.float32,
        ranks=tensor,
        parts=tensor if given.get("sequence-parallel") else 1,
        statistics=call.statistics,
        fused=True,  # Triton is there on GPUs; in float32 it changes nothing
        sums_apart=gradient_bytes < 4,  # `main_grad` is too narrow for sums
        kept_apart=True,  # of the forward, which has the loss mask
    )
    return call.chunking(sizes)


def _shares(given: Flags) -> tuple[int, int]:
    """The tensor-parallel size, and a context-parallel rank's tokens of a micro-batch."""
    tokens = whole(given, "micro-batch-size") * whole(given, "seq-length")
    context = whole(given, "context-parallel-size")
    return whole(given, "tensor-model-parallel-size"), tokens // context


def _widths(given: Flags) -> tuple[int, int]:
    """Bytes of an element of weights and activations, and of the gradients that are summed.

    Megatron-FSDP's are as wide as the weights.
    """
    if not given.get("bf16"):
        return 4, 4
    narrow = given.get("grad-reduce-in-bf16") or given.get("main-grads-dtype") == "bf16"
    return 2, 2 if narrow or given.get("use-megatron-fsdp") else 4


def _optimizer_bytes(given: Flags, element_bytes: int) -> int:
    """Of a parameter on the GPU: two moments, and a float32 copy of a weight of 16 bits.

    Of that the Adam that --use-precision-aware-optimizer takes keeps the 16 bits that the weight
    lacks, but where Megatron has the copy, and it is not asked where a part is on the host.
    """
    copy, aware = 4 if element_bytes == 2 else 0, "use-precision-aware-optimizer"
    if not given.get(aware) or given.get("optimizer-cpu-offload"):
        return 2 * BYTES["fp32"] + copy
    is_megatrons = given.get("use-megatron-fsdp") or given.get("fp8-recipe", "delayed") != "delayed"
    moments = sum(BYTES[str(given.get(name) or "fp32")] for name in MOMENTS)
    return moments + (copy if is_megatrons else copy // 2)


def _offloaded(given: Flags) -> float:
    """The share of the optimizer in the host's memory."""
    if not given.get("optimizer-cpu-offload"):
        return 0.0
    text = given.get("optimizer-offload-fraction", 1.0)
    with suppress(ValueError, TypeError):
        if 0 <= (share := float(text)) <= 1:
            return share
    raise ValueError(f"--optimizer-offload-fraction {text} is not between 0 and 1")


def _virtual(given: Flags) -> int:
    """The parts of a pipeline stage: given, by the layers of a part, or by a pattern's `|`."""
    stages = whole(given, "pipeline-model-parallel-size")
    if "hybrid-layer-pattern" in given:
        return _parts_of_pattern(given, stages)
    layers, parts = whole(given, "num-layers"), whole(given, _VIRTUAL[0])
    sizes = f"--pipeline-model-parallel-size {stages} with {parts} parts a stage"
    rest = layers % (stages * parts)
    if (name := _VIRTUAL[1]) in given:
        sizes = f"--pipeline-model-parallel-size {stages} with --{name} {given[name]}"
        parts, rest = divmod(layers, stages * whole(given, name))
    if rest:
        raise ValueError(f"--num-layers {layers} does not divide over {sizes}")
    return parts


def _parts_of_pattern(given: Flags, stages: int) -> int:
    """Those of a stage; the layers of MTP's heads are in none.

    What `cut` makes, which is in the commands that are printed, differs by a layer at the most
    where attention is even.
    """
    name, pattern = "--hybrid-layer-pattern", str(given["hybrid-layer-pattern"]).partition("/")[0]
    is_parted = "|" in pattern
    if named := [f"--{flag}" for flag in _VIRTUAL[not is_parted :] if flag in given]:
        raise ValueError(
            f"{named[0]}: the | of {name} part a HybridModel, and without them "
            f"--{_VIRTUAL[0]} does; or give --gpt"
        )
    parts = pattern.split("|") if is_parted else cut(pattern, stages * whole(given, _VIRTUAL[0]))
    if len(parts) % stages:
        raise ValueError(
            f"{len(parts)} parts of {name} do not divide over "
            f"--pipeline-model-parallel-size {stages}"
        )
    known = "*" if parts == cut("".join(parts), len(parts)) else "*-EMG"
    if len({tuple(map(part.count, known)) for part in parts}) > 1:
        raise ValueError(
            f"{len(parts)} parts of {name} cannot be predicted here unless they have as many "
            f"layers of {'attention' if known == '*' else 'each kind'}: "
            f"{', '.join(dict.fromkeys(parts))}; put | between such as have"
        )
    return len(parts) // stages


def selective_modules(given: Flags) -> frozenset[str]:
    """Return what selective recompute repeats, Megatron's default if nothing is named."""
    if given.get("recompute-granularity") != "selective":
        return frozenset()
    named = given.get("recompute-modules") or ["core_attn"]
    if named is True:
        raise ValueError("--recompute-modules names none")
    modules = frozenset([named] if isinstance(named, str) else named)
    if unknown := modules - set(_SELECTIVE):
        raise ValueError(
            f"--recompute-modules {' '.join(sorted(unknown))} cannot be predicted here: "
            f"{', '.join(_SELECTIVE)} can"
        )
    return modules


def _documents(given: Flags) -> tuple[int, ...] | None:
    """Borders of documents of exponential lengths about `documents-mean`, the same every time."""
    if not given.get("dataloader-inter-document-masking"):
        return None
    if not (mean := float(given.get("documents-mean", 0))):
        raise ValueError(
            "--dataloader-inter-document-masking cannot be predicted here without the mean length "
            "of a document: give plan --documents N"
        )
    tokens, source, borders = whole(given, "seq-length"), random.Random(0), [0]
    while borders[-1] < tokens:
        length = max(1, math.ceil(source.expovariate(1 / mean)))
        borders.append(min(tokens, borders[-1] + length))
    return tuple(borders)
