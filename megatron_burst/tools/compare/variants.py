"""Which ways of context parallelism are compared, by which flags, and why one cannot run here.

Of the flags that all share a variant goes without those that its attention would refuse.
"""

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from megatron_burst.config import BurstConfig, Topology
from megatron_burst.plans.choice.head_chunks import check_head_chunks
from megatron_burst.plans.choice.head_parallel import head_groups, kv_head_copies
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.plugin.flags import attention_flags
from megatron_burst.plugin.limits import MEGATRON
from megatron_burst.plugin.refusals import ranks_refusal
from megatron_burst.tools.flags import DOCUMENTS, Flags, Heads, flags_in, without
from megatron_burst.tools.plan.reading import config_of

REFERENCES = ("CP=1 megatron", "CP=1 burst")
"""The first of them that ran is what the losses of all are held against."""
_MASK = "--burst-block-mask"
# How Megatron's local attention tells documents apart, on one context-parallel rank.
_DENSE_MASK = "--reset-attention-mask --reset-position-ids --no-masked-softmax-fusion"
_OTHER_ZIGZAG = (
    "Megatron splits the whole sequence, TransformerEngine takes every document for split (MC#6156)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What of the user's training and machine decides which variants there are."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    experts: int = 1  # ranks over which those of a stage are spread
    context: int
    heads: Heads | None = None
    head_chunks: int = 1
    ranks_per_node: int | None = None  # None: all on one node
    without_megatrons: str = ""  # why Megatron's own context parallelism cannot run
    has_documents: bool = False
    has_windows: bool = False

    def __post_init__(self) -> None:
        """Check that the sizes fit each other."""
        sizes = self.tensor, self.pipeline, self.context
        if reason := ranks_refusal(self.ranks, *sizes, flag="--ranks"):
            raise ValueError(reason)

    @property
    def nodes(self) -> list[int]:
        """The node of each context-parallel rank, as Megatron places them."""
        on_a_node = self.ranks_per_node or self.ranks
        return [rank * self.tensor // on_a_node for rank in range(self.context)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of the comparison."""

    name: str
    flags: tuple[str, ...]
    ranks: int
    why_not: str = ""
    dropped: tuple[str, ...] = ()
    """Of the common flags: they have no effect here, and would be refused."""

    @property
    def algorithm(self) -> str:
        """Its --context-parallel-algo."""
        return self.flags[1]

    @property
    def title(self) -> str:
        """Its name, and what it goes without."""
        shown = self.dropped and not self.why_not
        return f"{self.name}, without {', '.join(self.dropped)}" if shown else self.name


def variants(job: Job) -> list[Variant]:
    """Return every variant, those that cannot run here with the reason; the references first."""
    size = f"--context-parallel-size {job.context}" + f" {DOCUMENTS}" * job.has_documents
    place = f"{size} --burst-ranks-per-node {job.ranks_per_node}" if job.ranks_per_node else size
    ours = ((name, f"{place} {more}", why_not) for name, more, why_not in _ours(job))
    listed = []
    for name, flags, why_not in (*_alone(job), *_megatrons(job, size), *ours):
        algorithm = name.removeprefix("CP=1 ").split()[0]
        words = f"--context-parallel-algo {algorithm} {flags}".split()
        # One context-parallel rank, and of data-parallel ones as few as experts allow.
        ranks = job.ranks
        if name in REFERENCES:
            ranks = lcm(job.tensor, job.experts) * job.pipeline
        listed.append(Variant(name=name, flags=tuple(words), ranks=ranks, why_not=why_not))
    return listed


def choose(every: Sequence[Variant], patterns: Sequence[str]) -> list[Variant]:
    """Return the variants whose names match a pattern; the rest with that as their reason.

    Raises:
        ValueError: a pattern matches none.
    """
    names = [variant.name for variant in every]
    kept: list[str] = []
    for pattern in patterns or ["*"]:
        if not (matches := fnmatch.filter(names, pattern)):
            known = "', '".join(names)
            raise ValueError(f"--variants '{pattern}' matches none of '{known}'")
        kept += matches
    return [
        v if v.name in kept else replace(v, why_not=v.why_not or "left out by --variants")
        for v in every
    ]


def fitted(every: Sequence[Variant], common: Sequence[str]) -> list[Variant]:
    """Return the variants with what each drops of the common flags; with the rest some cannot run.

    Raises:
        ValueError: not even ours takes the flags.
    """
    config_of(BurstConfig, flags_in(common))
    return [_fitted(variant, common) for variant in every]


def _fitted(variant: Variant, common: Sequence[str]) -> Variant:
    given = flags_in(common)
    dropped = [flag.name for flag in attention_flags() if flag.name.removeprefix("--") in given]
    if variant.algorithm == MEGATRON:
        why_not = f"{_MASK}: Megatron's attention has none" if _MASK in dropped else ""
    else:
        dropped = [name for name in dropped if _is_idle(name, variant.algorithm, given)]
        rest = flags_in([*without(common, dropped), *variant.flags])
        why_not = refusal(config_of, BurstConfig, rest)
    return replace(variant, dropped=tuple(dropped), why_not=variant.why_not or why_not)


def _is_idle(flag: str, algorithm: str, given: Flags) -> bool:
    """Whether an algorithm refuses a flag, whatever the others are."""
    name = flag.removeprefix("--")
    alone = {"context-parallel-algo": algorithm, name: given[name]}
    return bool(refusal(config_of, BurstConfig, alone))


def _alone(job: Job) -> Iterator[tuple[str, str, str]]:
    """The references; Megatron's local attention tells documents apart by a dense mask alone."""
    one, documents = "--context-parallel-size 1", DOCUMENTS if job.has_documents else ""
    dense = bool(documents and job.without_megatrons)
    why_not = "windows take the place of the mask" if dense and job.has_windows else ""
    yield REFERENCES[0], f"{one} {_DENSE_MASK if dense else documents}", why_not
    yield REFERENCES[1], f"{one} {documents}", ""


def _megatrons(job: Job, size: str) -> Iterator[tuple[str, str, str]]:
    """Megatron's own context parallelism, by both backends of TransformerEngine."""
    # Over several levels the heads go over a node's ranks, or on one node over half of them.
    local = job.nodes.count(0)
    spread = local if local < job.context else max(1, job.context // 2)
    levels = f" --hierarchical-context-parallel-sizes {spread} {job.context // spread}"
    ways = {
        "p2p": ("", ""),
        "all_gather": ("", ""),
        "a2a": ("", _why_no_a2a(job, job.context)),
        "a2a+p2p": (levels, _why_no_a2a(job, spread)),
    }
    none = _OTHER_ZIGZAG if job.has_documents else job.without_megatrons
    for way, (more, why_not) in ways.items():
        for backend in ("flash", "fused"):
            flags = f"--cp-comm-type {way} --attention-backend {backend} {size}{more}"
            yield f"megatron {way} {backend}", flags, none or why_not


def _why_no_a2a(job: Job, spread: int) -> str:
    if spread < 2 or job.context % spread:
        return f"{job.context} context-parallel ranks do not divide into groups of {spread}"
    return job.heads.why_no_a2a(job.tensor, spread) if job.heads else ""


def _ours(job: Job) -> Iterator[tuple[str, str, str]]:
    """Name, which begins with the algorithm; flags; why it cannot run."""

    def no_heads(size: int, chunks: int = 1) -> str:
        heads = job.heads and job.heads.of_rank(job.tensor)
        return refusal(_check_heads, *heads, size, chunks) if heads else ""

    yield "burst", "", ""
    if job.has_documents:
        yield "burst balanced", "--burst-layout balanced", ""
    topologies = {"flat": "", "double": _why_no_double(job)}
    for backward in ("kv", "query"):
        for topology, why_not in topologies.items():
            flags = f"--burst-backward {backward} --burst-topology {topology}"
            yield f"burst {backward} {topology}", flags, why_not
    for topology, why_not in topologies.items():
        yield f"ring {topology}", f"--burst-topology {topology}", why_not
    yield "allgather", "", ""
    yield "ulysses", "", no_heads(job.context)
    size = 2
    while size < job.context:  # on two ranks there is no hybrid
        flags = f"--burst-head-parallel-size {size}"
        why_not = no_heads(size) or refusal(head_groups, job.nodes, size)
        yield f"burst heads {size}", flags, why_not or no_heads(size, job.head_chunks)
        yield f"ring heads {size}", f"{flags} --burst-topology flat", why_not
        size *= 2


def _why_no_double(job: Job) -> str:
    grid, why_flat = choose_grid(Topology.DOUBLE, job.nodes)
    if why_flat:
        return f"no double ring: {why_flat}"
    if grid.nodes == 1:
        return "no double ring: all context-parallel ranks are on one node (--gpus-per-node)"
    if grid.ranks_per_node == 1:
        return "no double ring: every node holds one context-parallel rank"
    return ""


def _check_heads(query: int, kv: int, size: int, chunks: int) -> None:
    check_head_chunks(chunks, kv * kv_head_copies(query, kv, size) // size)


def refusal(check: Callable[..., object], *of: Any, **more: Any) -> str:
    """Return the message of the ValueError that a check raises, if it does."""
    try:
        check(*of, **more)
    except ValueError as error:
        return str(error)
    return ""
