"""How far a model's sequence goes on given GPUs, one saving of memory after the other."""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_burst.tools import terminal
from megatron_burst.tools.flags import Flags, whole
from megatron_burst.tools.plan import memory, screen
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.ranking import Candidate, candidate
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.savings import LADDER, rungs
from megatron_burst.tools.plan.search import sizes
from megatron_burst.tools.plan.workload import Workload

_STEP = 2**16  # tokens that a longest sequence is a multiple of, or more where ranks are odd
_MOST = 2**14  # of them
_COLUMNS: terminal.Columns = {
    "TP": ("tensor", 1, "{}"),
    **{name: (name, 1, "{:.1f}") for name in ("states", "inputs", "layer", "loss", "NCCL", "GPU")},
    "host": ("host", 1, "{:.0f}"),
    "longest": ("longest", 1e-6, "{:.2f} M"),
}
_MEANINGS = (
    "GiB of a GPU and of a host; context-parallel over what TP leaves, unless that is given; NCCL: "
    "its buffers for attention's messages; GPU: states, inputs, NCCL and more of a layer at work "
    "or the loss; longest: tokens that fit"
)


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
    """Return the rows; sizes that are given stay, savings that do not go with them are left out.

    Raises:
        ValueError: no size divides.
    """
    rows, gone = list[Rung](), set[str]()
    for name, flags in rungs(given):
        ways, reason = list[Rung](), "the GPUs do not divide over the sizes that are given"
        for each in sizes(given, gpus, to_data=False):
            wanted = {n: v for n, v in flags.items() if n not in gone} | each
            even = math.lcm(2 * each["context-parallel-size"], gpus)
            if (tokens := whole(wanted, "seq-length")) % even:
                wanted = sized(wanted, _rounded(tokens, gpus))
            try:
                load = workload_of(wanted, cluster, gpus)
                ways.append(Rung(name, wanted, load, _longest(wanted, cluster, gpus)))
            except ValueError as error:
                reason = str(error)
        if ways:
            rows.append(max(ways, key=lambda way: (way.longest, -memory.predict(way.load).total)))
        elif rows:
            gone |= LADDER[name].keys()
            text = f"--ladder leaves out {name!r}: {' '.join(reason.split())}"
            terminal.complain("megatron-burst plan", [text])
        else:
            raise ValueError(f"no sizes go with these flags: {reason}")
    return rows


def sized(flags: Flags, tokens: int) -> dict[str, Any]:
    """Return the flags with another length of a sequence."""
    return {**flags, "seq-length": tokens, "max-position-embeddings": tokens}


def _longest(flags: Flags, cluster: Cluster, gpus: int) -> int:
    step = _rounded(_STEP, gpus)

    def lacks(tokens: int) -> bool:  # as all longer ones do
        return bool(memory.lacks(workload_of(sized(flags, tokens), cluster, gpus)))

    most = step
    while most < _MOST * step and not lacks(most):
        most *= 2
    return step * bisect_left(range(step, most, step), True, key=lacks)


def _rounded(tokens: int, gpus: int) -> int:
    """Return a multiple of what any number of ranks divides, as many tokens or some more."""
    return -(-tokens // (2 * gpus)) * 2 * gpus


def _figures(rung: Rung) -> dict[str, Any]:
    """A row as it is written to JSON."""
    return {
        "added": rung.name,
        "tensor": rung.load.tensor,
        "context": rung.load.context,
        "gib": rung.gib,
        "longest_tokens": rung.longest,
        "command": rung.way.command(),
    }


def cells(rung: Rung) -> list[str]:
    """Return a row's cells, but for its name."""
    others = {"tensor": rung.load.tensor, "longest": rung.longest or None}
    return terminal.cells({**rung.gib, **others}, _COLUMNS)


def show(rows: Sequence[Rung], *, as_json: bool) -> None:
    """Print the table and the command of the row that goes furthest.

    Raises:
        ValueError: not even the shortest sequence fits.
    """
    best, load = max(rows, key=lambda rung: rung.longest), rows[0].load
    if as_json:
        print(json.dumps([*map(_figures, rows)], indent=2))
    else:
        table = [["added", *_COLUMNS], *([rung.name, *cells(rung)] for rung in rows)]
        print(*screen.about(load), "", *screen.aligned(table), "", sep="\n")
        screen.say(_MEANINGS)
    if not best.longest:
        raise ValueError(f"no sequence fits on {load.gpus} GPUs: more of them, or --search")
    if not as_json:
        way = best.way
        print(f"\n{best.name}, {way.load.tokens} tokens, on every node:")
        print(screen.wrapped(way.command()))
