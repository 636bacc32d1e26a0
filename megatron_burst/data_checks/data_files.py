"""Looks at the files of a data set before training: are they there, complete, and as written?

A truncated file of tokens would else be found at the first sample behind its end, after days, and a
damaged index not at all.
"""

import argparse
import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import _IndexReader
from megatron.core.datasets.utils import Split

from megatron_burst.plugin.refusals import refuse_all

_AT_ONCE = 2**20  # sequences
_MEGATRONS_SPLIT = "969, 30, 1"  # where --data-path is given without


def check_data_files(args: argparse.Namespace) -> None:
    """Check the files of every prefix that the arguments name.

    Not those in object stores, nor what is no file of tokens (--sft, an external loader).

    Raises:
        ValueError: files are missing, truncated or damaged, or too short for --split; the message
            names them all.
    """
    if args.sft or args.dataloader_type == "external":
        return
    reasons = []
    for prefix in dict.fromkeys(_prefixes(args)):
        if "://" in prefix:
            continue
        try:
            _check_split(prefix, _check(prefix), args)
        except (OSError, ValueError) as error:
            reasons.append(f"{error}")
    refuse_all("the data set cannot be read", reasons)


def readable_indexes(args: argparse.Namespace) -> Iterator[tuple[str, _IndexReader]]:
    """Yield the prefix and the index of every data set of documents that is complete here."""
    prefixes = list[str]()
    with contextlib.suppress(ValueError, OSError):  # of a file that should name them
        prefixes.extend(dict.fromkeys(_prefixes(args)))
    for prefix in prefixes:
        with contextlib.suppress(ValueError, OSError):
            yield prefix, _check(prefix)


def _prefixes(args: argparse.Namespace) -> Iterator[str]:
    """What is no number, hence no weight, among the values of Megatron's flags for data."""
    for value in _named(args):
        try:
            float(value)
        except ValueError:
            yield value


def _named(args: argparse.Namespace) -> Iterator[str]:
    """The words of these flags, and of the files that two of them name."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        yield from getattr(args, name) or ()
    if (path := args.data_args_path) and "://" not in path:
        yield from Path(path).read_text().split()
    if (path := args.per_split_data_args_path) and "://" not in path:
        try:
            values = json.loads(Path(path).read_text())
            for value in (values[split] for split in ("train", "valid", "test")):
                yield from value.split() if isinstance(value, str) else map(str, value or ())
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            text = f"{path} is no JSON of prefixes for train, valid and test: {error!r}"
            raise ValueError(f"--per-split-data-args-path {text}") from error


def _check(prefix: str) -> _IndexReader:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        read = _IndexReader(str(index), multimodal=False)
    except (AssertionError, struct.error, ValueError, OverflowError) as error:
        raise ValueError(f"{index} is no index of tokens, or is truncated: {error}") from error
    if damage := _damage(read):
        raise ValueError(f"{index} is damaged: {damage} (--burst-check-files off does not look)")
    last = int(read.sequence_lengths[-1]) * read.dtype_size
    end = int(read.sequence_pointers[-1]) + last
    with tokens.open("rb") as file:
        actual = file.seek(0, os.SEEK_END)
    if actual < end:
        raise ValueError(f"{tokens} is truncated: it has {actual} of {end} bytes")
    if actual > end:
        raise ValueError(f"{index} is of another file: it says {end} of {actual} bytes of {tokens}")
    return read


def _check_split(prefix: str, read: _IndexReader, args: argparse.Namespace) -> None:
    """Refuse a part of a split that no token falls into: Megatron would count its epochs for ever.

    Megatron's default split does so with fewer than 500 sequences.
    """
    split = args.split or (_MEGATRONS_SPLIT if args.data_path else None)
    if split is None:  # each part has files of its own
        return
    parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, part in zip(Split, parts, strict=True):
        if part is None:
            continue
        begin, end = (round(border * len(read)) for border in part)
        if not read.sequence_lengths[begin:end].any():
            raise ValueError(
                f"{prefix}: --split {split} gives {name.name} none of the tokens of its "
                f"{len(read)} sequences: pass more, or 0"
            )


def _damage(read: _IndexReader) -> str | None:
    """Say how an index differs from what Megatron's writer makes, with the first bad sequence.

    There the sequences follow each other without gaps, and so do the documents. Memory is that of a
    part of the index.
    """
    count, borders = len(read), read.document_indices
    if not np.issubdtype(read.dtype, np.integer):
        return f"its tokens are {np.dtype(read.dtype)}"
    end = 0  # of the sequence before
    for first in range(0, count, _AT_ONCE):
        lengths = read.sequence_lengths[first : first + _AT_ONCE]
        pointers = read.sequence_pointers[first : first + _AT_ONCE]
        ends = np.cumsum(lengths, dtype=np.int64) * read.dtype_size + end
        wrong = pointers != ends - lengths * np.int64(read.dtype_size)
        wrong |= lengths < 0
        if wrong.any():
            n = int(wrong.argmax())
            before = ends[n - 1] if n else end
            return (
                f"sequence {first + n} of {count} has {lengths[n]} tokens at byte {pointers[n]}, "
                f"and the one before it ends at byte {before}"
            )
        end = int(ends[-1])
    if not end:
        return f"its {count} sequences have no tokens"
    falls = borders[1:] < borders[:-1]
    if falls.any():
        n = int(falls.argmax())
        return f"document {n} of {len(borders) - 1} is sequences {borders[n]} to {borders[n + 1]}"
    if not len(borders) or borders[0] != 0 or borders[-1] != count:
        return f"documents are sequences {borders[:1]} to {borders[-1:]}, and there are {count}"
    return None
