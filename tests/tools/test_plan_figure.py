"""The figure of the plans: it shows all of the mask and nothing twice, and it is a file. (fast)"""

from pathlib import Path

import pytest

from megatron_burst.layout import zigzag
from megatron_burst.mask import Mask, Relation
from megatron_burst.plan import flat_kv_backward, flat_ring_forward
from megatron_burst.tools import plan_figure


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.full()], ids=["causal", "full"])
@pytest.mark.parametrize("planned", [flat_ring_forward, flat_kv_backward])
def test_the_pieces_of_all_ranks_are_the_mask_once(ranks: int, mask: Mask, planned) -> None:
    layout = zigzag(6 * ranks, ranks)
    drawn = [
        (i, j)
        for rank in range(ranks)
        for tile in planned(layout, mask, rank).tiles
        for piece in plan_figure.pieces(layout, tile)
        for i in range(*piece.query)
        for j in range(*piece.key)
        if piece.relation is Relation.FULL or j <= i
    ]
    tokens = range(6 * ranks)
    visible = [(i, j) for i in tokens for j in tokens if j <= i or not mask.is_causal]
    assert sorted(drawn) == visible


def test_the_svg_holds_its_words_as_text(tmp_path: Path) -> None:
    output = tmp_path / "new" / "plan.svg"
    plan_figure.main(["--ranks", "3", "--output", str(output)])
    svg = output.read_text()
    for words in ("Forward", "Backward", "rank 2", "step 3", "keys of rank 1", "dK, dV of"):
        assert f">{words}<" in svg
    assert ">rank 3<" not in svg and ">step 4<" not in svg


def test_equal_plans_make_equal_files_and_a_mask_another(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.svg" for name in "abc"]
    for file, mask in zip(files, ("causal", "causal", "full"), strict=True):
        plan_figure.main(["--ranks", "2", "--mask", mask, "--output", str(file)])
    first, second, full = (file.read_bytes() for file in files)
    assert first == second != full


@pytest.mark.parametrize(
    ("ranks", "name", "message"),
    [
        ("1", "plan.svg", "--ranks 1: between 2 and 8"),
        ("9", "plan.svg", "--ranks 9: between 2 and 8"),
        ("4", "plan.bmp", "must end in .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: str, name: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan_figure.main(["--ranks", ranks, "--output", str(tmp_path / name)])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
