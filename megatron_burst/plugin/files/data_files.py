"""Looks at the files of a data set before training: are they there, and complete?

A truncated file of tokens would else be found at the first sample behind its end, after days.
"""

import argparse
import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from megatron.core.datasets.indexed_dataset import _IndexReader

from megatron_burst.plugin.limits import refuse_all


def check_data_files(args: argparse.Namespace) -> None:
    """Check the files of every prefix that the arguments name.

    Not those in object stores, nor what is no file of tokens (--sft, an external loader).

    Raises:
        ValueError: files are missing, cannot be read or are truncated; the message names them all.
    """
    if args.sft or args.dataloader_type == "external":
        return
    reasons = []
    for prefix in dict.fromkeys(_prefixes(args)):
        if "://" in prefix:
            continue
        try:
            _check(prefix)
        except (OSError, ValueError) as error:
            reasons.append(f"{error}")
    refuse_all("the data set cannot be read", reasons)


def readable_indexes(args: argparse.Namespace) -> Iterator[tuple[str, _IndexReader]]:
    """Yield the prefix and the index of every data set of documents that is complete here."""
    for prefix in dict.fromkeys(_prefixes(args)):
        with contextlib.suppress(ValueError, OSError):
            if len(index := _check(prefix)):
                yield prefix, index


def _prefixes(args: argparse.Namespace) -> Iterator[str]:
    """What is no number, hence no weight, among the values of Megatron's flags for data."""
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    for value in (value for name in names for value in getattr(args, name) or ()):
        try:
            float(value)
        except ValueError:
            yield value


def _check(prefix: str) -> _IndexReader:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        read = _IndexReader(str(index), multimodal=False)
    except (AssertionError, struct.error, ValueError) as error:
        raise ValueError(f"{index} is no index of tokens, or is truncated: {error}") from error
    last = int(read.sequence_lengths[-1]) * read.dtype_size if len(read) else 0
    end = int(read.sequence_pointers[-1]) + last if len(read) else 0
    with tokens.open("rb") as file:
        if (found := file.seek(0, os.SEEK_END)) < end:
            raise ValueError(f"{tokens} is truncated: it has {found} of {end} bytes")
    return read
