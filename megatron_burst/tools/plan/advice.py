"""What to change where nothing fits: only what is not set already."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_burst.tools.flags import Flags, arguments
from megatron_burst.tools.plan import memory
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.ranking import Candidate
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.savings import lacking
from megatron_burst.tools.plan.workload import Workload

_GIB = memory.GIB


def savings_that_fit(given: Flags, cluster: Cluster, gpus: int) -> dict[str, Any] | None:
    """Return the savings with which flags fit, added one after the other; None if none is enough.

    Those that do not go with the rest are left out.
    """
    added: dict[str, Any] = {}
    for saving in lacking(given):
        try:
            saved = workload_of({**given, **added, **saving}, cluster, gpus)
        except ValueError:
            continue
        added |= saving
        if not memory.lacks(saved):
            return added
    return None


def nothing_fits(candidates: Sequence[Candidate]) -> str:
    """Say how much memory the way that needs least lacks, and what would help."""
    least = min(candidates, key=lambda each: each.memory.total)
    cluster = least.load.cluster
    if candidates[0].lacks == "host":
        needed = min(each.host_bytes for each in candidates) / _GIB
        there = memory.usable_host(cluster) / _GIB
        return (
            f"nothing fits: at least {needed:.0f} GiB of a host are needed, and {there:.0f} may be "
            "counted: more nodes"
        )
    return (
        f"nothing fits: at least {least.memory.total / _GIB:.0f} GiB are needed, {cluster.name} "
        f"has room for {memory.usable(cluster) / _GIB:.0f}: {', or '.join(_remedies(least))}, or "
        "--search for what does"
    )


def _remedies(least: Candidate) -> Iterator[str]:
    load = least.load
    if added := savings_that_fit(least.flags, load.cluster, load.gpus):
        yield f"{' '.join(arguments(added))}, with which it fits"
    yield from remedies(load, is_saved=bool(added))


def remedies(load: Workload, *, is_saved: bool = False) -> Iterator[str]:
    """Yield what helps beside savings; recompute where these are not enough."""
    if not (load.recompute or is_saved):
        yield "--recompute-granularity full"
    yield "more GPUs"
    if may_be_wider(load):
        yield "a larger --tensor-model-parallel-size"


def may_be_wider(load: Workload) -> bool:
    """Whether twice the tensor-parallel ranks could hold the heads, within a node."""
    twice = 2 * load.tensor
    fits = twice <= min(load.gpus, load.cluster.gpus_per_node)
    return fits and load.model.heads % twice == 0
