"""The figure of the plans: it shows all of the mask and nothing twice, and it is a file. (fast)"""

import re
import sys
from itertools import batched
from pathlib import Path

import pytest

from megatron_burst.config import GradientReturn
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.mask import Band, Mask
from megatron_burst.plans.plan import Channel, Send
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "docs"))
import plan_figure  # noqa: E402

DOCS = ROOT / "docs"


def make_ring(nodes: int, length: int, **options: object) -> Ring:
    ranks = nodes * length
    grid = Grid(tuple(batched(range(ranks), length)))
    return Ring(Tiling(zigzag(4 * ranks, ranks), Mask.causal()), grid, **options)


def words(svg: str) -> list[str]:
    return sorted(re.findall(r">([^<>]+)</text>", svg))


@pytest.mark.parametrize(("nodes", "length"), [(1, 2), (1, 3), (2, 2), (1, 8)])
@pytest.mark.parametrize("make", [Ring.forward, Ring.backward])
def test_the_pieces_of_all_ranks_are_the_mask_once(nodes: int, length: int, make) -> None:
    ring = make_ring(nodes, length)
    layout = zigzag(4 * nodes * length, nodes * length)
    drawn = [
        (i, j)
        for rank in range(layout.ranks)
        for tile in make(ring, rank).tiles
        for piece in plan_figure.pieces(layout, tile)
        for i in range(*piece.query)
        for j in range(*piece.key)
        if piece.band == Band.FULL or j - piece.key.start <= i - piece.query.start
    ]
    tokens = range(layout.ranks * layout.local_tokens)
    visible = [(i, j) for i in tokens for j in tokens if j <= i]
    assert sorted(drawn) == visible


@pytest.mark.parametrize(("nodes", "length"), [(1, 4), (2, 2), (2, 3), (3, 2)])
def test_a_block_comes_where_it_is_used_and_a_gradient_from_where_it_was_made(
    nodes: int, length: int
) -> None:
    ring = make_ring(nodes, length, gradient_return=GradientReturn.HOME)
    plans = [ring.backward(rank) for rank in range(nodes * length)]

    def computes(rank: int, column: int, owner: int) -> bool:
        tiles = plans[rank].steps[column].tiles
        return owner in {tile.key_owner for tile in tiles}

    for plan in plans:
        for number, step in enumerate(plan.steps):
            for send in step.sends:
                first, last = plan_figure.columns(number, send)
                if not send.item.kind.is_gradient:
                    assert computes(send.peer, last, send.item.owner)
                elif send.channel is Channel.GRADIENT_WITHIN:  # else a sum that has come together
                    assert computes(plan.rank, first, send.item.owner)


def test_a_message_between_nodes_takes_as_many_columns_as_a_pass_has_steps() -> None:
    for number, step in enumerate(make_ring(2, 3).forward(0).steps):
        for send in step.sends:
            first, last = plan_figure.columns(number, send)
            assert last - first == (3 if send.channel is Channel.READ_BETWEEN else 1)


def test_every_message_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Send] = []
    line = plan_figure._Panel._line

    def count(self, send: Send, points, arrow: str = "-|>") -> None:
        drawn.extend([send] * (arrow != "-"))  # not the first half of one that goes around
        line(self, send, points, arrow)

    monkeypatch.setattr(plan_figure._Panel, "_line", count)
    plan_figure.main(["--nodes", "2", "--ranks-per-node", "3", "--output", str(tmp_path / "a.svg")])
    ring = make_ring(2, 3, gradient_return=GradientReturn.HOME)
    plans = [make(rank) for make in (ring.forward, ring.backward) for rank in range(6)]
    assert sorted(drawn) == sorted(send for plan in plans for send in plan.sends)


def test_the_svg_holds_its_words_as_text(tmp_path: Path) -> None:
    output = tmp_path / "new" / "plan.svg"
    plan_figure.main(["--ranks-per-node", "3", "--output", str(output)])
    found = words(output.read_text())
    assert {"rank 2", "step 3", "keys of rank 1", "own keys", "dK and dV whole"} <= set(found)
    assert "Forward: K and V circulate" in found
    returned = "dK and dV are returned to their owner"
    assert f"Backward: K and V circulate, {returned}" in found
    assert not {"rank 3", "step 4", "node 0", "between nodes"} & set(found)


def test_nodes_are_in_the_figure(tmp_path: Path) -> None:
    output = tmp_path / "double.svg"
    plan_figure.main(["--nodes", "2", "--ranks-per-node", "2", "--output", str(output)])
    found = words(output.read_text())
    assert {"node 0", "node 1", "between nodes", "own keys", "step 4"} <= set(found)
    assert "4 ranks, double ring of 2 nodes x 2 ranks, zigzag" in found


def test_equal_plans_make_equal_files(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.svg" for name in "abc"]
    for file, ranks in zip(files, "223", strict=True):
        plan_figure.main(["--ranks-per-node", ranks, "--output", str(file)])
    first, second, other = (file.read_bytes() for file in files)
    assert first == second != other


@pytest.mark.parametrize(
    ("name", "options"), [("plan.svg", ""), ("plan-double.svg", "--nodes 2 --ranks-per-node 2")]
)
def test_the_figures_of_the_documentation_are_up_to_date(
    tmp_path: Path, name: str, options: str
) -> None:
    plan_figure.main([*options.split(), "--output", str(tmp_path / name)])
    assert words((tmp_path / name).read_text()) == words((DOCS / name).read_text())


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ("--ranks-per-node 1", "plan.svg", "--nodes 1 x --ranks-per-node 1: between 2 and 8 ranks"),
        ("--nodes 3 --ranks-per-node 3", "plan.svg", "between 2 and 8 ranks"),
        ("--nodes -2 --ranks-per-node -2", "plan.svg", "between 2 and 8 ranks"),
        ("--nodes 0", "plan.svg", "between 2 and 8 ranks"),
        ("--ranks-per-node 4", "plan.bmp", "must end in .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, name: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan_figure.main([*options.split(), "--output", str(tmp_path / name)])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
