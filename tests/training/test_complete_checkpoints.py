"""A checkpoint that is incomplete is never loaded, whatever of it is missing. (fast tier)"""

import functools
import logging
import queue
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

checkpointing = pytest.importorskip("megatron.training.checkpointing")
import megatron.training.training as training  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402

from megatron_burst.plugin.files.complete_checkpoints import (  # noqa: E402
    CompleteOnly,
    NoCompleteCheckpointError,
    attach,
    note_replaced,
    what_is_missing,
)
from tests.tier import slow_if  # noqa: E402
from tests.training.faults import MODULE, TRACKER, check_same_steps  # noqa: E402
from tests.training.launcher import BURST, run_module  # noqa: E402

FORMATS = ("torch_dist", "torch")
found_missing = what_is_missing.__wrapped__  # without its memory
TWO = (*BURST, "--context-parallel-size", "2")


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, data: tuple[str, ...]
) -> Callable[[str], tuple[Path, str]]:
    """Of a format the checkpoints of iterations 2 and 4, and the log of the training."""

    @functools.cache
    def make(name: str) -> tuple[Path, str]:
        directory = tmp_path_factory.mktemp(name)
        flags = ("--train-iters", "4", "--save-interval", "2", "--ckpt-format", name)
        saving = ("--save", str(directory / "checkpoint"))
        text = run_module(MODULE, directory, 2, *data, *TWO, *flags, *saving)
        return directory / "checkpoint", text

    return make


@pytest.fixture
def copied(saved: Callable[[str], tuple[Path, str]], tmp_path: Path) -> Any:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved(name)[0], tmp_path / f"copy_{name}"))

    return copy


def settings(directory: Path, name: str = "torch_dist", **changes: Any) -> Namespace:
    found = {"load": str(directory), "ckpt_step": None, "ckpt_format": name, "save": None}
    return Namespace(**found | {"auto_detect_ckpt_format": False, "async_save": False} | changes)


def reader(directory: Path, **changes: Any) -> CompleteOnly:
    what_is_missing.cache_clear()
    return CompleteOnly(settings(directory, **changes), lambda _: pytest.fail("not asked"))


def cuts(file: Path) -> Iterator[bytes | None]:
    """Stages in which a writer may leave a file: not there, empty, a part of it."""
    whole = file.read_bytes()
    yield None
    for part in (0.0, 0.01, 0.5, 0.9):
        yield whole[: int(part * len(whole))]
    yield whole[:-1]


@pytest.mark.parametrize("name", slow_if({"torch"}, FORMATS))
def test_whatever_is_cut_off_is_noticed(copied: Any, name: str) -> None:
    folder = copied(name) / "iter_0000004"
    marked = name == "torch_dist"
    assert found_missing(folder, marked) is None
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "metadata.json"]
    assert len(files) == (3 if marked else 1)  # two ranks' tensors and what names them
    for file in files:
        whole = file.read_bytes()
        for left in cuts(file):
            file.unlink(missing_ok=True)
            if left is not None:
                file.write_bytes(left)
            assert found_missing(folder, marked), (file, left and len(left))
        file.write_bytes(whole)
        assert found_missing(folder, marked) is None
    if marked:
        (folder / "metadata.json").unlink()
        assert found_missing(folder, True) and found_missing(folder, False) is None


