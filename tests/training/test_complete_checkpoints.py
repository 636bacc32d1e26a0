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
import torch

checkpointing = pytest.importorskip("megatron.training.checkpointing")
import megatron.training.training as training  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from torch.distributed.checkpoint import CheckpointException, FileSystemReader  # noqa: E402

from megatron_burst.data_checks.complete_checkpoints import (  # noqa: E402
    CompleteOnly,
    NoCompleteCheckpointError,
    attach,
    what_is_missing,
)
from megatron_burst.data_checks.saves import MARKER, SaveError, note_replaced  # noqa: E402
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
    off = "auto_detect_ckpt_format", "async_save", "skip_train", "finetune"
    missing = dict.fromkeys(("ckpt_convert_format", "pretrained_checkpoint"))
    missing |= {"non_persistent_global_ckpt_dir": None}
    return Namespace(**found | dict.fromkeys(off, False) | missing | changes)


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
        marker = folder / "metadata.json"
        for text in (b"", b"{", b"[]", b"{}", b"\xff\xfe", b"\0" * 99):
            marker.write_bytes(text)
            for needed in (True, False):
                assert str(found_missing(folder, needed)).startswith(
                    "metadata.json cannot be read: "
                )
        marker.unlink()
        assert found_missing(folder, True) and found_missing(folder, False) is None
        (folder / "common.pt").write_bytes(b"PK")  # as older versions have it
        assert found_missing(folder, False) == "common.pt is truncated after 2 bytes"


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
        (checkpointing, "_load_base_checkpoint"),
        (checkpointing, "checkpoint_exists"),
        (training, "save_checkpoint"),
        (training, "maybe_finalize_async_save"),
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

    for left in (b"", b"\xff\xfe\0", b"-4", b"4 4", b"9" * 5000):  # "" as a full disk leaves it
        tracker.write_bytes(left)
        assert read(str(tracker)) == (4, False)
    assert f"{tracker} is truncated: it holds ''; loading iter_0000004 instead" in caplog.text
    assert r"it holds '\\xff\\xfe\x00'; loading" in caplog.text

    caplog.clear()
    tracker.write_text("4")
    (directory / "iter_0000006").mkdir()  # later than the record: not asked for
    tensors = directory / "iter_0000004" / "__1_0.distcp"
    size = tensors.stat().st_size
    tensors.write_bytes(tensors.read_bytes()[: size // 2])
    read = reader(directory)  # the next start
    assert read(str(tracker)) == (2, False)
    assert f"iter_0000004 is incomplete: __1_0.distcp has {size // 2} of" in caplog.text
    assert "; loading iter_0000002 instead" in caplog.text

    assert reader(directory, ckpt_step=2)(str(tracker)) == (2, False)
    with pytest.raises(NoCompleteCheckpointError, match="iter_0000004 is incomplete"):
        reader(directory, ckpt_step=4)(str(tracker))

    shutil.rmtree(directory / "iter_0000002")
    with pytest.raises(NoCompleteCheckpointError, match="take another --load and --save to start"):
        reader(directory)(str(tracker))
    tracker.write_text("release")
    with pytest.raises(NoCompleteCheckpointError, match="release is incomplete: there is no such"):
        read(str(tracker))
    tensors.write_bytes(tensors.read_bytes().ljust(size))
    (directory / "iter_0000004").rename(directory / "release")
    assert reader(directory)(str(tracker)) == (0, True)


def test_non_persistent_ones_that_are_incomplete_leave_the_others(copied: Any) -> None:
    directory = copied("torch_dist")
    for marker in directory.glob("iter_*/metadata.json"):
        marker.unlink()
    with pytest.raises(NoCompleteCheckpointError, match="iter_0000004 is incomplete"):
        reader(directory)(str(directory / TRACKER))
    spare = {"non_persistent_global_ckpt_dir": str(directory)}
    assert reader(directory, **spare)(str(directory / TRACKER)) == (-1, False)
    moved = directory.rename(directory.with_name("non_persistent"))
    assert reader(directory)(str(moved / TRACKER)) == (-1, False)


def test_checkpoints_without_a_record_are_found(
    copied: Any, restored: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron would start from random weights, and save over them."""
    monkeypatch.setattr(logging.getLogger("megatron_burst"), "propagate", True)
    directory = copied("torch_dist")
    tracker, whole = directory / TRACKER, directory / "iter_0000004"
    asked = [whole / MARKER, directory / "iter_0000002" / MARKER]

    def loaded(**changes: Any) -> int | None:
        """The step that Megatron, which finds no record, is told to load."""
        what_is_missing.cache_clear()
        args = settings(directory, **changes)
        attach(args)
        checkpointing._load_base_checkpoint(str(directory), args)
        return steps.pop()

    steps: list[int | None] = []
    stub = lambda _, args: steps.append(args.ckpt_step)  # noqa: E731
    monkeypatch.setattr(checkpointing, "_load_base_checkpoint", stub)
    assert loaded() is None  # the record says it
    tracker.unlink()
    assert loaded() == 4
    assert f"{tracker} does not exist; loading iter_0000004 instead" in caplog.text
    assert checkpointing.checkpoint_exists(str(directory))  # else --pretrained-checkpoint wins
    assert loaded(ckpt_step=2) == 2
    tracker.mkdir()
    asked[0].write_text("")
    assert loaded() == 2
    with pytest.raises(NoCompleteCheckpointError, match="iter_0000004 is incomplete"):
        loaded(ckpt_step=4)
    asked[1].unlink()
    with pytest.raises(NoCompleteCheckpointError, match="iter_0000002 is incomplete"):
        loaded()
    shutil.rmtree(whole)
    assert loaded() is None  # a first save that was cut off
    assert "nothing was saved before it, so training starts anew" in caplog.text
    shutil.rmtree(directory)
    assert loaded() is None and not checkpointing.checkpoint_exists(str(directory))
    directory.mkdir()
    attach(settings(directory, ckpt_step=4, pretrained_checkpoint="elsewhere"))
    assert not checkpointing.checkpoint_exists(str(directory)), "the step is the other's"


def test_a_training_does_not_save_among_the_checkpoints_of_another(
    copied: Any, restored: None, tmp_path: Path
) -> None:
    directory, other = copied("torch_dist"), str(tmp_path / "other")
    for changes, remedy in (
        ({"load": None}, f"--load {directory} to go on"),
        ({"load": other}, f"--load {directory} --pretrained-checkpoint {other} to go on"),
        (
            {"load": other, "finetune": True},
            f"--load {directory} --pretrained-checkpoint {other} and drop --finetune to go on",
        ),
        (
            {"finetune": True, "pretrained_checkpoint": other},
            f"--load {directory} --pretrained-checkpoint {other} and drop --finetune to go on",
        ),
        ({"finetune": True}, f"--load {directory} and drop --finetune to go on"),
    ):
        with pytest.raises(ValueError, match="holds checkpoints, of iterations 2 to 4") as told:
            attach(settings(directory, save=str(directory), **changes))
        assert remedy in str(told.value)
    (tmp_path / "link").symlink_to(directory)
    for changes in ({"save": str(tmp_path / "link")}, {"load": other, "save": other}):
        attach(settings(directory, **changes))
    attach(settings(directory, save=other, finetune=True))
    (tmp_path / "other" / "iter_0000004").mkdir(parents=True)
    for changes in ({"skip_train": True}, {"ckpt_convert_format": "torch"}):
        attach(settings(directory, save=str(directory), **changes | {"load": other}))
    for folder in directory.glob("iter_*"):
        (folder / "metadata.json").unlink()
        (folder / ".metadata").unlink()
    what_is_missing.cache_clear()
    attach(settings(directory, save=str(directory), load=None))  # nothing can be lost


@pytest.mark.parametrize("why", ["finetune", "skip_train"])
def test_random_weights_are_not_finetuned(tmp_path: Path, restored: None, why: str) -> None:
    """Megatron warns of it, and trains to the end."""
    there, typo = tmp_path / "iter_0000004", tmp_path / "typo"
    there.mkdir()
    attach(settings(tmp_path, **{why: True}))
    attach(settings(typo))  # as at the first start of a training
    attach(settings(typo, pretrained_checkpoint=str(tmp_path), **{why: True}))
    flag = f"--{why.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"^{flag}: --load {typo} holds no checkpoint"):
        attach(settings(typo, **{why: True}))


def test_a_rank_looks_for_its_own_file_once_it_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--use-checkpoint-args asks before: any rank's file will do."""
    theirs = tmp_path / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt"
    theirs.parent.mkdir(parents=True)
    torch.save({}, theirs)
    (tmp_path / TRACKER).write_text("4")
    read = reader(tmp_path, name="torch")
    assert read(str(tmp_path / TRACKER)) == (4, False)
    own = tmp_path / "iter_0000004" / "mp_rank_01" / "model_optim_rng.pt"
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(checkpointing, "get_checkpoint_name", lambda *_: str(own))
    with pytest.raises(NoCompleteCheckpointError, match=r"mp_rank_01/model_optim_rng.pt does not"):
        read(str(tmp_path / TRACKER))


@pytest.mark.parametrize("name", slow_if({"torch"}, FORMATS))
def test_a_training_goes_on_from_the_whole_one(
    copied: Any, saved: Callable[[str], tuple[Path, str]], name: str, tmp_path: Path, data: Any
) -> None:
    directory = copied(name)
    broken = max((directory / "iter_0000004").rglob("*.*t*"), key=lambda p: p.stat().st_size)
    broken.write_bytes(broken.read_bytes()[:-100])
    if name == "torch_dist":
        (directory / TRACKER).unlink()  # Megatron would start from random weights
    before = contents(directory / "iter_0000002")
    flags = ("--load", str(directory), "--train-iters", "4", "--ckpt-format", name)
    flags = (*flags, "--save", str(directory))  # over the broken one
    text = run_module(MODULE, tmp_path / "run", 2, *data, *TWO, *flags)
    assert "iter_0000004 is incomplete" in text and "; loading iter_0000002 instead" in text
    assert check_same_steps(text, saved(name)[1]) == [3, 4]
    assert "iter_0000004 holds an earlier checkpoint, which is replaced" in text
    assert found_missing(broken.parents[name == "torch"], name == "torch_dist") is None
    assert not list(directory.glob(".iter*"))
    assert contents(directory / "iter_0000002") == before


def test_a_truncated_record_does_not_end_a_save(
    tmp_path: Path, restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron does under --save-retain-interval, it reads the record that is there."""
    record = tmp_path / TRACKER
    reads = lambda _: int(record.read_text()) if record.exists() else 0  # noqa: E731
    monkeypatch.setattr(training, "save_checkpoint", reads)
    attach(settings(tmp_path, save=str(tmp_path)))
    for text in ("", "4"):
        record.write_text(text)
        training.save_checkpoint(6)
    assert record.read_text() == "4"


def test_a_save_that_fails_beside_training_is_named(
    tmp_path: Path, restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(blocking: bool) -> None:
        raise CheckpointException("write", {})

    monkeypatch.setattr(training, "maybe_finalize_async_save", fails)
    attach(settings(tmp_path, save=str(tmp_path), async_save=True))
    with pytest.raises(SaveError, match=f"async-save could not be .* {tmp_path}, where .* are fre"):
        training.maybe_finalize_async_save(blocking=False)


def test_saving_needs_no_process(tmp_path: Path, restored: None) -> None:
    """It would outlive a rank that is killed."""
    attach(settings(tmp_path))
    found = filesystem_async.get_write_results_queue()
    assert type(found) is queue.Queue and found is filesystem_async.get_write_results_queue()
