"""Which ways of context parallelism are compared, by which flags, and why one cannot run here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from megatron_burst.config import Topology
from megatron_burst.plans.head_parallel import head_groups, kv_head_copies
from megatron_burst.plans.topology import choose_grid

REFERENCES = ("CP=1 megatron", "CP=1 burst")
"""The first of them that ran is what the losses of all are held against."""

_MEGATRON = ("p2p", "all_gather", "a2a", "a2a+p2p")
_BACKENDS = ("flash", "fused")  # of TransformerEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What of the user's training and machine decides which variants there are."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    context: int
    heads: int | None = None
    kv_heads: int | None = None
    ranks_per_node: int | None = None  # None: all on one node
    without_megatrons: str = ""  # why Megatron's own context parallelism cannot run

    def __post_init__(self) -> None:
        """Check that the sizes fit each other."""
        if self.ranks % (self.tensor * self.pipeline * self.context):
            raise ValueError(
                f"{self.ranks} ranks do not divide over --tensor-model-parallel-size {self.tensor} "
                f"x --pipeline-model-parallel-size {self.pipeline} x --context-parallel-size "
                f"{self.context}: change --ranks or one of them"
            )

    @property
    def nodes(self) -> list[int]:
        """The node of each context-parallel rank, as Megatron places them."""
        on_a_node = self.ranks_per_node or self.ranks
        return [rank * self.tensor // on_a_node for rank in range(self.context)]

    @property
    def context_ranks_of_a_node(self) -> int:
        """How many context-parallel ranks the first node holds."""
        return self.nodes.count(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of the comparison."""

    name: str
    flags: tuple[str, ...]
    ranks: int
    why_not: str = ""


def variants(job: Job) -> list[Variant]:
    """Return every variant, those that cannot run here with the reason; the references first."""
    return [*_references(job), *_megatrons(job), *_ours(job)]


def choose(every: Sequence[Variant], patterns: Sequence[str]) -> list[Variant]:
    """Return the variants whose names match a pattern; the rest with that as their reason.

    Raises:
        ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatch(variant.name, pattern) for variant in every):
            names = "', '".join(variant.name for variant in every)
            raise ValueError(f"--variants '{pattern}' matches none of '{names}'")
    if not patterns:
        return list(every)
    return [
        variant
        if any(fnmatch(variant.name, pattern) for pattern in patterns)
        else replace(variant, why_not=variant.why_not or "left out by --variants")
        for variant in every
    ]


def _references(job: Job) -> Iterator[Variant]:
    """One context-parallel rank and no data parallelism: as few ranks as the model allows."""
    for name, algorithm in zip(REFERENCES, ("megatron", "burst"), strict=True):
        flags = ("--context-parallel-algo", algorithm, "--context-parallel-size", "1")
        yield Variant(name=name, flags=flags, ranks=job.tensor * job.pipeline)


def _megatrons(job: Job) -> Iterator[Variant]:
    """Megatron's own context parallelism, by TransformerEngine."""
    for way in _MEGATRON:
        for backend in _BACKENDS:
            more: tuple[str, ...] = ()
            why_not = job.without_megatrons
            if "a2a" in way:
                spread = _spread_of_a2a(job) if way == "a2a+p2p" else job.context
                why_not = why_not or _why_no_a2a(job, spread)
                if way == "a2a+p2p":
                    sizes = (str(spread), str(job.context // spread))
                    more = ("--hierarchical-context-parallel-sizes", *sizes)
            yield Variant(
                name=f"megatron {way} {backend}",
                flags=(
                    *("--context-parallel-algo", "megatron", "--cp-comm-type", way),
                    *("--attention-backend", backend, *_size(job), *more),
                ),
                ranks=job.ranks,
                why_not=why_not,
            )


def _spread_of_a2a(job: Job) -> int:
    """The heads go over a node's ranks, or on one node over half of them."""
    local = job.context_ranks_of_a_node
    return local if local < job.context else max(1, job.context // 2)


def _why_no_a2a(job: Job, spread: int) -> str:
    if spread < 2 or job.context % spread:
        return f"{job.context} context-parallel ranks do not divide into groups of {spread}"
    if job.heads is None:
        return ""
    heads = [count // job.tensor for count in (job.heads, job.kv_heads or job.heads)]
    if any(count % spread for count in heads):
        return (
            f"{heads[0]} query and {heads[1]} kv heads of a tensor-parallel rank do not divide by "
            f"{spread}"
        )
    return ""


def _ours(job: Job) -> Iterator[Variant]:
    def ours(name: str, algorithm: str, *flags: str, why_not: str = "") -> Variant:
        given = ("--context-parallel-algo", algorithm, *_size(job), *_place(job), *flags)
        return Variant(name=name, flags=given, ranks=job.ranks, why_not=why_not)

    no_double = _why_no_double(job)
    yield ours("burst", "burst")
    for backward in ("kv", "query"):
        for topology, why_not in (("flat", ""), ("double", no_double)):
            rings = ("--burst-backward", backward, "--burst-topology", topology)
            yield ours(f"burst {backward} {topology}", "burst", *rings, why_not=why_not)
    yield ours("ring flat", "ring", "--burst-topology", "flat")
    yield ours("ring double", "ring", "--burst-topology", "double", why_not=no_double)
    yield ours("allgather", "allgather")
    yield ours("ulysses", "ulysses", why_not=_why_no_heads(job, job.context))
    for size in _head_parallel_sizes(job):
        spread = ("--burst-head-parallel-size", str(size))
        why_not = _why_no_heads(job, size) or _why_no_groups(job, size)
        yield ours(f"burst heads {size}", "burst", *spread, why_not=why_not)
        flat = (*spread, "--burst-topology", "flat")
        yield ours(f"ring heads {size}", "ring", *flat, why_not=why_not)


def _head_parallel_sizes(job: Job) -> list[int]:
    """Every power of two below the context-parallel size; on two ranks there is no hybrid."""
    return [size for size in (2**i for i in range(1, 12)) if size < job.context]


def _size(job: Job) -> tuple[str, str]:
    return "--context-parallel-size", str(job.context)


def _place(job: Job) -> tuple[str, ...]:
    given = job.ranks_per_node
    return () if given is None else ("--burst-ranks-per-node", str(given))


def _why_no_double(job: Job) -> str:
    grid, why_flat = choose_grid(Topology.DOUBLE, job.nodes)
    if why_flat:
        return f"no double ring: {why_flat}"
    if grid.nodes == 1:
        return "no double ring: all context-parallel ranks are on one node (--ranks-per-node)"
    if grid.ranks_per_node == 1:
        return "no double ring: every node holds one context-parallel rank"
    return ""


def _why_no_heads(job: Job, size: int) -> str:
    if job.heads is None:
        return ""
    kv_heads = max((job.kv_heads or job.heads) // job.tensor, 1)
    try:
        kv_head_copies(job.heads // job.tensor, kv_heads, size)
    except ValueError as error:
        return str(error)
    return ""


def _why_no_groups(job: Job, size: int) -> str:
    try:
        head_groups(job.nodes, size)
    except ValueError as error:
        return str(error)
    return ""
