"""Looks at the files of a data set before training: are they there, and complete?

A truncated file of tokens would else be found at the first sample behind its end, after days.
"""

import argparse
import os
import struct
from collections.abc import Iterator
from pathlib import Path

HEADER = struct.Struct("<9sQBQQ")  # name, version, dtype, sequences, documents
NAME, VERSION = b"MMIDIDX\x00\x00", 1
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # by the number of the dtype
LENGTH_BYTES, POINTER_BYTES = 4, 8  # of one sequence


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
    if reasons:
        raise ValueError("the data set cannot be read:\n  " + "\n  ".join(reasons))


def _prefixes(args: argparse.Namespace) -> Iterator[str]:
    """What is no number, hence no weight, among the values of Megatron's flags for data."""
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    for value in (value for name in names for value in getattr(args, name) or ()):
        try:
            float(value)
        except ValueError:
            yield value


def _check(prefix: str) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    with index.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or header[:9] != NAME:
            raise ValueError(f"{index} is no index of tokens: it begins with {header[:9]!r}")
        _, version, dtype, sequences, documents = HEADER.unpack(header)
        if version != VERSION or dtype not in TOKEN_BYTES:
            raise ValueError(f"{index} has version {version} and dtype number {dtype}")
        needed = HEADER.size + sequences * (LENGTH_BYTES + POINTER_BYTES) + documents * 8
        if (found := os.fstat(file.fileno()).st_size) < needed:
            raise ValueError(f"{index} is truncated: it has {found} of {needed} bytes")
        end = 0
        if sequences:
            file.seek(HEADER.size + (sequences - 1) * LENGTH_BYTES)
            (length,) = struct.unpack("<i", file.read(LENGTH_BYTES))
            file.seek((sequences - 1) * POINTER_BYTES, os.SEEK_CUR)
            (start,) = struct.unpack("<q", file.read(POINTER_BYTES))
            end = start + length * TOKEN_BYTES[dtype]
    with tokens.open("rb") as file:
        if (found := os.fstat(file.fileno()).st_size) < end:
            raise ValueError(f"{tokens} is truncated: it has {found} of {end} bytes")
