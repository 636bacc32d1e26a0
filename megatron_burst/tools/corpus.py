"""A corpus for a first training: text as bytes, in the .bin and .idx file that Megatron reads.

Without `--input` the text is the standard library of the running Python, so that nothing is
downloaded. A file, or a line of a JSONL file, is a document, or each of its paragraphs; each ends
with a token of its own. How long they are decides how packed sequences spread over ranks.
"""

import hashlib
import json
import re
import shlex
import struct
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_burst.tools.options import Parser
from megatron_burst.tools.replacing import replacing, write_text

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
LIMIT = 32_000_000
"""Bytes of text that are taken at most, in whole documents."""
LEAST = 4097
"""Tokens that a corpus must have, for trainings need some sequences."""
_MAGIC, _VERSION, _UINT16 = b"MMIDIDX\0\0", 1, 8  # how an index of Megatron's begins
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus(NamedTuple):
    """The documents of a corpus."""

    texts: Sequence[bytes]
    is_cut: bool  # at `LIMIT`

    @property
    def tokens(self) -> int:
        """How many there are, with one at the end of each document."""
        return sum(map(len, self.texts)) + len(self.texts)

    def facts(self, output: Path) -> dict[str, Any]:
        """Return what corpus.json holds of the corpus that `write` puts there."""
        digest = hashlib.sha256()
        for text in self.texts:
            digest.update(len(text).to_bytes(8, "little") + text)
        return {
            "prefix": str((output / "corpus").resolve()),
            "tokenizer_args": [
                *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)),
                *("--null-tokenizer-eod-id", str(END_OF_DOCUMENT)),
            ],
            "documents": len(self.texts),
            "tokens": self.tokens,
            "source": digest.hexdigest(),
        }

    def write(self, output: Path) -> None:
        """Write corpus.bin, .idx and .json; a training that reads others there keeps those."""
        output.mkdir(parents=True, exist_ok=True)
        with replacing(output / "corpus.bin") as tokens, replacing(output / "corpus.idx") as index:
            with tokens.open("wb") as file:
                for text in self.texts:
                    end = np.uint16(END_OF_DOCUMENT)
                    file.write(np.append(np.frombuffer(text, np.uint8), end).tobytes())
            index.write_bytes(self._index())
        write_text(output / "corpus.json", json.dumps(self.facts(output), indent=2) + "\n")

    def _index(self) -> bytes:
        """What Megatron's IndexedDataset reads: every document is one sequence.

        Written here, for to import Megatron takes seconds, and a corpus needs nothing of it.
        """
        lengths = np.array([len(text) + 1 for text in self.texts], np.int32)
        starts = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)  # in bytes
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
        head = struct.pack("<QBQQ", _VERSION, _UINT16, len(lengths), len(documents))
        return b"".join((_MAGIC, head, *(part.tobytes() for part in (lengths, starts, documents))))

    def __str__(self) -> str:
        lengths = [len(text) + 1 for text in self.texts]
        middle, longest = np.quantile(lengths, (0.5, 1))
        cut = f", cut at {LIMIT} bytes" if self.is_cut else ""
        mean = f"mean {self.tokens / len(lengths):.0f}"
        return (
            f"{len(lengths)} documents, {self.tokens} tokens{cut}; {mean}, median {middle:.0f}, "
            f"longest {longest:.0f}"
        )


def gather(inputs: Sequence[Path], *, paragraphs: bool = False) -> Corpus:
    """Return the documents of these files; of the standard library if there are none.

    Raises:
        ValueError: a file cannot be read, or there is too little text; the message says where.
    """
    texts, used = list[bytes](), 0
    for text in documents(inputs, paragraphs=paragraphs):
        used += len(text)
        if used > LIMIT and not texts:
            raise ValueError(
                f"the first document has {used} bytes, and {LIMIT} are taken of all: cut it with "
                "--paragraphs, or give files of less"
            )
        if used > LIMIT:
            break
        texts.append(text)
    corpus = Corpus(texts, used > LIMIT)
    if corpus.tokens < LEAST:
        raise ValueError(f"too little text: {corpus.tokens} tokens, at least {LEAST} are needed")
    return corpus


def documents(inputs: Sequence[Path], *, paragraphs: bool = False) -> Iterator[bytes]:
    """Yield the bytes of every document, empty ones left out, in a fixed order."""
    for file in files(inputs):
        lines = file.suffix in (".jsonl", ".ndjson")
        for text in _lines(file) if lines else [_text(file)]:
            parts = re.split(rb"\r?\n(?:\r?\n)+", text) if paragraphs else [text]
            yield from filter(None, parts)


def files(inputs: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of these paths; of the standard library if there are none."""
    for path in inputs or [Path(sysconfig.get_path("stdlib"))]:
        if not path.exists():
            raise ValueError(f"--input {path}: no such file or directory")
        yield from [path] if path.is_file() else _files(path, is_library=not inputs)


def _files(root: Path, *, is_library: bool) -> list[Path]:
    """All files below a directory but hidden and compiled ones; of the library its modules."""
    skipped = _SKIPPED if is_library else {"__pycache__"}
    paths = (path for path in root.rglob("*.py" if is_library else "*") if path.is_file())
    return sorted(
        path
        for path in paths
        if not any(p in skipped or p[0] == "." for p in path.relative_to(root).parts)
    )


def _text(path: Path) -> bytes:
    if b"\0" in (content := path.read_bytes()):
        text = "it is no text, or UTF-16: give the text files alone"
        raise ValueError(f"--input {path} has NUL bytes: {text}")
    return content


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)["text"].encode("utf-8")
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    text = f"{path}, line {number}: no JSON with a text: {error}"
                    raise ValueError(text) from error


def parser() -> Parser:
    """Return what reads the words."""
    example = "megatron-burst corpus --output corpus --input documents.jsonl"
    made = Parser("corpus", __doc__, example)
    add = made.add_argument
    text = "corpus.bin, corpus.idx and corpus.json, which has the flags of a training, go here"
    add("--output", type=Path, required=True, metavar="DIR", help=text)
    text = "text, directories or JSONL files with a text a line"
    add("--input", type=Path, nargs="+", action="extend", default=[], metavar="PATH", help=text)
    add("--paragraphs", action="store_true", help="what is between empty lines is a document")
    return made


def main(argv: list[str]) -> int:
    """Run the verb; return its exit status."""
    args = parser().parse_args(argv)
    corpus = gather(args.input, paragraphs=args.paragraphs)
    corpus.write(args.output)
    facts = corpus.facts(args.output)
    flags = shlex.join(["--data-path", facts["prefix"], *facts["tokenizer_args"]])
    kinds = Counter(file.suffix or file.name for file in files(args.input)).most_common()
    of = ", ".join(f"{count} {kind}" for kind, count in kinds)
    said = f"corpus written, of files {of}: {corpus}\nflags of a training on it: {flags}"
    print(json.dumps(facts, indent=2) if args.json else said)
    return 0
