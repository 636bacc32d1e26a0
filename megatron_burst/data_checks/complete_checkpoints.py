"""Takes complete checkpoints only: one that a kill or a full disk truncated is passed over.

Megatron records a checkpoint as the latest after all of it is written, so what is truncated while
it is saved for the first time is never read. That leaves three cases: a checkpoint that is saved
again, over itself, a record that is truncated, and one that is gone.
"""

import argparse
import functools
import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import maybe_load_config
from torch.distributed.checkpoint import FileSystemReader

from megatron_burst.data_checks import saves
from megatron_burst.data_checks.saves import MARKER, METADATA
from megatron_burst.plugin.compat import wrap

logger = logging.getLogger(__name__)

RELEASE = "release"  # the folder, and its record, of weights without an iteration


class NoCompleteCheckpointError(RuntimeError):
    """Nothing of what was saved can be loaded; the message says why, one checkpoint a line."""


def attach(args: argparse.Namespace) -> None:
    """Let Megatron ask `CompleteOnly` what to load; see a save over an old one through.

    Raises:
        ValueError: this training would write over checkpoints that it does not go on from, or has
            none of those that it cannot do without.
    """
    refuse_mixture(args)
    refuse_nothing(args)
    complete = wrap(checkpointing, "read_metadata", functools.partial(CompleteOnly, args))
    wrap(checkpointing, "_load_base_checkpoint", complete.around_load)
    wrap(checkpointing, "checkpoint_exists", complete.around_exists)
    saves.attach(args, what_is_missing.cache_clear)


def refuse_mixture(args: argparse.Namespace) -> None:
    """Raise a ValueError if --save holds complete checkpoints from which training does not go on.

    New ones would be saved among them and over them, and the next start could not tell them apart.
    It goes on where --load is the same directory, unless --finetune begins at iteration 0.
    """
    given = {os.path.realpath(path) for path in (args.save, args.load) if path}
    is_same = bool(args.load) and len(given) == 1
    if not args.save or (is_same and not args.finetune) or args.skip_train:
        return
    directory = Path(args.save)
    saved = _saved(directory)
    if args.ckpt_convert_format or all(_what_is_missing(directory / x, False) for x in saved):
        return
    first, last = (int(name.removeprefix("iter_")) for name in (saved[-1], saved[0]))
    source = args.pretrained_checkpoint or (None if is_same else args.load)
    remedy = f"--load {args.save}" + (f" --pretrained-checkpoint {source}" if source else "")
    remedy += " and drop --finetune" if args.finetune else ""  # Megatron sets it for that one
    why = "--finetune begins anew" if is_same else f"--load is {args.load or 'not given'}"
    raise ValueError(
        f"--save {args.save} holds checkpoints, of iterations {first} to {last}, and {why}: "
        "this training would save among and over them: "
        f"pass {remedy} to go on from the newest of them, or another --save"
    )


def refuse_nothing(args: argparse.Namespace) -> None:
    """Raise a ValueError if random weights would be finetuned, or evaluated alone."""
    why = "--finetune" if args.finetune else "--skip-train" if args.skip_train else ""
    if not why or not args.load or "://" in args.load or args.pretrained_checkpoint:
        return
    record = Path(checkpointing.get_checkpoint_tracker_filename(args.load))
    if not record.is_file() and not _saved(record.parent):
        raise ValueError(f"{why}: --load {args.load} holds no checkpoint: name the folder of one")


