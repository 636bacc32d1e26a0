"""Takes complete checkpoints only: one that a kill or a full disk truncated is passed over.

Megatron records a checkpoint as the latest after all of it is written, so what is truncated while
it is saved for the first time is never read. That leaves two cases: a checkpoint that is saved
again, over itself, and a record that is truncated.
"""

import argparse
import functools
import logging
import os
import queue
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron_burst.plugin.compat import wrap

logger = logging.getLogger(__name__)

METADATA = ".metadata"  # of torch's distributed checkpoints; written after the tensors
MARKER = "metadata.json"  # of Megatron's torch_dist; written last


class NoCompleteCheckpointError(RuntimeError):
    """Nothing of what was saved can be loaded; the message says why, one checkpoint a line."""


class SaveError(RuntimeError):
    """A checkpoint could not be saved; the message says which, where and how much room there is."""


def attach(args: argparse.Namespace) -> None:
    """Let Megatron ask `CompleteOnly` which iteration to load; see a save over an old one through.

    Saving starts no process, unless --async-save does.
    """
    wrap(checkpointing, "read_metadata", functools.partial(CompleteOnly, args))
    wrap(training, "save_checkpoint", functools.partial(_with_note, args))
    if not args.async_save:
        # Megatron's is held by a process of its own, which outlives a rank that is killed.
        filesystem_async.get_write_results_queue = functools.cache(queue.Queue)


class CompleteOnly:
    """Megatron's `read_metadata`: returns the iteration to load, and whether it is a release.

    That is --ckpt-step or the recorded one; where the recorded one is incomplete, or the record
    cannot be read, the newest complete one before it, with a warning. All ranks agree on it.

    Raises:
        NoCompleteCheckpointError: there is none.
    """

    def __init__(self, args: argparse.Namespace, original: Callable[..., Any]) -> None:
        self.original, self._load, self._step = original, args.load, args.ckpt_step
        self._needs_marker = args.ckpt_format == "torch_dist" and not args.auto_detect_ckpt_format

    def __call__(self, tracker: str) -> tuple[int, bool]:
        """Answer for the directory in which the record `tracker` lies; a collective call."""
        file = Path(tracker)
        if not file.is_file():  # an object store
            return self.original(tracker)
        text = file.read_text().strip()
        if text == "release":
            return 0, True
        recorded = int(text) if text.isdecimal() else None
        if self._step and self._load and file.parent == Path(self._load):
            candidates = [self._step]
        else:
            candidates = _saved(file.parent, recorded)
        reasons = [] if recorded is not None else [f"{file} is truncated: it holds {text!r}"]
        # Where only other ranks miss something, they say it.
        for iteration in _of_all_ranks(candidates)[0]:
            folder = file.parent / f"iter_{iteration:07d}"
            reason = what_is_missing(folder, self._needs_marker)
            if not any(_of_all_ranks(reason)):
                for line in reasons:
                    _warn_once(f"{line}; loading iteration {iteration} instead")
                return iteration, False
            if reason:
                reasons.append(f"{folder} is incomplete: {reason}")
        raise NoCompleteCheckpointError(
            "there is no complete checkpoint to load:\n  " + "\n  ".join(reasons) + "\n"
            f"restore one, or delete {file} to start anew"
        )


@functools.cache
def _warn_once(text: str) -> None:  # Megatron asks more than once
    logger.warning("%s", text)


def _saved(directory: Path, recorded: int | None) -> list[int]:
    """The recorded iteration, then those of folders before it, from the newest on."""
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in directory.iterdir())
    found = sorted((int(name[1]) for name in names if name), reverse=True)
    return found if recorded is None else [recorded, *(each for each in found if each < recorded)]


@functools.cache  # Megatron asks more than once; a save clears it
def what_is_missing(folder: Path, needs_marker: bool) -> str | None:
    """Say why a checkpoint's folder is incomplete, as far as this rank has to know; None if it is.

    Of the format torch each rank looks for the file that it would load; of torch's distributed
    formats the first rank compares all files with what the metadata say of them. `needs_marker`: if
    it is distributed, it must be Megatron's torch_dist.
    """
    if not folder.is_dir():
        return "there is no such folder"
    is_torch = any(folder.glob("mp_rank_*"))
    if not is_torch and dist.is_initialized() and dist.get_rank() != 0:
        return None
    note = _note(folder)
    replaced = note.stat().st_mtime_ns if note.is_file() else 0
    marks = list(_marks(folder, is_torch, needs_marker))
    for file in marks:
        name = file.relative_to(folder)
        if not file.is_file():
            return f"{name} does not exist"
        if is_torch and not zipfile.is_zipfile(file):  # its table stands at the end
            return f"{name} is truncated after {file.stat().st_size} bytes"
        if file.stat().st_mtime_ns <= replaced:
            return f"{name} is still that of an earlier save"
    if is_torch:
        return None if marks else "it holds no file"
    return _missing_tensors(folder)


