"""Every way to spread a training step over given GPUs, predicted and put in order."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from megatron_burst.config import Algorithm, GradDtype, LayoutName
from megatron_burst.tools.flags import Flags, arguments, staged, variables
from megatron_burst.tools.plan import memory, step
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.usual import ALONE, as_trained
from megatron_burst.tools.plan.workload import Workload

_FRACTION = "recompute-attention-fraction"
_NAMING = ("context-parallel-algo", "burst-backward", "burst-topology")
NEAR = 1.02  # of the time of the fastest: a tie, as far as can be predicted
_DEGREE, _LAYOUT = "burst-head-parallel-size", "burst-layout"
_CHOSEN = (*_NAMING, _DEGREE, _LAYOUT, _FRACTION)
_FINALISTS = 4
_OF_BURST = ("burst-memory-mb", "burst-head-chunks", "burst-mla")  # refused of baselines


def unchosen(given: Flags) -> dict[str, Any]:
    """Return the flags without those that ranking chooses.

    How documents are balanced it does not, nor whether layers with a state stay in zigzag.
    """
    is_given = given.get("dataloader-inter-document-masking") or given.get(_LAYOUT) == "zigzag"
    kept = (_LAYOUT,) if is_given else ()
    return {name: value for name, value in given.items() if name in kept or name not in _CHOSEN}


@dataclass(frozen=True)
class Candidate:
    """One way, with what is predicted of it."""

    flags: Flags
    load: Workload
    time: step.Prediction
    memory: memory.Memory
    twins: tuple[str, ...] = ()
    """Names of other flags of which the same is predicted."""
    left_out: Flags = field(default_factory=dict)
    """What is given and a baseline cannot have."""

    @cached_property
    def lacks(self) -> str:
        """Whose memory is too small: "", "GPU" or "host"."""
        return memory.lacks(self.load)

    @cached_property
    def host_bytes(self) -> int:
        """Of the memory of a host."""
        return memory.host_bytes(self.load)

    @property
    def name(self) -> str:
        """What its flags choose."""
        return " ".join(str(self.flags[name]) for name in _NAMING if name in self.flags)

    @property
    def cp_comm_type(self) -> str:
        """Megatron's --cp-comm-type of the same messages; "" if it has none."""
        names, degree = {self.name, *self.twins}, self.load.head_parallel
        if self.load.context == 1 or self.load.heads[1] % degree:  # Megatron copies no KV heads
            return ""
        if degree == self.load.context:
            return "a2a"
        if "ring flat" in names:
            return "p2p" if degree == 1 else "a2a+p2p"
        return "all_gather" if "allgather" in names else ""

    @property
    def fraction(self) -> str:
        """ρ, for a table."""
        return str(self.flags.get(_FRACTION, 1)) if self.load.repeats_attention else "-"

    @property
    def is_usual(self) -> bool:
        """Whether its messages are left to `--context-parallel-algo burst`."""
        chosen = [self.flags.get(name) for name in (*_NAMING, _DEGREE)]
        return chosen == ["burst", None, None, None]

    @property
    def is_default(self) -> bool:
        """Whether all of its attention is."""
        return self.is_usual and _FRACTION not in self.flags

    @cached_property
    def bounds(self) -> dict[str, float]:
        """What a step waits for, as shares of its time."""
        return step.bounds(self.load, self.time)

    @property
    def savings(self) -> str:
        """What saves memory, for a table."""
        load = self.load
        named = {
            "FSDP": load.zero3,
            "MLP": load.mlp_chunks > 1,
            "inputs": load.recompute_offload and load.recompute,
            "optimizer": load.offload > 0,
        }
        return ", ".join(what for what, is_on in named.items() if is_on) or "-"

    def command(self) -> str:
        """Return the command line of every node."""
        cluster = self.load.cluster
        more: dict[str, int] = {"documents-mean": False}  # which is the planner's
        a_node = self.load.ranks_per_host
        if cluster.gpus_per_host and self.load.context > 1:  # host names would tell another node
            more |= {"burst-ranks-per-node": max(1, self.load.ranks_per_node)}
        flags = staged({**self.flags, **more}, self.load.pipeline * self.load.virtual)
        nodes, where = self.load.gpus // a_node, "--standalone"
        if nodes > 1:
            number, first = f"number of this node, 0 to {nodes - 1}", "host name of node 0"
            where = f'--nnodes {nodes} --node-rank "${{RANK_OF_NODE:?{number}}}"'
            where += f' --master-addr "${{FIRST_NODE:?{first}}}"'
        settings = "".join(f"{name}={value} " for name, value in variables(flags).items())
        return (
            f"{settings}torchrun {where} --nproc-per-node {a_node} "
            f"-m megatron_burst.pretrain {shlex.join(arguments(flags))}"
        )


def candidate(flags: Flags, cluster: Cluster, gpus: int) -> Candidate:
    """Predict a way, what is left to training as that would choose it.

    Raises:
        ValueError: these GPUs cannot have it, or it is not modelled.
    """
    load = as_trained(workload_of(flags, cluster, gpus))
    return Candidate(flags, load, step.predict(load), memory.predict(load))


