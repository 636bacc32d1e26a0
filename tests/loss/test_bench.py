"""The benchmark of the loss and its picture, on sizes that say nothing but run. (fast tier)"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import loss  # noqa: E402

plot = pytest.importorskip("plot", reason="pictures need matplotlib", exc_type=ImportError)


def test_loss_writes_a_page_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, figure = tmp_path / "page.md", tmp_path / "figure.svg"
    command = "loss --shapes 32x512x16 --repetitions 1 --tokens 1024 2048 --hidden 64 --memory-mb 8"
    files = ["--vocabularies", "1024", "--output", str(page)]
    monkeypatch.setattr(sys, "argv", [*command.split(), *files])
    loss.main()
    plot.draw(page.with_suffix(".csv"), figure)
    text = page.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    timed = {row[1]: row for row in rows if row[0] == "32 x 512 x 16"}
    assert list(timed) == ["all logits", "in chunks"]
    assert [timed[name][4] for name in timed] == ["", "1.4"]
    counted = {row[1]: [int(cell) for cell in row[2:]] for row in rows if row[0] == "1024"}
    assert 1.9 < counted["all logits"][1] / counted["all logits"][0] < 2.1
    assert max(counted["chunked, 8 MiB"]) <= 8
    assert "chunked, 8 MiB, vocabulary 1k" in figure.read_text()
    assert "python scripts/bench/loss.py --shapes 32x512x16" in figure.read_text()


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loss.flags(["--repetitions", "0"])
    assert "all numbers must be positive" in capsys.readouterr().err