class CompleteOnly:
    """Megatron's `read_metadata`: returns the iteration to load, and whether it is a release.

    That is --ckpt-step or the recorded one; where the recorded one is incomplete, or the record
    cannot be read, the newest complete one before it, with a warning. All ranks agree on it.

    Raises:
        NoCompleteCheckpointError: there is none.
    """

    def __init__(self, args: argparse.Namespace, original: Callable[..., Any]) -> None:
        self.original, self._load, self._step = original, args.load, args.ckpt_step
        self._spare = args.non_persistent_global_ckpt_dir
        self._needs_marker = args.ckpt_format == "torch_dist" and not args.auto_detect_ckpt_format

    def __call__(self, tracker: str) -> tuple[int, bool]:
        """Answer for the directory in which the record `tracker` lies; a collective call."""
        if not Path(tracker).parent.is_dir():  # an object store
            return self.original(tracker)
        name = self.find(tracker)
        if name is None:
            return -1, False
        return (0, True) if name == RELEASE else (int(name.removeprefix("iter_")), False)

    def find(self, tracker: str) -> str | None:
        """Return the folder to load, a collective call.

        None where nothing but a first save was begun, and for non-persistent checkpoints, beside
        which there are others, where none is complete.
        """
        file = Path(tracker)
        is_recorded = _of_all_ranks(file.is_file())
        if len(set(is_recorded)) > 1:
            raise NoCompleteCheckpointError(
                f"{file} is there for {sum(is_recorded)} of {len(is_recorded)} ranks: a directory "
                "of checkpoints has to be one that all nodes share"
            )
        # Where only other ranks miss something, they say it.
        names, reasons = _of_all_ranks(self._candidates(file))[0]
        for name in names:
            reason = _what_is_missing(file.parent / name, self._needs_marker)
            if not any(_of_all_ranks(reason)):
                for line in reasons:
                    _warn_once(f"{line}; loading {name} instead")
                return name
            if reason:
                reasons.append(f"{file.parent / name} is incomplete: {reason}")
        if not is_recorded[0] and len(names) < 2 and not self._step:
            for line in reasons[1:]:
                _warn_once(f"{line}; nothing was saved before it, so training starts anew")
            return None
        if file.parent.name == "non_persistent" or str(file.parent) == self._spare:
            for line in reasons:
                _warn_once(f"{line}; loading no non-persistent checkpoint")
            return None
        raise NoCompleteCheckpointError(
            "there is no complete checkpoint to load:\n  " + "\n  ".join(reasons) + "\n"
            "restore one, or take another --load and --save to start anew"
        )

    def _candidates(self, file: Path) -> tuple[list[str], list[str]]:
        """Return the folders to look at, the first one first, and what is wrong with the record."""
        if self._step and self._load and file.parent == Path(self._load):
            return [f"iter_{self._step:07d}"], []
        if not file.is_file():
            return _saved(file.parent), [f"{file} does not exist"]
        text = file.read_bytes().decode(errors="backslashreplace").strip()
        if text == RELEASE:
            return [RELEASE], []
        if re.fullmatch("[0-9]{1,15}", text):
            return _saved(file.parent, int(text)), []
        return _saved(file.parent), [f"{file} is truncated: it holds {text[:99]!r}"]

    def around_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `_load_base_checkpoint`, which starts anew wherever there is no record."""

        @functools.wraps(load)
        def load_newest(load_dir: Any, args: Any, *more: Any, **options: Any) -> Any:
            step = args.ckpt_step
            if (name := self._unrecorded(load_dir)) is not None and not step:
                args.ckpt_step = int(name.removeprefix("iter_"))
            try:
                return load(load_dir, args, *more, **options)
            finally:
                args.ckpt_step = step

        return load_newest

    def around_exists(self, exists: Callable[..., bool]) -> Callable[..., bool]:
        """Megatron's `checkpoint_exists`, by which --pretrained-checkpoint goes before --load."""

        def exists_here(path: Any) -> bool:
            is_there = path is not None and any(_of_all_ranks(bool(_saved(Path(path)))))
            return exists(path) or (is_there and self._unrecorded(path) is not None)

        return exists_here

    def _unrecorded(self, directory: str | None) -> str | None:
        """Return the newest complete checkpoint where no record names one: a collective call."""
        if directory is None or "://" in directory:
            return None
        tracker = checkpointing.get_checkpoint_tracker_filename(directory)
        return None if Path(tracker).is_file() else self.find(tracker)