def rank(given: Flags, cluster: Cluster, gpus: int, fractions: Sequence[float]) -> list[Candidate]:
    """Predict every way; those that fit come first, and of them the fastest.

    Ways of which the same is predicted are one: most of them make the same plans.

    A fraction between 0 and 1, which cuts the sequence into more tiles, is predicted only of the
    ways that are best without it. Fractions have an effect where attention is recomputed; flags
    that `unchosen` leaves out are replaced.
    """
    flags = unchosen(given)
    load = workload_of(flags, cluster, gpus)
    if not load.repeats_attention:
        fractions = ()

    def predicted(way: Flags, fraction: float | None) -> Candidate:
        wanted = {**beside(flags, way), **recomputing(fraction)}
        return replace(candidate(wanted, cluster, gpus), left_out=of_burst(flags))

    def possible(way: Flags) -> Iterator[Candidate]:
        try:
            yield from [predicted(way, fraction) for fraction in simple]
        except ValueError:  # flags that are given do not go with it; burst alone says why
            if way == ALONE:
                raise

    simple = [fraction for fraction in fractions if fraction in (0, 1)] or [*fractions, None][:1]
    ways = list(_ways(load))
    candidates = sorted(chain.from_iterable(map(possible, ways)), key=_place)
    best = candidates[: _FINALISTS * len(simple)]
    chosen = [way for way in ways if any(way.items() <= each.flags.items() for each in best)]
    rest = [fraction for fraction in fractions if fraction not in simple]
    candidates += [predicted(way, fraction) for way in chosen for fraction in rest]
    if not any(each.is_default for each in candidates):  # whatever fractions are asked for
        candidates.append(predicted(ALONE, None))
    return in_order(each_once(sorted(candidates, key=_place)))


def _place(option: Candidate) -> tuple[bool, float, bool]:
    return option.lacks != "", 1 / option.time.tokens_per_gpu, not option.is_usual


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Put those first that fit, then the fastest; of a tie our default, then what needs least.

    Nothing in the host's memory goes before fewer bytes: fewer context-parallel ranks send less,
    down to none, and hold more that then has to leave the GPU.
    """
    ordered, start = sorted(candidates, key=_place), 0
    while start < len(ordered):
        lacks, seconds, _ = _place(ordered[start])
        near = (lacks, NEAR * seconds, True)
        stop = start + sum(_place(each) <= near for each in ordered[start:])
        ordered[start:stop] = sorted(ordered[start:stop], key=_needs)
        start = stop
    return ordered


def _needs(option: Candidate) -> tuple[bool, bool, bool, int, float]:
    attention = option.time.attention
    return (
        not option.is_default,
        not option.is_usual,
        option.host_bytes > 0,
        attention.sent,
        attention.exposed_share,
    )


def as_usual(option: Candidate) -> Candidate:
    """Return it with `--context-parallel-algo burst` alone, if that sends and computes the same."""
    if option.is_usual:
        return option
    kept = {name: option.flags[name] for name in (_FRACTION, _LAYOUT) if name in option.flags}
    usual = at_its_sizes(option, {**ALONE, **kept})
    twins = tuple(dict.fromkeys((option.name, *option.twins)))
    same = (usual.time, usual.memory) == (option.time, option.memory)
    return replace(usual, twins=twins) if same else option


def at_its_sizes(option: Candidate, way: Flags) -> Candidate:
    """Return another way of attention at the same sizes, with the same flags beside it.

    Raises:
        ValueError: these ranks cannot have it.
    """
    flags = beside({**unchosen(option.flags), **option.left_out}, way)
    return candidate(flags, option.load.cluster, option.load.gpus)


def beside(flags: Flags, way: Flags) -> dict[str, Any]:
    """Return the flags of a way beside others, of which a baseline takes none that are burst's."""
    is_burst = way.get("context-parallel-algo") == Algorithm.BURST
    kept = {name: value for name, value in flags.items() if is_burst or name not in _OF_BURST}
    return {**kept, **way}


def of_burst(flags: Flags) -> dict[str, Any]:
    """Return those that baselines are refused."""
    return {name: flags[name] for name in _OF_BURST if name in flags}


def each_once(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Keep the first of those that are predicted alike, with the names of the others."""
    kept: dict[Any, Candidate] = {}
    for each in candidates:
        load = each.load
        sizes = load.tensor, load.context, load.pipeline, load.expert, load.head_parallel
        same = sizes, each.fraction, each.time, each.memory
        first = kept.setdefault(same, each)
        if each.name not in (first.name, *first.twins):
            kept[same] = replace(first, twins=(*first.twins, each.name))
    return list(kept.values())


def _ways(load: Workload) -> Iterator[Flags]:
    """The flags of every algorithm, ring and head-parallel size that these ranks can have."""
    yield ALONE
    if load.context == 1:
        return
    for heads, may_be_double in rings(load):
        for topology in ("flat", "double") if may_be_double else ("flat",):
            ring = {"burst-topology": topology, **heads}
            for backward in ("query", "kv"):
                yield {**ALONE, "burst-backward": backward, **ring}
            yield {"context-parallel-algo": "ring", **ring}
        if load.context > load.ranks_per_node:  # a mesh where it pays, else one of the rings
            yield {**ALONE, "burst-topology": "auto", **heads}
    yield {"context-parallel-algo": "allgather"}
    if load.context in load.degrees:
        # No gradient is sent around a ring there, and another dtype than the default is refused.
        is_given = load.config.grad_dtype is not GradDtype.AUTO
        usual = {"burst-grad-dtype": GradDtype.AUTO.value} if is_given else {}
        yield {"context-parallel-algo": "ulysses", **usual}


def rings(load: Workload) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the head-parallel sizes that leave a ring, as flags, and whether that may be double."""
    for size in load.degrees:
        if size < load.context:
            yield {_DEGREE: size}, load.context > load.ranks_per_node > size


def recomputing(fraction: float | None) -> dict[str, Any]:
    """The flags of ρ, with the layout that spreads it evenly."""
    if fraction in (None, 1):  # all of it is, where nothing is said
        return {}
    even = {_LAYOUT: LayoutName.SEGMENTED_ZIGZAG.value} if 0 < fraction < 1 else {}
    return {_FRACTION: fraction, **even}
