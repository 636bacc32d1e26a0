"""Searches for the fastest way to spread a training step over GPUs: sizes, schedules, memory.

Every way has a bound that needs no plan: all but attention as predicted, and attention without any
message. Ways are put on the clock by their bounds until no bound is below what was found, or until
the clocks of a search are used up.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from megatron_burst.plans.choice.cost import visible_pairs
from megatron_burst.tools.flags import Flags, whole
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.plan import memory, step
from megatron_burst.tools.plan.advice import nothing_fits
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.ranking import (
    Candidate,
    as_usual,
    beside,
    candidate,
    each_once,
    in_order,
    of_burst,
    recomputing,
    rings,
    unchosen,
)
from megatron_burst.tools.plan.reading import selective_modules, workload_of
from megatron_burst.tools.plan.savings import CHUNK_SIZES, FSDP, INPUTS, MLP_CHUNKS, OPTIMIZER
from megatron_burst.tools.plan.usual import ALONE
from megatron_burst.tools.plan.workload import Workload
from megatron_burst.tools.terminal import complain

_CLOCKS = 60_000_000
"""What a search may compute: a plan of P ranks on the clock counts P² and as much as 128 ranks."""
_SIZES = {  # with what asks for them
    "tensor-model-parallel-size": ("", (1, 2, 4, 8)),
    "pipeline-model-parallel-size": ("pp", (1, 2, 4, 8, 16)),
    "expert-model-parallel-size": ("ep", (1, 2, 4, 8, 16, 32, 64)),
}
_SEQUENCE = "sequence-parallel"
SEARCHED = (
    *_SIZES,
    *("context-parallel-size", _SEQUENCE, "global-batch-size"),
    # Without them the loss takes the least memory that costs no time; less where that is too much.
    *CHUNK_SIZES,
)


class Wish(NamedTuple):
    """What a search may change beside sizes that are not given."""

    fractions: Sequence[float]
    sizes: Collection[str] = ()  # pp, ep


class _Way(NamedTuple):
    """A ring, the least GPU seconds a token that it takes, and the fastest step on it."""

    bound: float
    flags: Flags
    load: Workload


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
    for number, way in enumerate(ways):
        if len(candidates) >= most and 1 / way.bound < candidates[most - 1].time.tokens_per_gpu:
            break
        if not (with_room := [*_with_room(way, given, wish)]):
            continue
        clocks += len(way.load.ring.nodes) ** 2 + 2**14
        if clocks > _CLOCKS and candidates:
            more = 1 / way.bound / candidates[0].time.tokens_per_gpu - 1
            text = f"--search ends at its limit, after {number} of {len(ways)} ways: what is left "
            text += f"is at most {max(0.0, more):.0%} faster; sizes behind -- leave less to try"
            complain("megatron-burst plan", [text])
            break
        fitting: list[Candidate] = []
        for flags in with_room:
            # The host's memory is the last resort for the optimizer: its updates there take longer.
            if fitting and flags.get("optimizer-cpu-offload"):
                continue
            each = _in_chunks_that_fit(candidate(flags, cluster, gpus))
            if each.lacks and "mlp-chunks" not in flags:
                each = _in_chunks_that_fit(_with(each, MLP_CHUNKS))
            if not each.lacks:
                fitting.append(each)
            elif least is None or each.memory.total < least.memory.total:
                least = each
        candidates += sorted(fitting, key=lambda each: each.time.seconds)[:1]
        candidates.sort(key=lambda each: -each.time.tokens_per_gpu)
    if not candidates:
        raise ValueError(_nothing(least, [way.load for way in ways]))
    best = (replace(each, left_out=of_burst(given)) for each in each_once(candidates)[:most])
    return in_order(map(as_usual, best))


def _in_chunks_that_fit(option: Candidate) -> Candidate:
    """Return it with smaller chunks of the loss, if that is all that it takes to fit.

    Chunks that are given stay as they are.
    """
    of, load = option.memory, option.load
    left = memory.usable(load.cluster) - (of.total - max(of.layer, of.loss))
    beside = of.loss - load.loss_bytes
    given = option.flags.keys() & CHUNK_SIZES
    if given or not load.chunked_loss or not of.layer <= left < of.loss:
        return option
    return _with(option, {"lm-head-memory-mb": int(left - beside) // 2**20})


def _with(option: Candidate, more: Flags) -> Candidate:
    """Return it with more flags; as it is where these do not go with the rest."""
    try:
        return candidate({**option.flags, **more}, option.load.cluster, option.load.gpus)
    except ValueError:
        return option


def _nothing(least: Candidate | None, every: Sequence[Workload]) -> str:
    """Say what is missing where no way fits."""
    if least and least.lacks == "host":
        return nothing_fits([least])
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


def _ways(given: Flags, cluster: Cluster, gpus: int, wish: Wish) -> list[_Way]:
    """All rings; ValueError if none is possible."""
    flags = unchosen(given)
    fastest = next(_savings(flags, wish.fractions))
    ways: list[_Way] = []
    reason = "the GPUs do not divide over the sizes that are given"
    for each in sizes(flags, gpus, wish.sizes):
        try:
            alone = workload_of({**flags, **each, **fastest}, cluster, gpus)
            for schedule in _schedules(alone):
                wanted = beside({**flags, **each}, schedule)
                load = workload_of({**wanted, **fastest}, cluster, gpus)
                _ = load.ring.layout  # whether the tokens divide
                ways.append(_Way(_bound(load), wanted, load))
        except ValueError as error:
            reason = str(error)
    if not ways:
        raise ValueError(f"no sizes go with these flags: {reason}")
    return ways


def _with_room(way: _Way, given: Flags, wish: Wish) -> Iterator[Flags]:
    """The ways to save memory with which weights, gradients and optimizer fit."""
    load = way.load
    for saving in _savings(given, wish.fractions):
        flags = {**way.flags, **saving}
        if FSDP.keys() <= saving.keys() and load.shards == 1:
            continue
        try:
            saved = workload_of(flags, load.cluster, load.gpus)
        except ValueError:  # it does not go with the rest
            continue
        if memory.least(saved) <= memory.usable(load.cluster):
            yield flags


def sizes(
    flags: Flags, gpus: int, asked: Collection[str] = (), *, to_data: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the sizes of all dimensions, given ones as they are.

    Data parallelism has what is left, or all of that is context-parallel.
    """
    choices = [
        (whole(flags, name),) if name in flags else tried if word in ("", *asked) else (1,)
        for name, (word, tried) in _SIZES.items()
    ]
    for tensor, pipeline, expert in product(*choices):
        left, remainder = divmod(gpus, tensor * pipeline)
        if remainder or not left:
            continue
        contexts = [n for n in range(1 if to_data else left, left + 1) if left % n == 0]
        if "context-parallel-size" in flags:
            contexts = [whole(flags, "context-parallel-size")]
        for context in contexts:
            data = max(1, left // context)
            batches = 4 * pipeline if pipeline > 1 else 1  # in groups, where stages have parts
            sequences = data * whole(flags, "micro-batch-size") * batches
            yield {
                "tensor-model-parallel-size": tensor,
                **({_SEQUENCE: True} if tensor > 1 and _SEQUENCE not in flags else {}),
                "context-parallel-size": context,
                **({"pipeline-model-parallel-size": pipeline} if pipeline > 1 else {}),
                **({"expert-model-parallel-size": expert} if expert > 1 else {}),
                "global-batch-size": whole(flags, "global-batch-size", sequences),
            }


def _schedules(load: Workload) -> Iterator[Flags]:
    """What may be sent around: ours chooses ring, mesh and latents by the clock."""
    if load.context == 1:
        yield ALONE
        return
    for heads, may_be_double in rings(load):
        for topology in ("auto", "double") if may_be_double else ("auto",):
            yield {**ALONE, "burst-topology": topology, **heads}
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
    attention = (1 + again) * _kernel_seconds(load) + _kernel_seconds(load, backward=True)
    return step.computing_seconds(load, attention) * load.gpus / (load.sequences * load.tokens)


def _kernel_seconds(load: Workload, *, backward: bool = False) -> float:
    """Those of attention of a layer, evenly spread and without a message."""
    model, pairs = load.model, load.micro * visible_pairs(load.ring.mask, load.tokens)
    dims = model.heads // load.tensor, model.head_dim, model.value_head_dim
    flops = attention_flops(pairs / load.context, *dims, backward=backward)
    mean = (model.head_dim + model.value_head_dim) / 2
    return flops / load.cluster.attention_rate(mean, backward=backward)
