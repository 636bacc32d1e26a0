"""The report: figures out of TensorBoard events, and a verdict that can be bad. (fast tier)"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_burst.tools import report
from megatron_burst.tools.runlog import RunLogError, read_scalars

ENTROPY = 3.0


def write_run(path: Path, losses: Sequence[float], *, first_step: int = 1, sent: int = 0) -> Path:
    with SummaryWriter(str(path)) as writer:
        for step, loss in enumerate(losses, start=first_step):
            writer.add_scalar("lm loss", loss, step)
            writer.add_scalar("iteration-time", 10.0 if step <= 5 else 0.5, step)
            if sent:
                writer.add_scalar("burst/bytes-sent-per-rank", sent, step)
    return path


def falling(last: float = 2.0, factor: float = 1.0) -> list[float]:
    return [factor * (last + 3 * math.exp(-step / 2)) for step in range(30)]


def run_report(tmp_path: Path, runs: dict[str, Sequence[float]], *more: str) -> int:
    tmp_path.mkdir(exist_ok=True)
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps({"unigram_entropy_nats": ENTROPY}))
    arguments = ["--corpus", str(corpus), "--output", str(tmp_path / "out")]
    for number, (name, losses) in enumerate(runs.items()):
        arguments += ["--run", name, str(write_run(tmp_path / str(number), losses))]
    return report.main([*arguments, *more])


def test_a_step_written_twice_has_the_last_value(tmp_path: Path) -> None:
    write_run(tmp_path, [5.0, 4.0, 3.0])
    write_run(tmp_path, [3.5, 2.5], first_step=2)
    assert read_scalars(tmp_path)["lm loss"] == [(1, 5.0), (2, 3.5), (3, 2.5)]


def test_more_steps_than_tensorboard_samples_are_all_read(tmp_path: Path) -> None:
    write_run(tmp_path, [1.0] * 1200)
    assert len(read_scalars(tmp_path)["lm loss"]) == 1200


def test_a_directory_without_events_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="no TensorBoard events"):
        read_scalars(tmp_path)
    with pytest.raises(RunLogError, match="no TensorBoard events"):
        read_scalars(tmp_path / "absent")


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    scalars = read_scalars(write_run(tmp_path, [float(loss) for loss in range(30, 0, -1)], sent=77))
    run = report.summarize("one", scalars, tokens_per_step=1000)
    assert (run.steps, run.first_loss, run.last_loss) == (30, 30.0, 1.0)
    assert run.mean_last_losses == 5.5
    assert (run.seconds_per_step, run.tokens_per_second) == (0.5, 2000.0)
    assert run.bytes_sent_per_rank_per_step == 77


def test_equal_runs_that_learn_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"CP=4": falling(factor=1 + 2e-6), "CP=1": falling()}
    assert run_report(tmp_path, runs, "--tokens-per-step", "1000") == 0
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert content["largest_difference"]["relative"] == pytest.approx(2e-6, rel=0.2)
    assert content["faults"] == []
    assert [run["name"] for run in content["runs"]] == ["CP=4", "CP=1"]
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "2,000" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [1.01, math.nan, math.inf])
def test_one_differing_step_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: float
) -> None:
    losses = falling()
    losses[7] *= bad
    assert run_report(tmp_path, {"CP=4": losses, "CP=1": falling()}) == 1
    assert "at step 8; --tolerance is 1e-04" in capsys.readouterr().err
    if math.isfinite(bad):
        assert run_report(tmp_path / "b", {"a": losses, "b": falling()}, "--tolerance", ".1") == 0


def test_a_run_that_did_not_learn_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_report(tmp_path, {"CP=1": falling(last=2.6)}) == 1
    assert "not 2.500 or less" in capsys.readouterr().err
    assert run_report(tmp_path / "b", {"CP=1": falling(last=2.6)}, "--no-entropy-check") == 0
    assert run_report(tmp_path / "c", {"CP=1": [*falling(), math.nan]}) == 1


def test_runs_of_different_length_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_report(tmp_path, {"CP=4": falling()[:-1], "CP=1": falling()}) == 1
    assert "'CP=4' logged 29 steps, 'CP=1' logged 30" in capsys.readouterr().err
