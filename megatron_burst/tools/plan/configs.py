"""Reads configs/: models, clusters and named runs."""

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_burst.tools.flops import Flags, peak_tflops
from megatron_burst.tools.plan.workload import Cluster

_FOLDER = Path(__file__).parents[2] / "configs"
type Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run by name."""

    name: str
    cluster: str
    gpus: int
    flags: Flags


@dataclass(frozen=True, slots=True)
class Configs:
    """The files of configs/; ValueError for a name that they do not have."""

    models: Table
    clusters: Table
    published: Table
    tables: Mapping[str, Table]  # runs

    @classmethod
    def read(cls) -> "Configs":
        """Read the folder that this package brings."""
        names = ("models", "clusters", "published", "runs")
        return cls(*(tomllib.loads((_FOLDER / f"{name}.toml").read_text()) for name in names))

    def names(self, pattern: str = "*") -> list[str]:
        """Return the names of the runs that match a shell pattern."""
        if not (found := fnmatch.filter(_names(self.tables), pattern)):
            raise ValueError(f"no run of configs/ matches {pattern}")
        return found

    def run(self, name: str) -> Run:
        """Return a run."""
        _check("run", name, self.tables)
        table = _inherited(self.tables, name)
        given = self.model(table["model"]) | table["flags"]
        given.setdefault("max-position-embeddings", given["seq-length"])
        return Run(name=name, cluster=table["cluster"], gpus=table["gpus"], flags=_set(given))

    def flags_of(self, name: str) -> dict[str, Any]:
        """Return the flags of a run, or of a base of runs, without those of its model."""
        return _set(_inherited(self.tables, name)["flags"])

    def model(self, name: str) -> dict[str, Any]:
        """Return the flags of a model."""
        _check("model", name, self.models)
        return _inherited(self.models, name)

    def constant(self, name: str) -> float:
        """Return one of the planner's fitted constants."""
        return float(self.published["fitted"][name]["value"])

    def cluster(self, name: str) -> Cluster:
        """Return a cluster."""
        _check("cluster", name, self.clusters)
        table = self.clusters[name]
        peak = 1e12 * (table.get("peak_tflops") or peak_tflops(table["gpu"]) or 0.0)

        def reached(what: str) -> float:
            share = f"share_{what}"
            return peak * float(table.get(share, self.constant(share)))

        return Cluster(
            name=name,
            gpus_per_node=table["gpus_per_node"],
            memory=table["memory_gib"] * 2**30,
            forward_rate=reached("forward"),
            backward_rate=reached("backward"),
            linear_rate=reached("linear"),
            memory_rate=1e9 * table["memory_gb_s"],
            within_rate=1e9 * table["within_gb_s"],
            nic_rate=1e9 * table["nic_gb_s"],
            gpus_per_nic=max(1, table["gpus_per_node"] // table["nics_per_node"]),
            contention=self.constant("contention"),
            copy_rate=float("inf"),
            peak=peak,
        )


def hybrid_form(flags: Flags) -> dict[str, Any]:
    """Return the flags of a GPTModel as those of the same HybridModel.

    Attention, `*`, and the MLP, `-`, are layers of their own there; recompute counts both. With
    --qk-layernorm, which Megatron's hybrid stack ignores, it stays a GPTModel.
    """
    given = dict(flags)
    if given.get("qk-layernorm"):
        return given
    if "recompute-num-layers" in given:
        given["recompute-num-layers"] = 2 * int(given["recompute-num-layers"])
    if "num-layers" in given:
        given["hybrid-layer-pattern"] = "*-" * int(given.pop("num-layers"))
    return given


def arguments(flags: Flags) -> list[str]:
    """Write flags as a command line has them; those that are False are left out."""
    words = []
    for name, value in _set(flags).items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Undo `arguments`: values stay strings, several are a list; a flag without one is True.

    Raises:
        ValueError: a word that belongs to no flag.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = [value] if value else []
        elif not found:
            raise ValueError(f"{word} belongs to no flag")
        else:
            found[name].append(word)
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in found.items()
    }


def _set(flags: Flags) -> dict[str, Any]:
    """Those that are not taken back by False."""
    return {name: value for name, value in flags.items() if value is not False}


def _names(tables: Table) -> list[str]:
    return [name for name in tables if not name.startswith("_")]


def _check(what: str, name: str, tables: Table) -> None:
    if name not in _names(tables):
        raise ValueError(f"there is no {what} {name}; there are: {', '.join(_names(tables))}")


def _inherited(tables: Mapping[str, Table], name: str) -> dict[str, Any]:
    """A table with what it does not say from its base; flags are joined."""
    table = dict(tables[name])
    base = table.pop("base", None)
    below = _inherited(tables, base) if base else {}
    flags = {**below.get("flags", {}), **table.get("flags", {})}
    return below | table | ({"flags": flags} if flags else {})
