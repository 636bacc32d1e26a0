"""Saves a checkpoint over an older one without a mixture of both, and says what ends a save."""

import argparse
import contextlib
import functools
import logging
import os
import queue
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import CheckpointException

from megatron_burst.plugin.compat import wrap

logger = logging.getLogger(__name__)

METADATA = ".metadata"  # of torch's distributed checkpoints; written after the tensors
MARKER = "metadata.json"  # of Megatron's torch_dist; written last


class SaveError(RuntimeError):
    """A checkpoint could not be saved; the message says which, where and how much room there is."""


def attach(args: argparse.Namespace, forget: Callable[[], object]) -> None:
    """Attach to Megatron's saves; `forget` what was found of checkpoints before each.

    Saving starts no process, unless --async-save does.
    """
    wrap(training, "save_checkpoint", functools.partial(_with_note, args, forget))
    wrap(training, "maybe_finalize_async_save", functools.partial(_with_reason, args))
    if not args.async_save:
        # Megatron's is held by a process of its own, which outlives a rank that is killed.
        filesystem_async.get_write_results_queue = functools.cache(queue.Queue)


def _with_note(
    args: argparse.Namespace, forget: Callable[[], object], save: Callable[..., None]
) -> Callable[..., None]:
    """Megatron's `save_checkpoint`, which writes over a checkpoint of the same iteration in place.

    Truncated then, it might hold files of both, all of full size. So a note is made first of what
    has to be replaced. A failure becomes a `SaveError`.
    """

    @functools.wraps(save)
    def note_and_save(iteration: int, *more: Any, **options: Any) -> None:
        first = not dist.is_initialized() or dist.get_rank() == 0
        persistent = args.save and not options.get("non_persistent_ckpt")
        folder = Path(args.save or "") / f"iter_{iteration:07d}"
        forget()
        if first and persistent:
            note_replaced(folder)
            record = Path(checkpointing.get_checkpoint_tracker_filename(args.save))
            if record.is_file() and not record.read_text(errors="replace").strip().isalnum():
                record.unlink()  # truncated: --save-retain-interval reads it before it is written
        if dist.is_initialized():
            dist.barrier()
        with _named(args, f"the checkpoint of iteration {iteration}"):
            save(iteration, *more, **options)
        if first and persistent and not args.async_save:  # all ranks have written
            note_of(folder).unlink(missing_ok=True)

    return note_and_save


def _with_reason(args: argparse.Namespace, finalize: Callable[..., None]) -> Callable[..., None]:
    """Megatron's `maybe_finalize_async_save`, in which a save beside training may fail."""

    @functools.wraps(finalize)
    def finalize_or_say(*given: Any, **options: Any) -> None:
        with _named(args, "a checkpoint of --async-save"):
            finalize(*given, **options)

    return finalize_or_say


@contextlib.contextmanager
def _named(args: argparse.Namespace, what: str) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:
        if not args.save:
            raise
        raise SaveError(
            f"{what} could not be saved to {args.save}{_room(args.save)}; those saved before it "
            f"can be loaded. Its error, {type(error).__name__}, stands above"
        ) from error


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
        new = note_of(folder).with_suffix(".new")
        new.touch()
        os.utime(new, ns=(max(times), max(times)))
        new.replace(note_of(folder))
        logger.warning("%s holds an earlier checkpoint, which is replaced", folder)


def note_of(folder: Path) -> Path:
    """Where the note of a checkpoint's folder is."""
    return folder.with_name(f".{folder.name}.replaced")
