"""Predictions beside what was measured elsewhere and here, and the fit of the constants."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, groupby, product
from pathlib import Path
from statistics import median

from megatron_burst.config import (
    Algorithm,
    BurstConfig,
    GradDtype,
    GradientReturn,
    LayoutName,
)
from megatron_burst.tools.flops import Model, model_of
from megatron_burst.tools.plan import memory, timing
from megatron_burst.tools.plan.configs import Configs, Table
from megatron_burst.tools.plan.workload import Cluster, Workload, config_of

ROOT = Path(__file__).parents[2]
GAP = 1.1  # a measured gap that the prediction has to order
_UNITS = {"k": 2**10, "M": 2**20}
_BISECTIONS, _ROUNDS = 12, 10
_BOUNDS = {  # of the constants
    "share_forward": (0.3, 1.0),
    "share_backward": (0.3, 1.0),
    "share_linear": (0.2, 1.0),
    "contention": (0.0, 1.0),
    "other_code": (0.3, 1.5),
    "working_set": (0.5, 4.0),
}
_SIZES = ("ranks", "ranks_per_node", "tokens", "heads", "kv_heads", "head_dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A published speed, and maybe memory."""

    id: str
    group: str
    load: Workload
    code: str  # whose, where it is not BurstEngine's
    speed: float
    unit: str  # tokens/s/GPU, or TFLOP/s of attention alone
    gib: float | None
    mfu_published: float | None  # per cent

    @property
    def mfu(self) -> float | None:
        """What follows from the tokens a second, as a share; None for attention alone."""
        if self.unit != "tokens/s/GPU":
            return None
        flops = timing.model_flops(self.load) / self.load.tokens
        return self.speed * flops / self.load.cluster.peak

    def predicted(self, other_code: float) -> float:
        """Return the speed that is predicted."""
        if self.unit == "tokens/s/GPU":
            return timing.predict(self.load).tokens_per_gpu * (other_code if self.code else 1.0)
        forward, _, backward = timing.attention_passes(self.load)
        return _attention_flops(self.load) / (forward.seconds + backward.seconds) / 1e12

    def predicted_gib(self, working_set: float) -> float:
        """Return the memory that is predicted."""
        return memory.predict(self.load, working_set).total / memory.GIB


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with its prediction."""

    id: str
    group: str
    unit: str
    measured: float
    predicted: float
    fitted: bool  # whether a constant was fitted on it
    code: str = ""

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


def rows_of(configs: Configs) -> list[Row]:
    """Return all published rows, with the cluster as the constants of `configs` have it."""
    return [
        _row(configs, f"{group['id']}/{row['id']}", {**group, **row})  # it says what is its own
        for group in configs.published["group"]
        for row in group["rows"]
    ]


def compare_speed(configs: Configs, rows: list[Row]) -> list[Compared]:
    """Return every row's speed beside the prediction."""
    fitted = {
        constant["row"]
        for name, constant in configs.published["fitted"].items()
        if name != "working_set"
    }
    other = configs.constant("other_code")
    return [
        Compared(
            row.id, row.group, row.unit, row.speed, row.predicted(other), row.id in fitted, row.code
        )
        for row in rows
    ]


def compare_memory(configs: Configs, rows: list[Row]) -> list[Compared]:
    """Return the memory of every row that says it beside the prediction."""
    fitted = configs.published["fitted"]["working_set"]["row"]
    factor = configs.constant("working_set")
    return [
        Compared(row.id, row.group, "GiB", row.gib, row.predicted_gib(factor), row.id == fitted)
        for row in rows
        if row.gib is not None
    ]


