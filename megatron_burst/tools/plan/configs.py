"""Reads configs/: models, clusters and named runs."""

import fnmatch
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_burst.tools.flags import Flags, kept

if TYPE_CHECKING:
    from megatron_burst.tools.plan.cluster import Cluster

_FOLDER = Path(__file__).parents[2] / "configs"
type Table = Mapping[str, Any]


class Run(NamedTuple):
    """A named run."""

    cluster: str
    gpus: int
    flags: Flags


class Configs(NamedTuple):
    """The files of configs/; ValueError for a name that they do not have."""

    models: Table
    clusters: Table
    published: Table
    tables: Mapping[str, Table]  # runs

    @classmethod
    @cache
    def read(cls) -> "Configs":
        """Read the folder that this package brings."""
        names = ("models", "clusters", "published", "runs")
        return cls(*(tomllib.loads((_FOLDER / f"{name}.toml").read_text()) for name in names))

    def listed(self, pattern: str = "*") -> dict[str, list[str]]:
        """Return the names of models, clusters and runs that match a shell pattern, by their kind.

        Raises:
            ValueError: none does.
        """
        kinds = {"models": self.models, "clusters": self.clusters, "runs": self.tables}
        matches = {kind: fnmatch.filter(_names(of), pattern) for kind, of in kinds.items()}
        if not any(matches.values()):
            raise ValueError(f"no model, cluster or run of configs/ matches {pattern}")
        return {kind: names for kind, names in matches.items() if names}

    def run(self, name: str) -> Run:
        """Return a run."""
        table = _named("run", name, self.tables)
        given = self.model(table["model"]) | table["flags"]
        given.setdefault("max-position-embeddings", given["seq-length"])
        return Run(cluster=table["cluster"], gpus=table["gpus"], flags=kept(given))

    def flags_of(self, name: str) -> dict[str, Any]:
        """Return the flags of a run, or of a base of runs, without those of its model."""
        return kept(_inherited(self.tables, name)["flags"])

    def model(self, name: str) -> dict[str, Any]:
        """Return the flags of a model."""
        return _named("model", name, self.models)

    def constant(self, name: str) -> float:
        """Return one of the planner's fitted constants."""
        return float(self.published["fitted"][name]["value"])

    def with_gpu(self, model: str) -> str | None:
        """Return the name of the cluster with the GPU that CUDA calls so, if there is one."""
        gpus = ((name, table.get("gpu")) for name, table in self.clusters.items())
        return next((n for n, gpu in gpus if gpu and re.search(rf"\b{gpu}\b", model)), None)

    def cluster(self, name: str, **rates: float) -> "Cluster":
        """Return a cluster, with these in the place of its own rates, as its file names them."""
        from megatron_burst.tools.plan.cluster import cluster_of  # it needs torch; launchers do not

        tables = self.clusters
        if name.endswith(".toml"):
            try:
                tables = {**tables, **tomllib.loads(Path(name).read_text())}
            except ValueError as error:
                raise ValueError(f"{name} is no TOML: {error}") from error
            name = Path(name).stem
        table = _named("cluster", name, tables, "rates")
        table["rates"] = {**table.get("rates", {}), **rates}
        return cluster_of(name, table, self.constant)


def _names(tables: Table) -> list[str]:
    return [name for name in tables if not name.startswith("_")]


def _named(what: str, name: str, tables: Table, merged: str = "flags") -> dict[str, Any]:
    if name not in _names(tables):
        raise ValueError(f"there is no {what} {name}; there are: {', '.join(_names(tables))}")
    return _inherited(tables, name, merged)


def _inherited(
    tables: Mapping[str, Table], name: Any, merged: str = "flags", above: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A table with what it does not say from its base; flags, or what else is named, are merged."""
    way = " -> ".join(map(str, (*above, name)))
    if name in above:
        raise ValueError(f"the bases of {way} lead back to it")
    if not isinstance(name, str) or not isinstance(tables.get(name), Mapping):
        raise ValueError(f"{way} is no table")
    table = dict(tables[name])
    base = table.pop("base", None)
    below = _inherited(tables, base, merged, (*above, name)) if base else {}
    if bad := [each for each in (below, table) if not isinstance(each.get(merged, {}), Mapping)]:
        raise ValueError(f"{merged} = {bad[0][merged]!r} of {way} is no table")
    both = {**below.get(merged, {}), **table.get(merged, {})}
    return below | table | ({merged: both} if both else {})
