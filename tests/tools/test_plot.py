"""Equal pictures are equal files. (fast tier)"""

from pathlib import Path

from matplotlib.figure import Figure
from plot import save  # noqa: E402


def test_a_picture_that_is_written_again_is_the_same_file(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        figure = Figure()
        figure.subplots().plot([1, 2], [3, 4], "o")
        save(figure, tmp_path / name)
    first = (tmp_path / "first.svg").read_text()
    assert first == (tmp_path / "second.svg").read_text()
    assert "dc:date" not in first