@pytest.mark.parametrize("name", slow_if({"torch"}, FORMATS))
def test_a_checkpoint_that_is_replaced_is_not_whole_before_all_of_it_is_written(
    copied: Any, name: str
) -> None:
    folder = copied(name) / "iter_0000004"
    before = contents(folder)
    note_replaced(folder)
    assert contents(folder) == before  # nothing is deleted or added
    marks = [".metadata", "metadata.json"]
    if name == "torch":
        other = folder / "mp_rank_01" / "model_optim_rng.pt"
        other.parent.mkdir()
        shutil.copy(folder / "mp_rank_00" / "model_optim_rng.pt", other)
        note_replaced(folder)  # again, after it was truncated
        marks = [f"mp_rank_0{rank}/model_optim_rng.pt" for rank in (0, 1)]
    for mark in marks:
        missing = found_missing(folder, name == "torch_dist")
        assert missing == f"{mark} is still that of an earlier save"
        (folder / mark).write_bytes((folder / mark).read_bytes())
    assert found_missing(folder, name == "torch_dist") is None
    note_replaced(folder.parent / "iter_0000006")  # nothing to do
    assert not list(folder.parent.glob("*0000006*"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what `attach` replaces."""
    for module, name in (
        (filesystem_async, "get_write_results_queue"),
        (checkpointing, "read_metadata"),
        (training, "save_checkpoint"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))


def test_the_metadata_are_read_once_until_it_is_saved_anew(
    copied: Any, restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron asks twice in a load and once more with --use-checkpoint-args, and parses twice."""
    directory = copied("torch_dist")
    reads: list[Path] = []
    read = FileSystemReader.read_metadata
    monkeypatch.setattr(
        FileSystemReader, "read_metadata", lambda self: (reads.append(self.path), read(self))[1]
    )
    folder, tracker = directory / "iter_0000004", str(directory / TRACKER)
    for _ in range(2):
        attach(settings(directory))
        assert [checkpointing.read_metadata(tracker) for _ in range(2)] == [(4, False)] * 2
    assert reads == [folder]
    what_is_missing.cache_clear()  # as a save does
    assert checkpointing.read_metadata(tracker) == (4, False)
    assert reads == [folder] * 2


def test_the_newest_whole_one_is_taken(
    copied: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_burst"), "propagate", True)
    directory = copied("torch_dist")
    tracker, read = directory / TRACKER, reader(directory)
    assert read(str(tracker)) == (4, False) and not caplog.text

    tracker.write_text("")  # as a full disk leaves it
    assert read(str(tracker)) == (4, False)
    assert f"{tracker} is truncated: it holds ''; loading iteration 4 instead" in caplog.text

    caplog.clear()
    tracker.write_text("4")
    (directory / "iter_0000006").mkdir()  # later than the record: not asked for
    tensors = directory / "iter_0000004" / "__1_0.distcp"
    size = tensors.stat().st_size
    tensors.write_bytes(tensors.read_bytes()[: size // 2])
    read = reader(directory)  # the next start
    assert read(str(tracker)) == (2, False)
    assert f"iter_0000004 is incomplete: __1_0.distcp has {size // 2} of" in caplog.text
    assert "; loading iteration 2 instead" in caplog.text

    assert reader(directory, ckpt_step=2)(str(tracker)) == (2, False)
    with pytest.raises(NoCompleteCheckpointError, match="iter_0000004 is incomplete"):
        reader(directory, ckpt_step=4)(str(tracker))

    shutil.rmtree(directory / "iter_0000002")
    with pytest.raises(NoCompleteCheckpointError, match=f"or delete {tracker} to start anew"):
        reader(directory)(str(tracker))
    tracker.write_text("release")
    assert read(str(tracker)) == (0, True)


@pytest.mark.parametrize("name", slow_if({"torch"}, FORMATS))
def test_a_training_goes_on_from_the_whole_one(
    copied: Any, saved: Callable[[str], tuple[Path, str]], name: str, tmp_path: Path, data: Any
) -> None:
    directory = copied(name)
    broken = max((directory / "iter_0000004").rglob("*.*t*"), key=lambda p: p.stat().st_size)
    broken.write_bytes(broken.read_bytes()[:-100])
    before = contents(directory / "iter_0000002")
    flags = ("--load", str(directory), "--train-iters", "4", "--ckpt-format", name)
    flags = (*flags, "--save", str(directory))  # over the broken one
    text = run_module(MODULE, tmp_path / "run", 2, *data, *TWO, *flags)
    assert "iter_0000004 is incomplete" in text and "; loading iteration 2 instead" in text
    assert check_same_steps(text, saved(name)[1]) == [3, 4]
    assert "iter_0000004 holds an earlier checkpoint, which is replaced" in text
    assert found_missing(broken.parents[name == "torch"], name == "torch_dist") is None
    assert not list(directory.glob(".*"))
    assert contents(directory / "iter_0000002") == before


def test_saving_needs_no_process(tmp_path: Path, restored: None) -> None:
    """It would outlive a rank that is killed."""
    attach(settings(tmp_path))
    found = filesystem_async.get_write_results_queue()
    assert type(found) is queue.Queue and found is filesystem_async.get_write_results_queue()
