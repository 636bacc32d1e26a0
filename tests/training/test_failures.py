"""What ends a training is said once, and nothing that was saved is lost. (fast tier)

Kills, stalls and what torchrun makes of them: training/test_kills.py.
"""

import re
import signal
from pathlib import Path

import pytest

from tests.tier import slow_if
from tests.training.faults import (
    MODULE,
    TRACKER,
    Training,
    check_same_state,
    check_same_steps,
    small_disk,
    steps,
)
from tests.training.launcher import BURST, outcome, run_module

TWO = (*BURST, "--context-parallel-size", "2")


def check_one_report(text: str, *parts: str) -> None:
    """One rank says what happened, in full; the other ends with a line, or before it has one.

    A rank that torchrun has taken the store from cannot know that it is not the first, and says so.
    """
    reports = re.findall(r"megatron_burst: rank \d failed: .*", text)
    reports = [each for each in reports if "the store of the ranks does not answer" not in each]
    assert len(reports) == 1, text[-4000:]
    (report,) = reports
    for part in parts:
        assert re.search(part, report), report


@pytest.mark.parametrize("where", slow_if({"backward"}, ["forward", "backward"]))
def test_a_planted_nan_is_named(tmp_path: Path, data: tuple[str, ...], where: str) -> None:
    flags = (*data, *TWO, "--burst-check", "nan", f"2:1:{where}")
    status, text = outcome("tests.training.planted_nan", tmp_path, 2, *flags)
    assert status != "0"
    tensor = "v" if where == "forward" else "the gradient of the output"
    place = rf"layer 2, rank 1 \(context-parallel rank 1 of 2\), {where}: {tensor} has \d+ NaN"
    check_one_report(text, "rank 1 failed: NonFiniteError: --burst-check nan: " + place)
    assert list(steps(text)) == [1] or not steps(text)  # two micro-batches a step


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path, data: tuple[str, ...]) -> None:
    """Else it is an index error of the embedding, without a name."""
    small = "--make-vocab-size-divisible-by 1 --vocab-size 117 --null-tokenizer-eod-id 116".split()
    status, text = outcome(MODULE, tmp_path, 2, *data, *TWO, *small)
    assert status != "0"
    where = rf"{data[1]}.bin: token \d+ of sequence \d+ is \d+, and the embedding has 117 rows"
    check_one_report(text, f"ValueError: .*{where}")


@pytest.mark.parametrize("saved", slow_if({True}, [False, True]))
def test_a_loss_that_is_nan_is_said(tmp_path: Path, data: tuple[str, ...], saved: bool) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    flags = (
        *data,
        *TWO,
        *(("--save", checkpoint, "--load", checkpoint) if saved else ()),
        "0:1:loss",
    )
    for start in range(2 if saved else 1):  # Megatron does the step again
        status, text = outcome("tests.training.planted_nan", tmp_path / f"{start}", 2, *flags)
        assert status == "16", text[-3000:]
        # The NaN reaches the gradients of both, and rank 0, whose store it is, may end first.
        reports = re.findall(r"burst: rank \d failed: .*", text)
        assert reports, text[-3000:]
        for report in reports:
            assert re.search(r"iteration 3: .*NaN in .* \(nan\)\. Status 16: ", report)
            assert ("without --save" in report) != saved
    assert saved == Path(checkpoint).exists()


def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    with small_disk(tmp_path / "small", megabytes=8) as disk:  # of checkpoints of 3 MB
        flags = (*data, *TWO, "--num-layers", "4")
        saving = ("--save", str(disk), "--save-interval", "1", "--train-iters", "3")
        status, text = outcome(MODULE, tmp_path / "full", 2, *flags, *saving)
        assert status != "0"
        check_one_report(
            text, r"SaveError: the checkpoint of iteration 3 .*/small, where 0 of 8 MiB are free"
        )
        assert (disk / TRACKER).read_text() == "2"
        loading = ("--load", str(disk), "--train-iters", "3")
        resumed = run_module(MODULE, tmp_path / "resumed", 2, *flags, *loading)
    assert check_same_steps(resumed, text) == [3]


@pytest.mark.slow
def test_a_signal_saves_and_ends(tmp_path: Path, data: tuple[str, ...]) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    common = (*data, *TWO, "--train-iters", "100000")
    flags = (*common, "--save", checkpoint, "--load", checkpoint, "--exit-signal-handler")
    training = Training(tmp_path / "stopped", 2, *flags)
    processes = training.processes()
    assert training.wait_until(lambda: training.reaches(3))
    processes[1].send_signal(signal.SIGTERM)  # one rank suffices
    status, text = training.end()
    assert status == 0, text[-3000:]
    last = max(steps(text))
    assert int(Path(checkpoint, TRACKER).read_text()) == last
    assert "exiting program after receiving SIGTERM" in text
    end = ("--exit-interval", str(last + 2))
    resumed = run_module(MODULE, tmp_path / "resumed", 2, *flags, *end)
    saving = ("--save", str(tmp_path / "whole"))
    whole = run_module(MODULE, tmp_path / "log", 2, *common, *end, *saving)
    assert check_same_steps(text, whole) == list(range(1, last + 1))
    assert check_same_steps(resumed, whole) == [last + 1, last + 2]
    folder = f"iter_{last + 2:07d}"
    check_same_state(Path(checkpoint, folder), tmp_path / "whole" / folder)
