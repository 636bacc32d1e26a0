"""How far a model's sequence goes on given GPUs, one saving of memory after the other."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_burst.tools import terminal
from megatron_burst.tools.flags import Flags, whole
from megatron_burst.tools.plan import memory
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.ranking import Candidate, candidate
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.savings import rungs
from megatron_burst.tools.plan.screen import wrapped
from megatron_burst.tools.plan.search import sizes
from megatron_burst.tools.plan.workload import Workload

_STEP = 2**16  # tokens that a longest sequence is a multiple of, or more where ranks are odd
_MOST = 2**10  # of them

_COLUMNS: terminal.Columns = {
    "TP": ("tensor", 1, "{}"),
    **{name: (name, 1, "{:.1f}") for name in ("states", "inputs", "layer", "loss", "NCCL", "GPU")},
    "host": ("host", 1, "{:.0f}"),
    "longest": ("longest", 1e-6, "{:.2f} M"),
}


@dataclass(frozen=True)
class Rung:
    """A row: what is added, the sizes that go furthest with it, and how far."""

    name: str
    flags: Flags
    load: Workload  # with the tokens that were asked for, or the next that all ranks divide
    longest: int  # tokens; 0: not even the shortest that is tried

    @property
    def way(self) -> Candidate:
        """With the tokens that were asked for, or as many as fit."""
        flags = sized(self.flags, min(self.load.tokens, self.longest or self.load.tokens))
        return candidate(flags, self.load.cluster, self.load.gpus)

    @property
    def gib(self) -> Mapping[str, float]:
        """What a GPU holds, and a host, with the tokens that were asked for."""
        held = memory.predict(self.load)
        states = held.weights + held.gradients + held.optimizer + held.gathered
        parts = {"states": states, "inputs": held.inputs + held.saved, "layer": held.layer}
        parts |= {"loss": held.loss, "NCCL": held.nccl, "GPU": held.total}
        parts["host"] = memory.host_bytes(self.load)
        return {name: size / memory.GIB for name, size in parts.items()}


def climb(given: Flags, cluster: Cluster, gpus: int) -> list[Rung]:
    """Return the rows; sizes that are given stay as they are.

    Raises:
        ValueError: no size divides.
    """
    rows = []
    for name, flags in rungs(given):
        ways, reason = [], "the GPUs do not divide over the sizes that are given"
        for each in sizes(given, gpus, to_data=False):
            wanted = {**flags, **each}
            even = math.lcm(2 * each["context-parallel-size"], gpus)
            if (tokens := whole(wanted, "seq-length")) % even:
                wanted = sized(wanted, _rounded(tokens, gpus))
            try:
                load = workload_of(wanted, cluster, gpus)
            except ValueError as error:
                reason = str(error)
                continue
            longest = _longest(wanted, cluster, gpus)
            ways.append(Rung(name, wanted, load, longest))
        if not ways:
            raise ValueError(f"no sizes go with these flags: {reason}")
        rows.append(max(ways, key=lambda way: (way.longest, -memory.predict(way.load).total)))
    return rows


def sized(flags: Flags, tokens: int) -> dict[str, Any]:
    """Return the flags with another length of a sequence."""
    return {**flags, "seq-length": tokens, "max-position-embeddings": tokens}


def _longest(flags: Flags, cluster: Cluster, gpus: int) -> int:
    step = _rounded(_STEP, gpus)

    def fits(steps: int) -> bool:
        return not memory.lacks(workload_of(sized(flags, steps * step), cluster, gpus))

    return step * most_that(fits, _MOST)


def _rounded(tokens: int, gpus: int) -> int:
    """Return a multiple of what any number of ranks divides, as many tokens or some more."""
    return -(-tokens // (2 * gpus)) * 2 * gpus


def most_that(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number below `most` that fits, by halving; 0 if none does."""
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def figures(rung: Rung) -> dict[str, Any]:
    """Return a row as it is written to JSON."""
    sizes = {"tensor": rung.load.tensor, "context": rung.load.context}
    row = {"added": rung.name, **sizes, "gib": rung.gib, "longest_tokens": rung.longest}
    return row | {"command": rung.way.command()}


def cells(rung: Rung) -> list[str]:
    """Return a row's cells, but for its name."""
    sizes = {"tensor": rung.load.tensor, "longest": rung.longest or None}
    return terminal.cells({**rung.gib, **sizes}, _COLUMNS)


def show(rungs: Sequence[Rung]) -> None:
    """Print the table and the command of the row that goes furthest."""
    load, best = rungs[0].load, max(rungs, key=lambda rung: rung.longest)
    console = terminal.console()
    console.print(
        f"{load.gpus} GPUs of {load.cluster.name}, {load.tokens} tokens, "
        f"{load.model.parameters / 1e9:.2f} billion parameters; GiB of a GPU, of which "
        f"{memory.usable(load.cluster) / memory.GIB:.1f} may\nbe counted, and of a host, of "
        f"{memory.usable_host(load.cluster) / memory.GIB:.0f}; context-parallel over what tensor "
        "parallelism leaves"
    )
    rows = [(rung.name, *cells(rung)) for rung in rungs]
    console.print(terminal.table(("added",), _COLUMNS, rows))
    console.print(
        "NCCL: its buffers for attention's messages; GPU: states, inputs, NCCL and more of a layer "
        "at\nwork or the loss; longest: tokens that fit"
    )
    if best.longest:
        print(f"\n{best.name}, {best.way.load.tokens} tokens, on every node:")
        print(wrapped(best.way.command()))
