"""Says which schedule of attention is the fastest where, on the planner's clock.

python scripts/docs/schedules.py

Writes the table of some situations in docs/schedules.md, the .csv of all and the .svg beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure
from pages import fill, parser, table, write_csv
from plot import save
from rows import attention_alone

from megatron_burst.config import Backward, BurstConfig, Topology
from megatron_burst.plans.choice.planning import TIMED
from megatron_burst.tools.plan import timing
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.workload import Workload

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
# As training's clock has them, at the rates of the links: without NCCL's channels.
A800, H100 = (replace(Configs.read().cluster(name), nvlinks=0) for name in ("a800", "h100"))
CLUSTERS = {
    "A800, 200 Gbit/s a pair": A800,
    "H100, 400 Gbit/s": H100,
    "H100, 25 Gbit/s": replace(H100, nic_rate=H100.nic_rate / 16),
}
GPUS, KV_HEADS, TOKENS = (64, 256, 1024), (32, 4), (1024, 4096, 16384, 65536)
SHOWN_TOKENS, SHOWN_GPUS = TOKENS[1], (GPUS[0], GPUS[-1])
HEADS, HEAD_DIM = 32, 128
FORCED = {Topology.FLAT: "#d1620a", Topology.DOUBLE: "#26803a", Topology.MESH: "#1667ad"}
BACKWARDS = Backward.KV, Backward.QUERY
SHOWN = ("cluster", "gpus", "kv_heads", "kernels", *FORCED, "auto")
type Row = Mapping[str, str]


def row(cluster: str, gpus: int, kv_heads: int, tokens: int) -> Row:
    """One situation with the milliseconds of all settings, as the CSV has it."""
    heads = HEADS, kv_heads, HEAD_DIM
    load = attention_alone(CLUSTERS[cluster], gpus, tokens, BurstConfig(), heads)
    kernels, auto = milliseconds(load)
    times = {name: forced(load, config) for name, config in settings().items()}
    best = min(time for name, time in times.items() if time and name not in FORCED)
    chosen, _ = timing.chosen(load.ring)
    return {
        "cluster": cluster,
        "gpus": f"{gpus}",
        "kv_heads": f"{kv_heads}",
        "tokens": f"{tokens}",
        "kernels": digits(kernels),
        **{setting: digits(each) if each else "" for setting, each in times.items()},
        "auto": digits(auto),
        "auto_over_best": f"{auto / best:.4f}",
        "auto_forward": chosen.forward[0].schedule.name,
        "auto_backward": chosen.backward[0].schedule.name,
    }


def settings() -> dict[str, BurstConfig]:
    """Each topology, then with each backward."""
    usual = {str(way): BurstConfig(topology=way) for way in FORCED}
    return usual | {
        f"{way} {kind}": BurstConfig(topology=way, backward=kind)
        for way, kind in product(FORCED, BACKWARDS)
    }


def forced(load: Workload, config: BurstConfig) -> float | None:
    """The milliseconds of a setting; None where no mesh fits the memory."""
    try:
        return milliseconds(replace(load, config=config))[1]
    except ValueError:
        return None


def milliseconds(load: Workload) -> tuple[float, float]:
    """Of a forward and a backward: of the kernels alone, and of everything."""
    forward, _, backward = timing.attention_passes(load)
    return 1e3 * (forward.kernels + backward.kernels), 1e3 * (forward.seconds + backward.seconds)


def digits(number: float) -> str:
    """Five of them, without an exponent."""
    return f"{float(f'{number:.5g}'):.9g}"


def fastest(one: Row) -> tuple[Topology, float]:
    """The fastest topology, and its time over the next best's."""
    times = sorted((float(one[way]), way) for way in FORCED if one[way])
    return times[0][1], times[0][0] / times[1][0]


def parts(rows: Sequence[Row]) -> dict[str, str]:
    """What the page has of them."""
    shown = [each for each in rows if int(each["tokens"]) == SHOWN_TOKENS]
    shown = [each for each in shown if int(each["gpus"]) in SHOWN_GPUS]
    large = [each for each in rows if int(each["gpus"]) > TIMED]
    cells = table(SHOWN, ([each[name] for name in SHOWN] for each in shown))
    usual, of_large = slower(each for each in rows if each not in large), slower(large)
    words = (
        f"Milliseconds of {SHOWN_TOKENS} tokens a rank. With up to {TIMED} GPUs `auto` is at most "
        f"{usual} slower than the best forced setting, with {GPUS[-1]}, reckoned from a quarter, "
        f"{of_large}."
    )
    return {"table": f"{words}\n\n{cells}"}


def slower(rows: Iterable[Row]) -> str:
    """By how much `auto` takes longer than the best forced setting, at most."""
    return f"{max(float(each['auto_over_best']) for each in rows) - 1:.1%}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """A map for each cluster and share of heads: the deeper a colour, the more is won."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    maps = figure.subplots(len(KV_HEADS), len(CLUSTERS), sharex=True, sharey=True)
    for each in rows:
        sizes = [int(each[name]) for name in ("kv_heads", "tokens", "gpus")]
        line, x, y = (of.index(n) for of, n in zip((KV_HEADS, TOKENS, GPUS), sizes, strict=True))
        axes, (way, share) = maps[line, [*CLUSTERS].index(each["cluster"])], fastest(each)
        depth = 0.15 + 0.85 * min(1, 2 * (1 - share))
        axes.bar(x, 1, 0.97, y - 0.5, color=FORCED[way], alpha=depth)
        color = "white" if depth > 0.6 else "black"
        axes.text(x, y, f"{way}\n{share:.2f}", color=color, ha="center", va="center", fontsize=8)
        axes.set_title(f"{each['cluster']}, {HEADS}:{sizes[0]} heads", fontsize=9)
        axes.set_xticks(range(len(TOKENS)), [f"{n // 1024}k" for n in TOKENS])
        axes.set_yticks(range(len(GPUS)), GPUS)
    figure.suptitle("The fastest schedule, and its time over the next best's", fontsize=10)
    figure.supxlabel("tokens a rank", fontsize=9)
    figure.supylabel("GPUs", fontsize=9)
    save(figure, path)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    # Clusters last, because they have their plans in common.
    every = product(GPUS, KV_HEADS, TOKENS, CLUSTERS)
    situations = [row(cluster, *sizes) for *sizes, cluster in every]
    write_csv(PAGE, situations)
    fill(PAGE, parts(situations))
    draw(situations, PAGE.with_suffix(".svg"))
