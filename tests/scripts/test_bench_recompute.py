"""The benchmark of kept attention results, on sizes that say nothing but run. (fast tier)"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import recompute  # noqa: E402

plot = pytest.importorskip("plot", reason="pictures need matplotlib", exc_type=ImportError)

from tests.scripts.test_bench import numbers  # noqa: E402


def test_recompute_stores_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, figure = tmp_path / "page.md", tmp_path / "figure.svg"
    command = "recompute --layers 2 --tokens 256 --hidden 32 --repetitions 1 --output"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(output)])
    recompute.main()
    plot.draw(output.with_suffix(".csv"), figure)
    page = output.read_text()
    assert numbers(page, "none") and "no recompute" in figure.read_text()
    bench = recompute.Bench(recompute.flags("--layers 2 --tokens 256 --hidden 32".split()))
    _, predicted, _ = recompute.measure(bench)
    for fraction, point in predicted.items():
        assert len(numbers(page, f"ρ = {fraction:g}")) == 1
        assert bench.stored(fraction) == pytest.approx(point.stored, abs=16)  # and the loss
    assert bench.stored(None) > predicted[0.0].stored


def test_recomputed_steps_have_the_gradients_of_others() -> None:
    bench = recompute.Bench(recompute.flags("--layers 2 --tokens 64 --hidden 32".split()))
    weight = bench.layers[0].qkv.weight
    found = []
    for fraction in (None, 0.5, 1.0):
        bench.forward(fraction).backward()
        found.append(weight.grad)
        weight.grad = None
    assert all((one - found[0]).norm() < 1e-6 * found[0].norm() for one in found)
