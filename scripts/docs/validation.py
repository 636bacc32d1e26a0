"""Predictions beside what was measured elsewhere and here, and the fit of the constants."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import combinations, groupby, product
from pathlib import Path
from statistics import mean, median

from pages import read_csv
from rows import Row, attention_alone, row_of

from megatron_burst.config import BurstConfig
from megatron_burst.plans.choice.machine import CPU
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.plan import timing
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.configs import Configs, Table
from megatron_burst.tools.plan.reading import config_of
from megatron_burst.tools.plan.workload import Workload

ROOT = Path(__file__).parents[2]
GAP = 1.1  # a measured gap that the prediction has to order
BEYOND = 0.15  # errors that are named
_BISECTIONS, _ROUNDS = 12, 10
_BOUNDS = {  # of the constants
    "share_forward": (0.3, 1.0),
    "share_backward": (0.3, 1.0),
    "share_linear": (0.2, 1.0),
    "contention": (0.0, 1.0),
    "b200_forward": (0.3, 1.0),
    "b200_backward": (0.2, 1.0),
    "traffic": (1.0, 16.0),
    "other_code": (0.3, 1.5),
    "working_set": (0.5, 4.0),
    "experts_ms": (0.0, 10.0),
    "host_update": (0.0, 1.0),
}
_SLOWING = ("contention", "traffic", "experts_ms", "host_update")  # of them, the more the slower
_SIZES = ("ranks", "ranks_per_node", "tokens", "heads", "kv_heads", "head_dim")

type _Measured = Mapping[str, str]  # a row of a benchmark's table
type _Place = tuple[str, ...]


def two_nodes(configs: Configs) -> list[Row]:
    """Return the share of a step that is not kernels, measured on this machine.

    Measured within launches, which the machine's own changes from one to the next disturb least.
    """
    rows = []
    for results in configs.published["two_nodes"]["results"]:
        rows += read_csv(ROOT / results)
    rates = _kernel_rates(rows)
    cases = groupby(rows, lambda row: [row[n] for n in ("mbit", *_SIZES, "algorithm")])
    return [_exposed(configs, {row["phase"]: row for row in each}, rates) for _, each in cases]


def _kernel_rates(rows: Iterable[_Measured]) -> dict[_Place, float]:
    """Return the FLOP/s of a rank's kernels alone, with as many KV heads as heads, by place.

    They fall with the ranks that share a core, and from one day to another.
    """
    speeds = defaultdict(list)
    for row in rows:
        if row["phase"] == "step" and row["kv_heads"] == row["heads"]:
            ranks, _, tokens, heads, _, head_dim = (int(row[name]) for name in _SIZES)
            forward = attention_flops(ranks * tokens**2 // 2, heads, head_dim, head_dim)
            speeds[_place(row)].append(3.5 * forward / float(row["kernels_s"]))
    return {place: mean(rates) for place, rates in speeds.items()}


def _place(row: _Measured) -> _Place:
    """What rows have in common that were measured at one time on the same ranks and links."""
    return row["date"], row["ranks"], row["ranks_per_node"], row["mbit"]


def _exposed(
    configs: Configs, phases: Mapping[str, _Measured], rates: Mapping[_Place, float]
) -> Row:
    machine, step = configs.published["two_nodes"], phases["step"]
    seconds = {phase: float(row["kernels_s"]) for phase, row in phases.items()}
    setting = configs.published["settings"][machine["settings"][step["algorithm"]]]
    pace = rates[_place(step)] / CPU.forward_rate
    load = _two_nodes(machine, step, seconds, config_of(BurstConfig, setting), pace)
    exposed = 1 - float(step["kernels_share"])
    rate = {"0": "loopback", "inf": "no limit"}.get(step["mbit"], f"{step['mbit']} Mbit/s")
    nodes = int(step["ranks"]) // int(step["ranks_per_node"])
    place = f"{rate}, {step['tokens']} tokens, {step['kv_heads']} KV heads"
    place = place if nodes <= 2 else f"{step['ranks']} ranks on {nodes} nodes, {place}"
    name = f"{place}: {step['algorithm']}"
    return Row(id=name, group=place, load=load, value=exposed, unit="exposed share")


def median_error(rows: list[Row]) -> float:
    """Return the median of the held-out rows' errors."""
    return median(abs(each.error) for each in rows if not each.fitted)


