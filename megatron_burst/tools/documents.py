"""Reads documents from text files, directories, JSONL files or Python's own standard library."""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

JSONL_SUFFIXES = (".jsonl", ".ndjson")
SKIPPED_LIBRARY_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class CorpusError(ValueError):
    """The input cannot become a corpus; the message says which file or line, and why."""


@dataclass(kw_only=True, slots=True)
class Documents:
    """Non-empty texts in a fixed order: whole documents while their UTF-8 bytes are within `limit`.

    `inputs` are text files, JSONL files (one document a line, under `json_key`) or directories of
    either; without inputs the standard library of the running Python is read. Iterating raises
    CorpusError for what cannot be read, and leaves in `left_out` the files of directories that are
    not UTF-8 and in `was_cut` whether the limit ended it.
    """

    inputs: list[Path]
    json_key: str = "text"
    limit: int = 32_000_000
    left_out: set[Path] = field(default_factory=set)
    was_cut: bool = False

    def __iter__(self) -> Iterator[str]:
        used = 0
        for text in self._all():
            used += len(text.encode("utf-8"))
            self.was_cut = used > self.limit
            if self.was_cut:
                return
            if text:
                yield text

    def _all(self) -> Iterator[str]:
        if not self.inputs:
            yield from self._library()
        for path in self.inputs:
            if path.is_dir():
                yield from self._directory(path)
            elif path.is_file():
                yield from self._file(path, named=True)
            else:
                raise CorpusError(f"--input {path}: no such file, directory or .bin/.idx prefix")

    def _library(self) -> Iterator[str]:
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            if SKIPPED_LIBRARY_FOLDERS.isdisjoint(path.relative_to(root).parts):
                yield from self._file(path, named=False)

    def _directory(self, root: Path) -> Iterator[str]:
        for path in sorted(root.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if path.is_file() and not hidden:
                yield from self._file(path, named=False)

    def _file(self, path: Path, *, named: bool) -> Iterator[str]:
        try:
            if path.suffix in JSONL_SUFFIXES:
                yield from self._lines(path)
            else:
                yield path.read_bytes().decode("utf-8")
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            if named:
                raise CorpusError(f"{path}: not UTF-8 text at byte {error.start}") from error
            self.left_out.add(path)

    def _lines(self, path: Path) -> Iterator[str]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise CorpusError(f"{where}: not JSON ({error})") from error
                text = record.get(self.json_key) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    raise CorpusError(
                        f"{where}: no text under the key {self.json_key!r} (--json-key)"
                    )
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise CorpusError(f"{where}: half a surrogate pair in the text") from error
                yield text
