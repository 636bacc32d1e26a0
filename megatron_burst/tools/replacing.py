"""Writes files that others may be reading: the old one stays whole until the new one is."""

import filecmp
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; at the end that file takes the place of `path`, unless it is equal.

    Who has the old one open or mapped keeps it. An error leaves the old one. A device or a pipe is
    written to itself, and of a symbolic link the file that it leads to is replaced.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    old = Path(os.path.realpath(path))
    new = old.with_name(f".{os.getpid()}.{old.name}")
    try:
        yield new
        if not (old.is_file() and filecmp.cmp(new, old, shallow=False)):
            new.replace(old)
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text so."""
    with replacing(path) as new:
        new.write_text(text)
