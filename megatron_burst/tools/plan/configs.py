"""Reads configs/: models, clusters and named runs."""

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_burst.tools.model import Flags, cut, hybrid_pattern, whole

if TYPE_CHECKING:
    from megatron_burst.tools.plan.cluster import Cluster

# Megatron takes tokens from one place: any of these takes that of a run's mock data.
_DATA = {"data-path", "data-args-path", "train-data-path", "per-split-data-args-path"}
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
        return Run(cluster=table["cluster"], gpus=table["gpus"], flags=_set(given))

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

    def cluster(self, name: str, **rates: float) -> "Cluster":
        """Return a cluster, with these in the place of its own rates, as its file names them."""
        from megatron_burst.tools.plan.cluster import cluster_of  # it needs torch; launchers do not

        tables = self.clusters
        if name.endswith(".toml"):
            tables = {**tables, **_read(Path(name))}
            name = Path(name).stem
        _check("cluster", name, tables)
        table = _inherited(tables, name, "rates")
        table["rates"] = {**table.get("rates", {}), **rates}
        return cluster_of(name, table, self.constant)


def as_asked(flags: Flags, own: Flags, *, gpt: bool) -> dict[str, Any]:
    """Return the flags of a run as those of the model that `gpt` and one's own flags ask for.

    Raises:
        ValueError: the layers of a HybridModel are counted.
    """
    pattern, given = "hybrid-layer-pattern", dict(flags)
    if _DATA & own.keys():
        given.pop("mock-data", None)
    flags = dict(given)
    if pattern in {**flags, **own} or ("num-layers" in flags and not gpt):
        given = hybrid_form(flags)
    if "num-layers" in own and pattern in {**given, **own}:
        raise ValueError("--num-layers: a HybridModel has --hybrid-layer-pattern; or give --gpt")
    return given


def hybrid_form(flags: Flags) -> dict[str, Any]:
    """Return the flags of a GPTModel as those of the same HybridModel.

    Attention, `*`, and the MLP, `-`, or experts, `E`, are layers of their own there; recompute
    counts both. With --qk-layernorm, which Megatron's hybrid stack ignores, latents or MTP's heads
    it stays a GPTModel.
    """
    given = dict(flags)
    if any(map(given.get, ("qk-layernorm", "multi-latent-attention", "mtp-num-layers"))):
        return given
    if "recompute-num-layers" in given:
        given["recompute-num-layers"] = 2 * whole(given, "recompute-num-layers")
    if "num-layers" in given:
        given["hybrid-layer-pattern"] = hybrid_pattern(given)
        for name in ("num-layers", "moe-layer-freq"):
            given.pop(name, None)
    return given


def staged(flags: Flags, segments: int) -> dict[str, Any]:
    """Return the flags of a HybridModel with a `|` between the segments of its pipeline.

    Megatron wants so many times the pipeline stages as a stage has parts, and no flag for parts.
    """
    given, name = dict(flags), "hybrid-layer-pattern"
    main, *heads = str(given.get(name, "")).split("/")
    if name not in given:
        return given
    given.pop("num-virtual-stages-per-pipeline-rank", None)
    if "|" not in main:
        given[name] = "/".join(("|".join(cut(main, segments)), *heads))
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
        ValueError: a word that belongs to no flag, or flags are in a file.
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
    if "yaml-cfg" in found:
        raise ValueError("--yaml-cfg is not read here: pass what the file says as flags")
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


def _read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error


def _inherited(
    tables: Mapping[str, Table], name: Any, joined: str = "flags", above: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A table with what it does not say from its base; flags, or what else is named, are joined."""
    way = " -> ".join(map(str, (*above, name)))
    if name in above:
        raise ValueError(f"the bases of {way} lead back to it")
    if not isinstance(name, str) or not isinstance(tables.get(name), Mapping):
        raise ValueError(f"{way} is no table")
    table = dict(tables[name])
    base = table.pop("base", None)
    below = _inherited(tables, base, joined, (*above, name)) if base else {}
    if bad := [each for each in (below, table) if not isinstance(each.get(joined, {}), Mapping)]:
        raise ValueError(f"{joined} = {bad[0][joined]!r} of {way} is no table")
    both = {**below.get(joined, {}), **table.get(joined, {})}
    return below | table | ({joined: both} if both else {})