def compare_two_nodes(configs: Configs) -> list[Compared]:
    """Return the share of a step that is not kernels, measured on this machine and predicted.

    Measured within launches, which the machine's own changes from one to the next disturb least.
    """
    machine = configs.published["two_nodes"]
    found = []
    with (ROOT / machine["results"]).open(newline="") as file:
        rows = list(csv.DictReader(file))
    for _, each in groupby(rows, lambda row: [row[n] for n in ("mbit", *_SIZES, "algorithm")]):
        phases = {row["phase"]: row for row in each}
        step, seconds = phases["step"], {p: float(row["kernels_s"]) for p, row in phases.items()}
        setting = configs.published["settings"][machine["settings"][step["algorithm"]]]
        load = _two_nodes(machine, step, seconds, config_of(BurstConfig, setting))
        forward, _, backward = timing.attention_passes(load)
        kernels = seconds["forward"] + seconds["backward"]
        share = 1 - kernels / (forward.seconds + backward.seconds)
        exposed = 1 - float(step["kernels_share"])
        rate = {"0": "loopback", "inf": "no limit"}.get(step["mbit"], f"{step['mbit']} Mbit/s")
        place = f"{rate}, {step['tokens']} tokens, {step['kv_heads']} KV heads"
        name = f"{place}: {step['algorithm']}"
        found.append(Compared(name, place, "exposed share", exposed, share, False))
    return found


def median_error(found: list[Compared]) -> float:
    """Return the median of the held-out rows' errors."""
    return median(abs(each.error) for each in found if not each.fitted)


def order(found: list[Compared], *, across_codes: bool) -> tuple[int, list[tuple[str, str]]]:
    """Compare the order of every two rows of a group that were measured more than `GAP` apart.

    Of two code bases, or of one: returns how many pairs there are, and those that are predicted the
    other way round.
    """
    pairs = [
        (a, b)
        for a, b in combinations(found, 2)
        if a.group == b.group
        and (a.code != b.code) == across_codes
        and max(a.measured, b.measured) > GAP * min(a.measured, b.measured)
    ]
    wrong = [(a, b) for a, b in pairs if (a.measured > b.measured) != (a.predicted > b.predicted)]
    return len(pairs), [(a.id, b.id) for a, b in wrong]


def fit(configs: Configs) -> dict[str, float]:
    """Fit every constant so that its row is met, by bisection in turns; return the constants."""
    table = {name: dict(value) for name, value in configs.published["fitted"].items()}
    changed = replace(configs, published={**configs.published, "fitted": table})
    for _, (name, (low, high)) in product(range(_ROUNDS), _BOUNDS.items()):
        for _ in range(_BISECTIONS):
            table[name]["value"] = (low + high) / 2
            if _too_much(changed, name):
                high = table[name]["value"]
            else:
                low = table[name]["value"]
    return {name: constant["value"] for name, constant in table.items()}


def _too_much(configs: Configs, name: str) -> bool:
    """Whether the constant's row is met with a smaller value; speed falls with contention."""
    wanted = configs.published["fitted"][name]["row"]
    (row,) = (row for row in rows_of(configs) if row.id == wanted)
    if name == "working_set":
        assert row.gib is not None
        return row.predicted_gib(configs.constant(name)) > row.gib
    faster = row.predicted(configs.constant("other_code")) > row.speed
    return faster != (name == "contention")


def _attention_flops(load: Workload) -> float:
    """Of one layer on one GPU, forward and 2.5 times as many backward, causal pairs."""
    pairs = load.tokens**2 / 2
    return 3.5 * 4 * pairs * load.model.heads * load.model.head_dim / load.gpus


def _row(configs: Configs, name: str, table: Table) -> Row:
    """A row of BurstEngine's: context parallelism over all GPUs, ZeRO-3, bfloat16 gradients."""
    load = Workload(
        model=model_of(configs.model(table["model"])),
        cluster=configs.cluster("a800"),
        gpus=table["gpus"],
        tensor=1,
        context=table["gpus"],
        tokens=int(table["tokens"][:-1]) * _UNITS[table["tokens"][-1]],
        config=_setting(configs, table),
        window=table.get("window"),
        chunked_loss=table.get("loss") != "megatron",
        zero3=True,
        gradient_bytes=2,
        offload=table.get("offload", False),
    )
    unit = "tokens/s/GPU" if "tgs" in table else "TFLOP/s"
    return Row(
        id=name,
        group=name.rpartition("/")[0],
        load=load,
        code=table.get("code", ""),
        speed=table["tgs"] if "tgs" in table else table["tflops"],
        unit=unit,
        gib=table.get("gib"),
        mfu_published=table.get("mfu_published"),
    )


