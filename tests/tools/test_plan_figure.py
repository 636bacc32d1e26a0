"""The figure of the plans: it shows all of the mask and nothing twice, and every message. (fast)"""

import re
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plan_figure() -> Any:
    """Imported when it is needed: matplotlib takes its time."""
    return pytest.importorskip(
        "plan_figure", reason="pictures need matplotlib", exc_type=ImportError
    )


def make_ring(nodes: int, length: int) -> Ring:
    ranks = nodes * length
    grid = Grid(tuple(batched(range(ranks), length)))
    tiling = Tiling(zigzag(4 * ranks, ranks), Mask.causal())
    return Ring(tiling, grid, chained=False)


def words(svg: str) -> list[str]:
    return sorted(re.findall(r">([^<>]+)</text>", svg))


@pytest.mark.parametrize(("nodes", "length"), [(1, 2), (1, 3), (2, 2), (1, 8)])
@pytest.mark.parametrize("make", [Ring.forward, Ring.backward])
def test_the_cells_of_all_ranks_are_the_mask_once(
    plan_figure: Any, nodes: int, length: int, make
) -> None:
    ring, layout = make_ring(nodes, length), zigzag(4 * nodes * length, nodes * length)
    computed = sum(
        (plan_figure.scores(layout, rank, step.blocks) >= 3).astype(int)
        for rank in range(layout.ranks)
        for step in make(ring, rank).steps
    )
    assert (computed == np.tril(np.ones_like(computed))).all()


@pytest.mark.parametrize(("name", "nodes"), [("docs/plan.svg", 1), ("docs/plan-double.svg", 2)])
def test_the_figures_of_the_documentation_are_up_to_date(
    plan_figure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nodes: int
) -> None:
    drawn: list[str] = []
    arrow = plan_figure.arrow

    def count(axes, points, color: str, *style: bool) -> None:
        drawn.append(color)
        arrow(axes, points, color, *style)

    monkeypatch.setattr(plan_figure, "arrow", count)
    plan_figure.draw(nodes, tmp_path / "plan.svg")
    found = words((tmp_path / "plan.svg").read_text())
    assert plan_figure.NODES[name] == nodes
    assert found == words((ROOT / name).read_text())
    assert {"rank 3", "step 3", "keys of rank 1", "own keys", "dK and dV whole"} <= set(found)
    assert ({"node 1", "between nodes"} <= set(found)) == (nodes > 1)
    ring = make_ring(nodes, 4 // nodes)
    plans = [make(rank) for make in (ring.forward, ring.backward) for rank in range(4)]
    messages = [plan_figure.COLORS[send.item.owner] for plan in plans for send in plan.sends]
    assert sorted(messages) == sorted(color for color in drawn if color != plan_figure.GREY)
