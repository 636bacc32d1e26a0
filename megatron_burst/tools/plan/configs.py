"""Reads configs/: models, clusters and named runs."""

import fnmatch
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_burst.tools.flops import peak_tflops
from megatron_burst.tools.plan.workload import Cluster, Flags, Workload, workload_of

FOLDER = Path(__file__).parents[2] / "configs"
type Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run by name."""

    name: str
    cluster: str
    gpus: int
    flags: Flags
    """Of Megatron and ours, without dashes in front; True for those without a value."""
    published: tuple[str, ...] = ()
    """The rows of published.toml that it is held against."""
    note: str = ""

    def arguments(self) -> list[str]:
        """Return the flags as a command line has them."""
        return arguments(self.flags)

    def workload(self, configs: "Configs") -> Workload:
        """Return what the planner predicts."""
        return workload_of(self.flags, configs.cluster(self.cluster), self.gpus)


@dataclass(frozen=True, slots=True)
class Configs:
    """The files of a folder of configurations."""

    models: Table
    clusters: Table
    published: Table
    tables: Mapping[str, Table] = field(repr=False)  # runs, those of series written out

    @classmethod
    def read(cls, folder: Path = FOLDER) -> "Configs":
        """Read a folder.

        Raises:
            ValueError: it is not there, or not such a folder.
        """
        try:
            models, clusters, runs, published = (
                tomllib.loads((folder / f"{name}.toml").read_text())
                for name in ("models", "clusters", "runs", "published")
            )
        except FileNotFoundError as error:
            raise ValueError(
                f"there is no {error.filename}: pass --configs with the repository's configs/"
            ) from None
        series = runs.pop("series")
        for name, table in series.items():
            runs |= dict(_rows(name, table))
        return cls(models, clusters, published, runs)

    def names(self, pattern: str = "*") -> list[str]:
        """Return the names of the runs that match a shell pattern."""
        known = [name for name in self.tables if not name.startswith("_")]
        return fnmatch.filter(known, pattern)

    def run(self, name: str) -> Run:
        """Return a run.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self.names():
            raise ValueError(f"there is no run {name}; there are: {', '.join(self.names())}")
        table = _inherited(self.tables, name)
        given = {**self.model(table["model"]), **self.flags_of(name)}
        given.setdefault("max-position-embeddings", given["seq-length"])
        return Run(
            name=name,
            cluster=table["cluster"],
            gpus=table["gpus"],
            flags={key: value for key, value in given.items() if value is not False},
            published=tuple(table.get("published", ())),
            note=table.get("note", ""),
        )

    def flags_of(self, name: str) -> dict[str, Any]:
        """Return the flags of a run, or of a base of runs, without those of its model."""
        return dict(_inherited(self.tables, name)["flags"])

    def model(self, name: str) -> dict[str, Any]:
        """Return the flags of a model; ValueError if there is none of this name."""
        known = [each for each in self.models if not each.startswith("_")]
        if name not in known:
            raise ValueError(f"there is no model {name}; there are: {', '.join(known)}")
        return _inherited({key: {"flags": t} for key, t in self.models.items()}, name)["flags"]

    def published_rows(self) -> dict[str, Table]:
        """Return the published figures by name; a row takes what it does not say from its group."""
        return {
            f"{group['id']}/{row['id']}": {**group, **row}
            for group in self.published["group"]
            for row in group["rows"]
        }

    def constant(self, name: str) -> float:
        """Return one of the planner's fitted constants."""
        return float(self.published["fitted"][name]["value"])

    def cluster(self, name: str) -> Cluster:
        """Return a cluster; ValueError if there is none of this name."""
        if name not in self.clusters:
            raise ValueError(f"there is no cluster {name}; there are: {', '.join(self.clusters)}")
        table = self.clusters[name]
        share = {
            key: table.get(f"share_{key}", self.constant(f"share_{key}"))
            for key in ("forward", "backward", "linear")
        }
        peak = 1e12 * (table.get("peak_tflops") or peak_tflops(table["gpu"]) or 0.0)
        return Cluster(
            name=name,
            gpus_per_node=table["gpus_per_node"],
            memory=table["memory_gib"] * 2**30,
            forward_rate=peak * share["forward"],
            backward_rate=peak * share["backward"],
            linear_rate=peak * share["linear"],
            memory_rate=1e9 * table["memory_gb_s"],
            within_rate=1e9 * table["within_gb_s"],
            nic_rate=1e9 * table["nic_gb_s"],
            gpus_per_nic=max(1, table["gpus_per_node"] // table["nics_per_node"]),
            contention=self.constant("contention"),
            copy_rate=float("inf"),
            peak=peak,
        )


def arguments(flags: Flags) -> list[str]:
    """Write flags as a command line has them; those that are False are left out."""
    words = []
    for name, value in flags.items():
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Undo `arguments`: values stay strings; a flag without one is True.

    Raises:
        ValueError: a word that belongs to no flag.
    """
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            flags[name] = value or True
        elif not name:
            raise ValueError(f"{word} belongs to no flag")
        else:
            before = flags[name]
            flags[name] = word if before is True else [*_listed(before), word]
    return flags


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _inherited(tables: Mapping[str, Table], name: str) -> dict[str, Any]:
    """A table with what it does not say from its base; flags are joined."""
    table = dict(tables[name])
    given = dict(table.get("flags", {}))
    base = table.pop("base", None) or given.pop("base", None)
    if base is None:
        return {**table, "flags": given}
    below = _inherited(tables, base)
    return {**below, **table, "flags": {**below["flags"], **given}}


def _rows(name: str, series: Table) -> Iterator[tuple[str, dict[str, Any]]]:
    """The runs of a series: each like its base, or where it is cumulative like the one before."""
    base = series["base"]
    for row in series["rows"]:
        run = {"base": base, "published": [], **row}
        own = f"{name}-{run.pop('id')}"
        if series.get("cumulative") and not row.get("aside"):
            base = own
        run.pop("aside", None)
        yield own, run
