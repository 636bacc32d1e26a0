"""Every way to spread a training step over given GPUs, predicted and put in order."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_burst.config import GradDtype, LayoutName
from megatron_burst.tools.flags import Flags, arguments, staged
from megatron_burst.tools.plan import memory, step
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.workload import Workload

_FRACTION = "recompute-attention-fraction"
_NAMING = ("context-parallel-algo", "burst-backward", "burst-topology")
_LAYOUT = "burst-layout"
_CHOSEN = (*_NAMING, "burst-head-parallel-size", _LAYOUT, _FRACTION)
_FINALISTS = 4


def unchosen(given: Flags) -> dict[str, Any]:
    """Return the flags without those that ranking chooses.

    How documents are balanced it does not, nor whether layers with a state stay in zigzag.
    """
    is_asked = given.get("dataloader-inter-document-masking") or given.get(_LAYOUT) == "zigzag"
    kept = (_LAYOUT,) if is_asked else ()
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

    @property
    def fits(self) -> bool:
        """Whether GPUs and hosts have room for it, and for what is not counted."""
        return not self.lacks

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
    def fraction(self) -> str:
        """ρ, for a table."""
        return str(self.flags.get(_FRACTION, "-"))

    @property
    def savings(self) -> str:
        """What saves memory, for a table."""
        load = self.load
        named: dict[str, bool] = {"FSDP": load.zero3, "MLP": load.mlp_chunks > 1}
        named |= {"inputs": load.offload_inputs, "optimizer": load.offload > 0}
        return ", ".join(what for what, is_on in named.items() if is_on) or "-"

    def __str__(self) -> str:
        return " = ".join((self.name, *self.twins))

    def command(self) -> str:
        """Return the command line of every node."""
        cluster = self.load.cluster
        more: dict[str, int] = {"documents-mean": False}  # which is the planner's
        a_node = self.load.ranks_per_host
        if cluster.gpus_per_host and self.load.context > 1:  # host names would tell another node
            more = {"burst-ranks-per-node": max(1, self.load.ranks_per_node)}
        flags = staged({**self.flags, **more}, self.load.pipeline * self.load.virtual)
        nodes, where = self.load.gpus // a_node, "--standalone"
        if nodes > 1:
            where = f'--nnodes {nodes} --node-rank "$RANK_OF_NODE" --master-addr "$FIRST_NODE"'
        # Megatron asks for it before it runs context parallelism before Blackwell; FSDP refuses it.
        setting = "" if self.load.zero3 else "CUDA_DEVICE_MAX_CONNECTIONS=1 "
        return (
            f"{setting}torchrun {where} --nproc-per-node {a_node} "
            f"-m megatron_burst.pretrain {shlex.join(arguments(flags))}"
        )


def candidate(flags: Flags, load: Workload) -> Candidate:
    """Predict a way."""
    return Candidate(flags, load, step.predict(load), memory.predict(load))


def rank(given: Flags, cluster: Cluster, gpus: int, fractions: Sequence[float]) -> list[Candidate]:
    """Predict every way; those that fit come first, and of them the fastest.

    Ways of which the same is predicted are one: most of them make the same plans.

    A fraction between 0 and 1, which cuts the sequence into more tiles, is predicted only of the
    ways that are best without it. Fractions have an effect where layers are recomputed; flags that
    `unchosen` leaves out are replaced.
    """
    flags = unchosen(given)
    if flags.get("recompute-granularity") != "full":
        fractions = ()

    def predicted(way: Flags, fraction: float | None) -> Candidate:
        wanted = {**flags, **way, **recomputing(fraction)}
        return candidate(wanted, workload_of(wanted, cluster, gpus))

    def place(found: Candidate) -> tuple[bool, float]:
        return not found.fits, found.time.seconds

    simple = [fraction for fraction in fractions if fraction in (0, 1)] or [*fractions, None][:1]
    ways = list(_ways(workload_of(flags, cluster, gpus)))
    found = sorted((predicted(way, fraction) for way in ways for fraction in simple), key=place)
    best = found[: _FINALISTS * len(simple)]
    chosen = [way for way in ways if any(way.items() <= each.flags.items() for each in best)]
    rest = [fraction for fraction in fractions if fraction not in simple]
    found += [predicted(way, fraction) for way in chosen for fraction in rest]
    return each_once(sorted(found, key=place))


def each_once(found: Sequence[Candidate]) -> list[Candidate]:
    """Keep the first of those that are predicted alike, with the names of the others."""
    kept: dict[Any, Candidate] = {}
    for each in found:
        load = each.load
        sizes = load.tensor, load.context, load.pipeline, load.expert, load.head_parallel
        same = sizes, each.fraction, each.time, each.memory
        first = kept.get(same)
        kept[same] = replace(first, twins=(*first.twins, each.name)) if first else each
    return list(kept.values())


def _ways(load: Workload) -> Iterator[dict[str, Any]]:
    """The flags of every algorithm, ring and head-parallel size that these ranks can have."""
    if load.context == 1:
        yield {"context-parallel-algo": "burst"}
        return
    for size in (size for size in load.degrees if size < load.context):
        heads = {"burst-head-parallel-size": size}
        double = load.context > load.ranks_per_node > size
        for topology in ("flat", "double") if double else ("flat",):
            ring = {"burst-topology": topology, **heads}
            for backward in ("query", "kv"):
                yield {"context-parallel-algo": "burst", "burst-backward": backward, **ring}
            yield {"context-parallel-algo": "ring", **ring}
        if load.context > load.ranks_per_node:  # a mesh where it pays, else one of the rings
            yield {"context-parallel-algo": "burst", "burst-topology": "auto", **heads}
    yield {"context-parallel-algo": "allgather"}
    if load.context in load.degrees:
        # No gradient is sent around a ring there, and another dtype than the default is refused.
        asked = load.config.grad_dtype is not GradDtype.AUTO
        usual = {"burst-grad-dtype": GradDtype.AUTO.value} if asked else {}
        yield {"context-parallel-algo": "ulysses", **usual}


def recomputing(fraction: float | None) -> dict[str, Any]:
    """The flags of ρ, with the layout that spreads it evenly."""
    if fraction is None:
        return {}
    even = {"burst-layout": LayoutName.SEGMENTED_ZIGZAG.value} if 0 < fraction < 1 else {}
    return {_FRACTION: fraction, **even}
