"""Searches for the fastest way to spread a training step over GPUs: sizes, schedules, memory.

Every way has a bound that needs no plan: all but attention as predicted, and attention without any
message. Ways are put on the clock by their bounds until no bound is below what was found, or until
the clocks of a search are used up.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from megatron_burst.plans.balance.document_work import DocumentWork
from megatron_burst.tools.flags import Flags, whole
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.plan import memory, step
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.ranking import (
    Candidate,
    as_usual,
    beside,
    candidate,
    each_once,
    in_order,
    recomputing,
    unchosen,
)
from megatron_burst.tools.plan.reading import selective_modules, workload_of
from megatron_burst.tools.plan.savings import FSDP, INPUTS, MLP_CHUNKS, OPTIMIZER
from megatron_burst.tools.plan.workload import Workload

_CLOCKS = 60_000_000
"""What a search may compute: a plan of P ranks on the clock counts P² and as much as 128 ranks."""
_SIZES = {  # with what asks for them
    "tensor-model-parallel-size": ("", (1, 2, 4, 8)),
    "pipeline-model-parallel-size": ("pp", (1, 2, 4, 8, 16)),
    "expert-model-parallel-size": ("ep", (1, 2, 4, 8, 16, 32, 64)),
}
_CHUNKS, _SEQUENCE = {"lm-head-memory-mb", "lm-head-chunk-size"}, "sequence-parallel"
SEARCHED = (
    *_SIZES,
    *("context-parallel-size", _SEQUENCE, "global-batch-size"),
    # Without them the loss takes the least memory that costs no time; less where that is too much.
    *_CHUNKS,
)


class Wish(NamedTuple):
    """What a search may change beside sizes that are not given."""

    fractions: Sequence[float]
    sizes: Collection[str] = ()  # pp, ep


def search(
    given: Flags, cluster: Cluster, gpus: int, wish: Wish, most: int = 10
) -> list[Candidate]:
    """Return the fastest ways that fit, at most so many; sizes that are given stay as they are.

    Raises:
        ValueError: nothing divides, or nothing fits; says what would.
    """
    ways = sorted(_ways(given, cluster, gpus, wish), key=lambda way: way.bound)
    candidates: list[Candidate] = []
    least, clocks = None, 0
    for way in ways:
        if len(candidates) >= most and 1 / way.bound < candidates[most - 1].time.tokens_per_gpu:
            break
        if not (loads := [*_with_room(way, given, wish)]):
            continue
        clocks += len(way.load.ring.nodes) ** 2 + 2**14
        if clocks > _CLOCKS and candidates:
            break
        fitting: list[Candidate] = []
        for flags, load in loads:
            # The host's memory is the last resort for the optimizer: its updates there take longer.
            if load.offload and fitting:
                continue
            each = _in_chunks_that_fit(candidate(flags, load))
            if not each.fits and "mlp-chunks" not in flags:
                each = _with(each, MLP_CHUNKS)
            if each.fits:
                fitting.append(each)
            elif least is None or each.memory.total < least.memory.total:
                least = each
        candidates += sorted(fitting, key=lambda each: each.time.seconds)[:1]
        candidates.sort(key=lambda each: -each.time.tokens_per_gpu)
    if not candidates:
        raise ValueError(_nothing(least, [way.load for way in ways]))
    return in_order(map(as_usual, each_once(candidates)[:most]))


def _in_chunks_that_fit(option: Candidate) -> Candidate:
    """Return it with smaller chunks of the loss, if that is all that it takes to fit.

    Chunks that are given stay as they are.
    """
    of, load = option.memory, option.load
    left = memory.usable(load.cluster) - (of.total - max(of.layer, of.loss))
    beside = of.loss - load.loss_bytes
    given = _CHUNKS & option.flags.keys()
    if given or not load.chunked_loss or not of.layer <= left < of.loss:
        return option
    try:
        return _with(option, {"lm-head-memory-mb": int(left - beside) // 2**20})
    except ValueError:  # too little for any chunk
        return option


def _with(option: Candidate, more: Flags) -> Candidate:
    flags = {**option.flags, **more}
    return candidate(flags, workload_of(flags, option.load.cluster, option.load.gpus))


def _nothing(least: Candidate | None, every: Sequence[Workload]) -> str:
    """Say what is missing where no way fits."""
    load = least.load if least else min(every, key=memory.least)
    needed = least.memory.total if least else memory.least(load)
    usable = memory.usable(load.cluster)
    tokens = int(load.tokens * usable / needed)
    return (
        f"nothing fits: at least {needed / 2**30:.0f} GiB are needed where "
        f"{usable / 2**30:.0f} of a GPU may be counted, with tensor {load.tensor} x context "
        f"{load.context} x pipeline {load.pipeline}; about "
        f"{load.gpus * -(-int(needed) // int(usable))} GPUs would do with as many tokens, or "
        f"{max(1, tokens // 8192) * 8192} tokens with as many GPUs; or "
        f"{'' if load.recompute else '--recompute-granularity full, or '}more memory a GPU"
    )


class _Way(NamedTuple):
    """A ring, the least GPU seconds a token that it takes, and the fastest step on it."""

    bound: float
    flags: Flags
    load: Workload


def _ways(given: Flags, cluster: Cluster, gpus: int, wish: Wish) -> list[_Way]:
    """All rings; ValueError if none is possible."""
    flags = unchosen(given)
    fastest = next(_savings(flags, wish.fractions))
    ways: list[_Way] = []
    reason = "the GPUs do not divide over the sizes that are given"
    for sizes in _sizes(flags, gpus, wish):
        try:
            alone = workload_of({**flags, **sizes, **fastest}, cluster, gpus)
            for schedule in _schedules(alone):
                wanted = beside({**flags, **sizes}, schedule)
                load = workload_of({**wanted, **fastest}, cluster, gpus)
                _ = load.ring.layout  # whether the tokens divide
                ways.append(_Way(_bound(load), wanted, load))
        except ValueError as error:
            reason = str(error)
    if not ways:
        raise ValueError(f"no sizes go with these flags: {reason}")
    return ways


def _with_room(way: _Way, given: Flags, wish: Wish) -> Iterator[tuple[Flags, Workload]]:
    """The ways to save memory with which weights, gradients and optimizer fit."""
    load = way.load
    for saving in _savings(given, wish.fractions):
        if FSDP.keys() <= saving.keys() and (load.pipeline > 1 or load.shards == 1):
            continue
        flags = {**way.flags, **saving}
        each = workload_of(flags, load.cluster, load.gpus)
        if memory.least(each) <= memory.usable(load.cluster):
            yield flags, each


def _sizes(flags: Flags, gpus: int, wish: Wish) -> Iterator[dict[str, Any]]:
    """The sizes of all dimensions, those that are given as they are; what is left is data's."""
    choices = [
        (whole(flags, name),) if name in flags else sizes if word in ("", *wish.sizes) else (1,)
        for name, (word, sizes) in _SIZES.items()
    ]
    for tensor, pipeline, expert in product(*choices):
        left, remainder = divmod(gpus, tensor * pipeline)
        if remainder or not left:
            continue
        contexts = [size for size in range(1, left + 1) if left % size == 0]
        if "context-parallel-size" in flags:
            contexts = [whole(flags, "context-parallel-size")]
        for context in contexts:
            data = max(1, left // context)
            sequences = data * whole(flags, "micro-batch-size") * (4 * pipeline - 3)
            yield {
                "tensor-model-parallel-size": tensor,
                **({"sequence-parallel": True} if tensor > 1 and _SEQUENCE not in flags else {}),
                "context-parallel-size": context,
                **({"pipeline-model-parallel-size": pipeline} if pipeline > 1 else {}),
                **({"expert-model-parallel-size": expert} if expert > 1 else {}),
                "global-batch-size": whole(flags, "global-batch-size", sequences),
            }


def _schedules(load: Workload) -> Iterator[dict[str, Any]]:
    """What may be sent around: ours chooses ring, mesh and latents by the clock."""
    if load.context == 1:
        yield {"context-parallel-algo": "burst"}
        return
    for degree in (size for size in load.degrees if size < load.context):
        heads = {"burst-head-parallel-size": degree}
        double = load.context > load.ranks_per_node > degree
        for topology in ("auto", "double") if double else ("auto",):
            yield {"context-parallel-algo": "burst", "burst-topology": topology, **heads}
    if load.context in load.degrees:
        yield {"context-parallel-algo": "ulysses"}


def _savings(flags: Flags, fractions: Sequence[float]) -> Iterator[dict[str, Any]]:
    """How memory may be saved, what costs least time first."""
    names: dict[str, Flags] = {"use-megatron-fsdp": FSDP, "optimizer-cpu-offload": OPTIMIZER}
    states: list[Flags] = [{}]
    if not any(map(flags.get, names)):  # one of them excludes the other
        states += [saving for name, saving in names.items() if name not in flags]
    full = flags.get("recompute-granularity") == "full"
    inputs = [{}, INPUTS] if full and not INPUTS.keys() & flags.keys() else [{}]
    repeats = full or "core_attn" in selective_modules(flags)
    for state, fraction, each in product(states, sorted(fractions) if repeats else (None,), inputs):
        yield {**state, **recomputing(fraction), **each}


def _bound(load: Workload) -> float:
    """Return GPU seconds a token at the least: no message of attention is waited for."""
    fraction = load.config.recompute_fraction
    again = 0.0 if not load.repeats_attention else 1.0 if fraction is None else fraction**2
    forward, backward = (_kernel_seconds(load, backward=way) for way in (False, True))
    seconds = step.computing_seconds(load, (1 + again) * forward + backward)
    return seconds * load.gpus / (load.sequences * load.tokens)


def _kernel_seconds(load: Workload, *, backward: bool) -> float:
    """Of attention of a layer, evenly spread and without a message."""
    model, work = load.model, DocumentWork.of(load.ring.mask, load.tokens)
    pairs = load.micro * int(work.pairs.sum())
    dims = model.heads // load.tensor, model.head_dim, model.value_head_dim
    flops = attention_flops(1, *dims, backward=backward) * pairs / load.context
    mean = (model.head_dim + model.value_head_dim) / 2
    return flops / load.cluster.attention_rate(mean, backward=backward)