def _summary(rows: list[Row]) -> str:
    held = [each for each in rows if not each.fitted]
    beyond = [each.id for each in held if abs(each.error) > BEYOND]
    return f"{median_error(rows):.1%} of {len(held)}" + f", {len(beyond)} beyond" * bool(beyond)


def order(rows: list[Row], *, across_codes: bool) -> tuple[int, list[tuple[str, str]]]:
    """Compare the order of every two rows of a group that were measured more than `GAP` apart.

    Of two code bases, or of one: returns how many pairs there are, and those that are predicted the
    other way round.
    """
    pairs = [
        (a, b)
        for a, b in combinations(rows, 2)
        if a.group == b.group
        and (a.code != b.code) == across_codes
        and max(a.value, b.value) > GAP * min(a.value, b.value)
    ]
    wrong = [(a, b) for a, b in pairs if (a.value > b.value) != (a.predicted > b.predicted)]
    return len(pairs), [(a.id, b.id) for a, b in wrong]


def fit(configs: Configs) -> dict[str, float]:
    """Fit every constant so that its row is met, by bisection in turns; return the constants."""
    table = {name: dict(value) for name, value in configs.published["fitted"].items()}
    changed = configs._replace(published={**configs.published, "fitted": table})
    for _, (name, (low, high)) in product(range(_ROUNDS), _BOUNDS.items()):
        for _ in range(_BISECTIONS):
            middle = table[name]["value"] = (low + high) / 2
            row = row_of(changed, name)
            too_much = (row.predicted > row.value) != (name in _SLOWING)
            low, high = (low, middle) if too_much else (middle, high)
    return {name: constant["value"] for name, constant in table.items()}


def _two_nodes(
    machine: Table, row: _Measured, alone: Mapping[str, float], config: BurstConfig, pace: float
) -> Workload:
    """An algorithm on this machine's nodes, with the rates of its kernels there.

    What else a core does is `pace` times as fast as where its rates are from.
    """
    ranks, per_node, tokens, heads, kv_heads, head_dim = (int(row[name]) for name in _SIZES)
    here = replace(CPU.at_pace(pace), nic_rate=1e6 / 8 * float(row["measured_mbit"]))
    rates = asdict(here) | {"forward_rate": 1.0, "backward_rate": 1.0, "linear_rate": 1.0}
    cluster = Cluster(
        name="this machine",
        gpus_per_node=per_node,
        memory=machine["memory_gib"] * 2**30,
        peak=1.0,
        **rates,
    )
    sizes = heads, kv_heads, head_dim
    load = attention_alone(cluster, ranks, tokens, config, sizes, element_bytes=4)
    forward, _, backward = timing.attention_passes(load)
    cluster = replace(
        cluster,
        forward_rate=forward.kernels / alone["forward"],
        backward_rate=backward.kernels / alone["backward"],
    )
    return replace(load, cluster=cluster)


def messages(configs: Configs, rows: list[Row]) -> Iterator[str]:
    """Say how far the predictions hold, a line for each question."""
    held = [each for each in rows if not each.fitted]
    yield f"the median error of all: {median_error(rows):.1%} of {len(held)} rows"
    for (is_memory, table), group in groupby(rows, lambda row: (row.unit == "GiB", row.table)):
        yield f"{table}, {'memory' if is_memory else 'speed'}: {_summary([*group])}"
    speed = [each for each in rows if each.unit != "GiB"]
    for across, of in ((False, "one code base"), (True, "two code bases")):
        count, wrong = order(speed, across_codes=across)
        places = Counter("/".join(first.split("/")[:2]) for first, _ in wrong)
        said = ", ".join(f"{times} of {place}" for place, times in places.items()) or "none"
        yield f"of {count} pairs of {of} more than 10 % apart in the wrong order: {said}"
    points = [100 * abs(each.predicted - each.value) for each in two_nodes(configs)]
    near = sum(each <= 10 for each in points)
    yield (
        f"two to eight emulated nodes: {near} of {len(points)} exposed shares within 10 points, "
        f"the worst {max(points):.1f} off"
    )
