"""What was published, as rows with a step of training that the planner can predict."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

from megatron_burst.config import (
    Algorithm,
    BurstConfig,
    GradDtype,
    LayoutName,
)
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.model import model_of
from megatron_burst.tools.plan import memory, step, timing
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.configs import Configs, Table
from megatron_burst.tools.plan.reading import config_of
from megatron_burst.tools.plan.workload import Workload

_UNITS = {"k": 2**10, "M": 2**20}
_FIGURES = {
    "tgs": "tokens/s/GPU",
    "tflops": "TFLOP/s",
    "mfu": "% MFU",
    "millions": "M tokens",
    "gib": "GiB",
    "gb": "GiB",
}
_CHANGES = (  # of a workload, by the names of its fields
    *("window", "recompute", "zero3", "gradient_bytes", "fp8"),
    *("offload", "recompute_offload", "mlp_chunks", "sequences", "micro"),
    *("pipeline", "virtual", "expert", "expert_tensor", "hides_experts"),
)
_BURST = {"cluster": "a800", "zero3": True, "gradient_bytes": 2, "recompute": True}
_OF_OTHERS = 0.0, 0.0  # host time a hop: what was published was not measured of our loop
_CHUNK = 2**13  # the tokens that a longest sequence is a multiple of, on every rank


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure that was measured, with the step that it is of."""

    id: str
    group: str
    table: str = ""
    load: Workload
    code: str = ""  # whose, where it is not BurstEngine's
    value: float
    unit: str
    pace: float = 1.0  # of the code, over BurstEngine's
    fitted: str = ""  # the constant that was fitted on it
    mfu_published: float | None = None  # per cent

    @cached_property
    def predicted(self) -> float:
        """What is predicted of `value`."""
        if self.unit == "GiB":
            return memory.predict(self.load).total / memory.GIB
        if self.unit == "tokens/s/GPU":
            return step.predict(self.load).tokens_per_gpu * self.pace
        if self.unit == "% MFU":
            return 100 * step.predict(self.load).mfu
        if self.unit == "M tokens":
            return _longest(self.load) / 1e6
        forward, _, backward = timing.attention_passes(self.load)
        if self.unit == "exposed share":
            kernels = forward.kernels + backward.kernels
            return 1 - kernels / (forward.seconds + backward.seconds)
        one = {"TFLOP/s forward": ([forward], 1), "TFLOP/s backward": ([backward], 2.5)}
        passes, times = one.get(self.unit, ([forward, backward], 3.5))
        return times * _forward_flops(self.load) / sum(p.seconds for p in passes) / 1e12

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.value - 1


def attention_alone(
    cluster: Cluster,
    gpus: int,
    tokens: int,
    config: BurstConfig,
    heads: tuple[int, int, int],
    **more: Any,
) -> Workload:
    """Attention of one layer and nothing else, with so many tokens a GPU.

    `heads` are those of queries and of keys, and their size.
    """
    queries, keys, dim = heads
    flags = {"hybrid-layer-pattern": "*", "hidden-size": queries * dim, "vocab-size": 1}
    flags |= {"num-attention-heads": queries, "kv-channels": dim}
    flags |= {"group-query-attention": True, "num-query-groups": keys}
    return Workload(
        model=model_of(flags),
        cluster=cluster,
        gpus=gpus,
        tensor=1,
        context=gpus,
        tokens=gpus * tokens,
        config=config,
        recompute=False,
        **more,
    )


def rows_of(configs: Configs) -> list[Row]:
    """Return all that is published, memory last, with the clusters as `configs` has them."""
    return sorted(_rows(configs), key=lambda row: row.unit == "GiB")


def row_of(configs: Configs, constant: str) -> Row:
    """Return the one that a constant is fitted on."""
    return next(row for row in _rows(configs) if row.fitted == constant)


def _rows(configs: Configs) -> Iterator[Row]:
    constants = configs.published["fitted"].items()
    fitted = {(each["row"], name == "working_set"): name for name, each in constants}
    steps = (_steps(configs, kind) for kind in ("group", "steps", "longest"))
    for row in chain(next(steps), _magi(configs), *steps):
        yield replace(row, fitted=fitted.get((row.id, row.unit == "GiB"), ""))


def _forward_flops(load: Workload) -> float:
    """Of one layer on one GPU: the area of the mask, without the diagonal's half."""
    pairs, model = load.tokens**2, load.model
    area = pairs // 2 if load.causal else pairs
    flops = attention_flops(area, model.heads, model.head_dim, model.value_head_dim)
    return flops / load.gpus