def _marks(folder: Path, is_torch: bool, needs_marker: bool) -> Iterator[Path]:
    """Yield the files that make a checkpoint complete, as far as this rank has to know."""
    if not is_torch:
        yield folder / METADATA
        if needs_marker:
            yield folder / MARKER
    elif parallel_state.model_parallel_is_initialized():
        iteration = int(folder.name.removeprefix("iter_"))
        own = Path(checkpointing.get_checkpoint_name(str(folder.parent), iteration))
        yield from (own, *own.parent.glob("*.pt"))
    else:
        yield from sorted(folder.glob("mp_rank_*/*.pt"))


def _missing_tensors(folder: Path) -> str | None:
    """Compare the files of a distributed checkpoint with what its metadata say of them."""
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data
    except Exception as error:  # whatever unpickling half a file brings
        return f"{METADATA} cannot be read: {type(error).__name__}: {error}"
    needed: dict[str, int] = {}
    for part in stored.values():
        end = part.offset + part.length
        needed[part.relative_path] = max(end, needed.get(part.relative_path, 0))
    for name, size in sorted(needed.items()):
        file = folder / name
        found = file.stat().st_size if file.is_file() else 0
        if found < size:
            return f"{name} has {found} of {size} bytes"
    return None


def _of_all_ranks[T](value: T) -> list[T]:
    """Return what the ranks give, a collective call."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _with_note(args: argparse.Namespace, save: Callable[..., None]) -> Callable[..., None]:
    """Megatron's `save_checkpoint`, which writes over a checkpoint of the same iteration in place.

    Truncated then, it might hold files of both, all of full size. So a note is made first of what
    has to be replaced. A failure becomes a `SaveError`.
    """

    @functools.wraps(save)
    def note_and_save(iteration: int, *more: Any, **options: Any) -> None:
        first = not dist.is_initialized() or dist.get_rank() == 0
        persistent = args.save and not options.get("non_persistent_ckpt")
        folder = Path(args.save or "") / f"iter_{iteration:07d}"
        what_is_missing.cache_clear()
        if first and persistent:
            note_replaced(folder)
        if dist.is_initialized():
            dist.barrier()
        try:
            save(iteration, *more, **options)
        except (Exception, CheckpointException) as error:
            if not args.save:
                raise
            raise SaveError(
                f"the checkpoint of iteration {iteration} could not be saved to {args.save}"
                f"{_room(args.save)}; those saved before it can be loaded. Its error, "
                f"{type(error).__name__}, stands above"
            ) from error
        if first and persistent and not args.async_save:  # all ranks have written
            _note(folder).unlink(missing_ok=True)

    return note_and_save


def _room(directory: str) -> str:
    """How full the disk is; nothing of an object store or of a directory that could not be made."""
    if not Path(directory).is_dir():
        return ""
    disk = shutil.disk_usage(directory)
    return f", where {disk.free >> 20} of {disk.total >> 20} MiB are free"


def note_replaced(folder: Path) -> None:
    """Note of what time the checkpoint in this folder is, if there is one.

    As long as one of the files that make it complete is as old, the folder does not count as
    complete. The note, a file of that time, lies beside the folder, all of whose files Megatron's
    --verify-integrity takes for the checkpoint's.
    """
    marks = [folder / METADATA, folder / MARKER, *folder.glob("mp_rank_*/*.pt")]
    if times := [mark.stat().st_mtime_ns for mark in marks if mark.is_file()]:
        new = _note(folder).with_suffix(".new")
        new.touch()
        os.utime(new, ns=(max(times), max(times)))
        new.replace(_note(folder))
        logger.warning("%s holds an earlier checkpoint, which is replaced", folder)


def _note(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")