@functools.cache
def _warn_once(text: str) -> None:  # Megatron asks more than once
    logger.warning("%s", text)


def _saved(directory: Path, recorded: int | None = None) -> list[str]:
    """The folder of the recorded iteration, then those before it, from the newest on."""
    paths = directory.iterdir() if directory.is_dir() else ()
    names = (re.fullmatch("iter_([0-9]{7,15})", path.name) for path in paths)
    iterations = sorted((int(name[1]) for name in names if name), reverse=True)
    if recorded is not None:
        iterations = [recorded, *(each for each in iterations if each < recorded)]
    return [f"iter_{iteration:07d}" for iteration in iterations]


def _what_is_missing(folder: Path, needs_marker: bool) -> str | None:
    """Ask anew once there are groups, by which a rank knows its file: arguments are read before."""
    has_groups = parallel_state.model_parallel_is_initialized()
    return what_is_missing(folder, needs_marker, has_groups)


@functools.cache  # Megatron asks more than once; a save clears it
def what_is_missing(folder: Path, needs_marker: bool, has_groups: bool = False) -> str | None:
    """Say why a checkpoint's folder is incomplete, as far as this rank has to know; None if it is.

    Of the format torch each rank looks for the file that it would load; of torch's distributed
    formats the first rank compares all files with what the metadata say of them. `needs_marker`: if
    it is distributed, it must be Megatron's torch_dist. `has_groups`: of ranks of the model.
    """
    if not folder.is_dir():
        return "there is no such folder"
    is_torch = any(folder.glob("mp_rank_*"))
    if not is_torch and dist.is_initialized() and dist.get_rank() != 0:
        return None
    note = saves.note_of(folder)
    replaced = note.stat().st_mtime_ns if note.is_file() else 0
    marks = list(_marks(folder, is_torch, needs_marker, has_groups))
    for file in marks:
        name = file.relative_to(folder)
        if not file.is_file():
            return f"{name} does not exist"
        if file.suffix == ".pt" and not zipfile.is_zipfile(file):  # its table stands at the end
            return f"{name} is truncated after {file.stat().st_size} bytes"
        if file.stat().st_mtime_ns <= replaced:
            return f"{name} is still that of an earlier save"
    if is_torch:
        return None if marks else "it holds no file"
    return _missing_tensors(folder)


def _marks(folder: Path, is_torch: bool, needs_marker: bool, has_groups: bool) -> Iterator[Path]:
    """Yield the files that make a checkpoint complete, as far as this rank has to know."""
    if not is_torch:
        yield folder / METADATA
        if needs_marker:
            yield folder / MARKER
        yield from sorted(folder.glob("*.pt"))  # of Megatron before 0.19
    elif has_groups:
        is_release = folder.name == RELEASE
        number = 0 if is_release else int(folder.name.removeprefix("iter_"))
        own = Path(checkpointing.get_checkpoint_name(str(folder.parent), number, is_release))
        yield from (own, *own.parent.glob("*.pt"))
    else:
        yield from sorted(folder.glob("mp_rank_*/*.pt"))


def _missing_tensors(folder: Path) -> str | None:
    """Compare the files of a distributed checkpoint with what its metadata say of them."""
    needed: dict[str, int] = {}
    reading = MARKER
    try:
        maybe_load_config(str(folder))
        reading = METADATA
        for part in FileSystemReader(folder).read_metadata().storage_data.values():
            end = part.offset + part.length
            needed[part.relative_path] = max(end, needed.get(part.relative_path, 0))
    except Exception as error:  # whatever parsing and unpickling half a file bring
        return f"{reading} cannot be read: {type(error).__name__}: {error}"
    for name, size in sorted(needed.items()):
        file = folder / name
        actual = file.stat().st_size if file.is_file() else 0
        if actual < size:
            return f"{name} has {actual} of {size} bytes"
    return None


def _of_all_ranks[T](value: T) -> list[T]:
    """Return what the ranks give, a collective call."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values
