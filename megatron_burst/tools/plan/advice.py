"""What to change where nothing fits: only what is not set already."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any

from megatron_burst.tools.flags import Flags, arguments
from megatron_burst.tools.plan import memory, step
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.memory import GIB
from megatron_burst.tools.plan.ranking import NEAR, Candidate
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.savings import lacking
from megatron_burst.tools.plan.usual import as_trained
from megatron_burst.tools.plan.workload import Workload


def savings_that_fit(given: Flags, cluster: Cluster, gpus: int) -> dict[str, Any] | None:
    """Return the savings with which flags fit, none of them needless; None if none is enough.

    Those with which a step is fastest, of a tie the first. Some do not go with each other, or with
    the rest.
    """
    every, found = [*lacking(given)], dict[tuple[int, ...], Workload]()

    def together(some: Iterable[int]) -> dict[str, Any]:
        return {name: value for each in some for name, value in every[each].items()}

    sizes = range(1, len(every) + 1)
    for some in chain.from_iterable(combinations(range(len(every)), size) for size in sizes):
        if any({*fewer} < {*some} for fewer in found):
            continue
        try:
            load = as_trained(workload_of({**given, **together(some)}, cluster, gpus))
        except ValueError:
            continue
        if not memory.lacks(load):
            found[some] = load
    if not found:
        return None
    seconds = {some: step.predict(load).seconds for some, load in found.items()}
    near = NEAR * min(seconds.values())
    return together(next(some for some in found if seconds[some] <= near))


def nothing_fits(candidates: Sequence[Candidate]) -> str:
    """Say how much memory the way that needs least lacks, and what would help."""
    least = min(candidates, key=lambda each: each.memory.total)
    load, cluster = least.load, least.load.cluster
    if candidates[0].lacks == "host":
        needed = min(each.host_bytes for each in candidates) / GIB
        return (
            f"nothing fits: at least {needed:.0f} GiB of a host are needed, and "
            f"{memory.usable_host(cluster) / GIB:.0f} may be counted: more nodes"
        )
    added = savings_that_fit(least.flags, cluster, load.gpus)
    with_them = [f"{' '.join(arguments(added))}, with which it fits"] if added else []
    others = ", or ".join((*with_them, *remedies(load, is_saved=bool(added))))
    return (
        f"nothing fits: at least {least.memory.total / GIB:.0f} GiB are needed, {cluster.name} has "
        f"room for {memory.usable(cluster) / GIB:.0f}: {others}, or --search for what does"
    )


def remedies(load: Workload, *, is_saved: bool = False) -> Iterator[str]:
    """Yield what helps beside savings; recompute where these are not enough."""
    if not (load.recompute or is_saved):
        yield "--recompute-granularity full"
    yield "more GPUs"
    twice = 2 * load.tensor  # within a node
    if twice <= min(load.gpus, load.cluster.gpus_per_node) and load.model.heads % twice == 0:
        yield "a larger --tensor-model-parallel-size"
