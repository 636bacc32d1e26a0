"""Who reports a failure, in which words and with which status. (fast tier)"""

import runpy
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron_burst.transport import failure


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch, store: dist.TCPStore) -> None:
    """Two ranks of torchrun, of which this is the second."""
    settings = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    settings |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.unraisablehook", None)
    monkeypatch.setattr(failure, "_STORE_SECONDS", 1)


def fail(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as leaving, failure.reported():
        raise error
    return leaving.value.code, capsys.readouterr().err


def test_the_first_rank_reports_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = fail(ValueError("two\nlines"), capsys)
    assert status == 1
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("megatron_burst: rank 1 failed: ValueError: two\nlines\n")


@pytest.mark.parametrize("error", [RuntimeError("connection\nclosed"), SystemExit("connection")])
def test_a_later_rank_ends_with_a_line(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    fail(ValueError("cause"), capsys)
    monkeypatch.setenv("RANK", "1")
    status, text = fail(error, capsys)
    assert status == 1
    assert text.startswith("megatron_burst: rank 1 ends, rank 0 failed: ")
    assert "connection" in text and text.count("\n") == 1


def test_a_restarted_job_has_a_first_rank_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    fail(ValueError("cause"), capsys)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("RANK", "1")
    assert "rank 1 failed: ValueError: again" in fail(ValueError("again"), capsys)[1]


def test_without_the_store_a_rank_reports_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the one that knows why."""
    monkeypatch.setenv("MASTER_PORT", "1")
    text = fail(ValueError("cause"), capsys)[1]
    assert text.startswith("Traceback (most recent call last):\n")
    assert "rank 1 failed: ValueError: cause (the store of the ranks does not answer: " in text
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # and no process group
    assert text != fail(ValueError("cause"), capsys)[1]


def test_an_assertion_without_a_text_says_what_it_asserted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "arguments.py"
    script.write_text("\nassert (\n    1\n    > 2)\n")
    with pytest.raises(SystemExit), failure.reported():
        runpy.run_path(str(script))
    assert f"failed: AssertionError: assert ( 1 > 2) ({script}:2)\n" in capsys.readouterr().err


def test_a_status_with_a_reason_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = fail(SystemExit(failure.Status(16, "the loss is NaN")), capsys)
    assert (status, text) == (16, "megatron_burst: rank 1 failed: the loss is NaN\n")


def test_before_there_is_a_store_one_rank_of_a_node_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    texts = {}
    for attempt, rank in ((0, 1), (0, 0), (1, 0)):
        folder = tmp_path / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        monkeypatch.setenv("RANK", str(rank))
        texts[attempt, rank] = fail(ValueError("cause"), capsys)[1]
    assert texts[0, 1].endswith("megatron_burst: rank 1 failed: ValueError: cause\n")
    assert texts[0, 0] == "megatron_burst: rank 0 ends, rank 1 failed: ValueError: cause\n"
    assert texts[1, 0].endswith("megatron_burst: rank 0 failed: ValueError: cause\n")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/nowhere/0/error.json")
    assert "rank 0 failed: ValueError: cause (" in fail(ValueError("cause"), capsys)[1]


def test_a_status_that_is_given_stays_and_a_hidden_error_has_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for status in (0, 2):
        with pytest.raises(SystemExit) as leaving, failure.reported():
            raise SystemExit(status)
        assert leaving.value.code == status
    assert not capsys.readouterr().err
    # Megatron gives up so after printing an error; Python would make it a success.
    status, text = fail(SystemExit(), capsys)
    assert status == 1 and "rank 1 failed: Megatron ended the run; its error stands above" in text
    assert fail(CheckpointException("full", {}), capsys)[0] == 1  # which is no Exception
    with pytest.raises(KeyboardInterrupt), failure.reported():
        raise KeyboardInterrupt


def test_a_conversion_of_a_checkpoint_that_succeeds_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt", "--ckpt-convert-format", "torch_dist"])
    assert fail(SystemExit(), capsys) == (None, "")
    assert fail(SystemExit("wrong"), capsys)[0] == 1


def test_a_message_for_the_user_needs_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    text = fail(SystemExit("megatron_burst: wrong flag"), capsys)[1]
    assert text == "megatron_burst: rank 1 failed: wrong flag\n"