def _longest(load: Workload) -> int:
    """Return how many tokens of a sequence fit."""
    chunk = _CHUNK * load.context
    lengths = range(chunk, 2**13 * chunk, chunk)
    fitting = bisect_left(lengths, True, key=lambda n: bool(memory.lacks(replace(load, tokens=n))))
    return chunk * fitting


def _steps(configs: Configs, kind: str) -> Iterator[Row]:
    """A row a figure: of BurstEngine's groups, or of other codes' tables."""
    is_burst = kind == "group"
    for group in configs.published[kind]:
        for row in group["rows"]:
            given = {**group, **row}  # it says what is its own
            code = given.get("code", "" if is_burst else group["id"])
            config = _config(configs, given, is_burst=is_burst)
            load = _load(configs, {**given, **(_BURST if is_burst else {})}, config)
            for figure, unit in _FIGURES.items():
                if figure in given:
                    yield Row(
                        id=f"{group['id']}/{row['id']}",
                        group=f"{group['id']}/{row['id']}" if "apart" in group else group["id"],
                        table="BurstEngine" if is_burst else group["id"],
                        load=load,
                        code=code,
                        value=given[figure] * (1e9 / 2**30 if figure == "gb" else 1),
                        unit=unit,
                        pace=configs.constant("other_code") if is_burst and code else 1.0,
                        mfu_published=given.get("mfu_published") if figure == "tgs" else None,
                    )


def _config(configs: Configs, given: Table, *, is_burst: bool) -> BurstConfig:
    """What a row ran; half is kept in stripes."""
    config = config_of(BurstConfig, configs.published["settings"][given["setting"]])
    if not is_burst:
        return replace(config, recompute_fraction=given.get("fraction"))
    if config.algorithm is Algorithm.ULYSSES:
        return config
    share, wide = given.get("recompute", 1), given.get("code") == "InternEvo"
    layout = LayoutName.STRIPED if 0 < share < 1 else LayoutName.ZIGZAG
    return replace(
        config,
        grad_dtype=GradDtype.FLOAT32 if wide else GradDtype.MODEL,
        recompute_fraction=share if share < 1 else None,
        layout=given.get("layout", layout),
    )


def _load(configs: Configs, given: Table, config: BurstConfig) -> Workload:
    """A step in which every data-parallel rank has one sequence."""
    rates = zip(("forward_tflops", "backward_tflops"), given.get("kernels", ()), strict=False)
    tensor, context = given.get("tensor", 1), given.get("context", given["gpus"])
    number, unit = given.get("tokens", "1M")[:-1], given.get("tokens", "1M")[-1]
    return Workload(
        model=model_of(configs.model(given["model"])),
        cluster=replace(
            _cluster(configs, given["cluster"], **dict(rates)),
            working_set=configs.constant("working_set"),
            hop_seconds=_OF_OTHERS,
        ),
        gpus=given["gpus"],
        tensor=tensor,
        context=context,
        tokens=int(number) * _UNITS[unit],
        config=config,
        chunked_loss=given.get("loss") != "megatron",
        **{"sequences": given["gpus"] // (tensor * context)}
        | {name: given[name] for name in _CHANGES if name in given},
    )


def _cluster(configs: Configs, name: str, **rates: float) -> Cluster:
    """Return a cluster with other code's groups, of which nothing is known."""
    return replace(configs.cluster(name, **rates), nvlinks=0)


def _magi(configs: Configs) -> Iterator[Row]:
    """MagiAttention's: attention alone, a row a pass."""
    magi = configs.published["magi"]
    heads = magi["heads"], magi["kv_heads"], magi["head_dim"]
    for case, way in product(magi["case"], ("forward", "backward")):
        for (name, values), (place, gpus) in product(case[way].items(), enumerate(magi["gpus"])):
            given = configs.published["settings"][magi["settings"][name]]
            place_of = f"magi/{case['cluster']}/{case['mask']}/{gpus}"
            config, causal = config_of(BurstConfig, given), case["mask"] == "causal"
            cluster = replace(_cluster(configs, case["cluster"]), hop_seconds=_OF_OTHERS)
            load = attention_alone(cluster, gpus, case["tokens"], config, heads, causal=causal)
            yield Row(
                id=f"{place_of}/{name}/{way}",
                group=f"{place_of}/{way}",
                table="MagiAttention",
                load=load,
                code="MagiAttention",
                value=values[place],
                unit=f"TFLOP/s {way}",
            )
