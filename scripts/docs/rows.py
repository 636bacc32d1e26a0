"""What was published, as rows with a step of training that the planner can predict."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from megatron_burst.config import (
    Algorithm,
    BurstConfig,
    GradDtype,
    GradientReturn,
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
_CHUNK = 2**13  # the tokens that a longest sequence is a multiple of, on every rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A published speed, and maybe memory."""

    id: str
    group: str
    table: str
    load: Workload
    code: str  # whose, where it is not BurstEngine's
    value: float
    unit: str
    gib: float | None = None
    mfu_published: float | None = None  # per cent

    @property
    def mfu(self) -> float | None:
        """What follows from the tokens a second, as a share; None for attention alone."""
        if self.unit != "tokens/s/GPU":
            return None
        return self.value * step.model_flops(self.load) / self.load.tokens / self.load.cluster.peak

    def predicted(self, constants: dict[str, float]) -> float:
        """Return what is predicted of `value`."""
        other = constants["other_code"] if self.code and self.table == "BurstEngine" else 1.0
        if self.unit == "tokens/s/GPU":
            return step.predict(self.load).tokens_per_gpu * other
        if self.unit == "% MFU":
            return 100 * step.predict(self.load).mfu
        if self.unit == "M tokens":
            return _longest(self.load) / 1e6
        forward, _, backward = timing.attention_passes(self.load)
        one = {"TFLOP/s forward": ([forward], 1), "TFLOP/s backward": ([backward], 2.5)}
        passes, times = one.get(self.unit, ([forward, backward], 3.5))
        return times * _forward_flops(self.load) / sum(p.seconds for p in passes) / 1e12

    @property
    def predicted_gib(self) -> float:
        """The memory that is predicted."""
        return memory.predict(self.load).total / memory.GIB


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
    """Return all published rows, with the clusters as the constants of `configs` have them."""
    return [*_rows(configs)]


def row_of(configs: Configs, name: str) -> Row:
    """Return one of them."""
    return next(row for row in _rows(configs) if row.id == name)


def _rows(configs: Configs) -> Iterator[Row]:
    return chain(_burst(configs), _magi(configs), _steps(configs), _longest_rows(configs))


def _forward_flops(load: Workload) -> float:
    """Of one layer on one GPU: the area of the mask, without the diagonal's half."""
    pairs, model = load.tokens**2, load.model
    area = pairs // 2 if load.causal else pairs
    flops = attention_flops(area, model.heads, model.head_dim, model.value_head_dim)
    return flops / load.gpus


def _longest(load: Workload) -> int:
    """Return how many tokens of a sequence fit."""
    least, most, usable = 1, 2**13, memory.usable(load.cluster)
    while most - least > 1:
        tokens = (least + most) // 2
        longer = replace(load, tokens=tokens * _CHUNK * load.context)
        found = memory.predict(longer).total <= usable
        least, most = (tokens, most) if found else (least, tokens)
    return least * _CHUNK * load.context


def _groups(configs: Configs, name: str) -> Iterator[tuple[str, Table]]:
    for group in configs.published[name]:
        for row in group["rows"]:
            own = {**group, **row, "table": group["id"]}  # it says what is its own
            yield f"{group['id']}/{row['id']}", own


def _burst(configs: Configs) -> Iterator[Row]:
    """BurstEngine's: context parallelism over all GPUs, ZeRO-3, bfloat16 gradients."""
    for name, table in _groups(configs, "group"):
        load = Workload(
            model=model_of(configs.model(table["model"])),
            cluster=configs.cluster("a800"),
            gpus=table["gpus"],
            tensor=1,
            context=table["gpus"],
            tokens=_tokens(table),
            config=_setting(configs, table),
            window=table.get("window"),
            chunked_loss=table.get("loss") != "megatron",
            zero3=True,
            gradient_bytes=2,
            offload=table.get("offload", False),
        )
        speed = table["tgs"] if "tgs" in table else table["tflops"]
        yield Row(
            id=name,
            group=name.rpartition("/")[0],
            table="BurstEngine",
            load=load,
            code=table.get("code", ""),
            value=speed,
            unit="tokens/s/GPU" if "tgs" in table else "TFLOP/s",
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


def _magi(configs: Configs) -> Iterator[Row]:
    """MagiAttention's: attention alone, a row a pass."""
    magi = configs.published["magi"]
    heads = magi["heads"], magi["kv_heads"], magi["head_dim"]
    for case, way in product(magi["case"], ("forward", "backward")):
        for (name, values), (place, gpus) in product(case[way].items(), enumerate(magi["gpus"])):
            given = configs.published["settings"][magi["settings"][name]]
            place_of = f"magi/{case['cluster']}/{case['mask']}/{gpus}"
            config, causal = config_of(BurstConfig, given), case["mask"] == "causal"
            cluster = configs.cluster(case["cluster"])
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


def _steps(configs: Configs) -> Iterator[Row]:
    for name, table in _groups(configs, "steps"):
        load = _step(configs, table, _tokens(table))
        mfu = "mfu" in table
        yield Row(
            id=name,
            group=table["table"],
            table=table["table"],
            load=load,
            code=table["table"],
            value=table["mfu" if mfu else "tgs"],
            unit="% MFU" if mfu else "tokens/s/GPU",
            gib=table.get("gib"),
        )


def _longest_rows(configs: Configs) -> Iterator[Row]:
    for name, table in _groups(configs, "longest"):
        load = _step(configs, {**table, "context": table["gpus"]}, 2**20)
        yield Row(
            id=name,
            group=table["table"],
            table=table["table"],
            load=load,
            code=table["table"],
            value=table["millions"],
            unit="M tokens",
        )


def _step(configs: Configs, table: Table, tokens: int) -> Workload:
    """A step of other code: every data-parallel rank has one sequence."""
    cluster = configs.cluster(table["cluster"])
    if kernels := table.get("kernels"):
        forward, backward = kernels
        cluster = replace(cluster, forward_rate=1e12 * forward, backward_rate=1e12 * backward)
    given = config_of(BurstConfig, configs.published["settings"][table["setting"]])
    ranks = table.get("tensor", 1) * table["context"]
    names = ("zero3", "offload", "offload_inputs", "mlp_chunks", "fp8", "recompute")
    more: dict[str, Any] = {name: table[name] for name in names if name in table}
    return Workload(
        model=model_of(configs.model(table["model"])),
        cluster=cluster,
        gpus=table["gpus"],
        tensor=table.get("tensor", 1),
        context=table["context"],
        tokens=tokens,
        sequences=table["gpus"] // ranks,
        config=replace(given, recompute_fraction=table.get("fraction")),
        **more,
    )


def _tokens(table: Table) -> int:
    return int(table["tokens"][:-1]) * _UNITS[table["tokens"][-1]]