def _setting(configs: Configs, table: Table) -> BurstConfig:
    """What a row ran: its gradients return by a chain; half is kept in a striped layout."""
    given = config_of(BurstConfig, configs.published["settings"][table["setting"]])
    if given.algorithm is Algorithm.ULYSSES:
        return given
    share, wide = table.get("recompute", 1), table.get("code") == "InternEvo"
    layout = LayoutName.STRIPED if 0 < share < 1 else LayoutName.ZIGZAG
    return replace(
        given,
        grad_dtype=GradDtype.FLOAT32 if wide else GradDtype.MODEL,
        gradient_return=GradientReturn.CHAIN,
        recompute_fraction=share if share < 1 else None,
        layout=table.get("layout", layout),
    )


def _two_nodes(
    machine: Table, row: Mapping[str, str], alone: Mapping[str, float], config: BurstConfig
) -> Workload:
    """An algorithm on this machine's two nodes, with the rates of its kernels there."""
    ranks, per_node, tokens, heads, kv_heads, head_dim = (int(row[name]) for name in _SIZES)
    model = Model(
        layers=1,
        hidden=heads * head_dim,
        ffn=0,
        gated=False,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=0,
    )
    cluster = Cluster(
        name="two nodes",
        gpus_per_node=per_node,
        memory=0,
        forward_rate=1.0,
        backward_rate=1.0,
        linear_rate=1.0,
        memory_rate=1e9 * machine["memory_gb_s"],
        within_rate=1e9 * machine["within_gb_s"],
        nic_rate=1e6 / 8 * float(row["measured_mbit"]),
        gpus_per_nic=1,
        contention=0.0,
        copy_rate=1e9 * machine["copy_gb_s"],
        peak=1.0,
    )
    load = Workload(
        model=model,
        cluster=cluster,
        gpus=ranks,
        tensor=1,
        context=ranks,
        tokens=ranks * tokens,
        config=config,
        recompute=False,
        element_bytes=4,
    )
    forward, _, backward = timing.attention_passes(load)
    cluster = replace(
        cluster,
        forward_rate=forward.kernels / alone["forward"],
        backward_rate=backward.kernels / alone["backward"],
    )
    return replace(load, cluster=cluster)


def messages(configs: Configs, rows: list[Row]) -> Iterator[str]:
    """Say how far the predictions hold, a line for each question."""
    speed, gib = compare_speed(configs, rows), compare_memory(configs, rows)
    for what, found in (("speed", speed), ("memory", gib)):
        held = [each for each in found if not each.fitted]
        beyond = [each.id for each in held if abs(each.error) > 0.15]
        yield (
            f"{what}: median error of {len(held)} held-out rows {median_error(found):.1%}; "
            f"beyond 15 %: {', '.join(beyond) or 'none'}"
        )
    for across, of in ((False, "one code base"), (True, "two code bases")):
        count, wrong = order(speed, across_codes=across)
        said = "; ".join(" and ".join(pair) for pair in wrong) or "none"
        yield f"order of {count} pairs of {of} more than 10 % apart, wrong: {said}"
    points = [100 * abs(each.predicted - each.measured) for each in compare_two_nodes(configs)]
    near = sum(each <= 10 for each in points)
    yield (
        f"two nodes on this machine: {near} of {len(points)} exposed shares within 10 points, "
        f"the worst {max(points):.1f} off"
    )
