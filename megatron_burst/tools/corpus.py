"""A corpus for a first training: text as bytes, in the .bin and .idx file that Megatron reads.

Without `--input` the text is the standard library of the running Python, so that nothing is
downloaded. A file, or a line of a JSONL file, is a document, or each of its paragraphs; each ends
with a token of its own. How long they are decides how packed sequences spread over ranks.
"""

import hashlib
import json
import shlex
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_burst.tools.options import Parser

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
LIMIT = 32_000_000
"""Bytes of text that are taken at most, in whole documents."""
LEAST = 4097
"""Tokens that a corpus must have, for trainings need some sequences."""
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def prepare(inputs: Sequence[Path], output: Path, *, paragraphs: bool = False) -> str:
    """Write corpus.bin, .idx and .json to `output`; return what was done, as a line for the log.

    Raises:
        ValueError: a file cannot be read, or there is too little text; the message says where.
    """
    texts, used = [], 0
    for text in documents(inputs, paragraphs=paragraphs):
        used += len(text)
        if used > LIMIT:
            break
        texts.append(text)
    tokens = sum(map(len, texts)) + len(texts)
    if tokens < LEAST:
        raise ValueError(f"too little text: {tokens} tokens, at least {LEAST} are needed")
    digest = hashlib.sha256(b"".join(len(text).to_bytes(8, "little") + text for text in texts))
    prefix = output / "corpus"
    output.mkdir(parents=True, exist_ok=True)
    _write(texts, prefix)
    content = {
        "prefix": str(prefix.resolve()),
        "tokenizer_args": [
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)),
            *("--null-tokenizer-eod-id", str(END_OF_DOCUMENT)),
        ],
        "documents": len(texts),
        "tokens": tokens,
        "source": digest.hexdigest(),
    }
    prefix.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    middle, longest = np.quantile([len(text) + 1 for text in texts], (0.5, 1))
    cut = f", cut at {LIMIT} bytes" if used > LIMIT else ""
    lengths = f"mean {tokens / len(texts):.0f}, median {middle:.0f}, longest {longest:.0f}"
    return f"corpus written: {len(texts)} documents, {tokens} tokens{cut}; {lengths}"


def documents(inputs: Sequence[Path], *, paragraphs: bool = False) -> Iterator[bytes]:
    """Yield the bytes of every document, empty ones left out, in a fixed order."""
    for path in inputs or [Path(sysconfig.get_path("stdlib"))]:
        if not path.exists():
            raise ValueError(f"--input {path}: no such file or directory")
        for file in [path] if path.is_file() else _files(path, is_library=not inputs):
            lines = file.suffix in (".jsonl", ".ndjson")
            for text in _lines(file) if lines else [file.read_bytes()]:
                parts = text.split(b"\n\n") if paragraphs else [text]
                yield from filter(None, parts)


def _files(root: Path, *, is_library: bool) -> list[Path]:
    """All files below a directory that are not hidden; of the standard library its modules."""
    skipped = _SKIPPED if is_library else set()
    found = (path for path in root.rglob("*.py" if is_library else "*") if path.is_file())
    return sorted(
        path
        for path in found
        if not any(p in skipped or p[0] == "." for p in path.relative_to(root).parts)
    )


def _lines(path: Path) -> Iterator[bytes]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield json.loads(line)["text"].encode("utf-8")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: no JSON with a text: {error}") from error


def _write(texts: Iterable[bytes], prefix: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # Megatron's, of much that is not used here
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCAB_SIZE))
    for text in texts:
        tokens = np.append(np.frombuffer(text, dtype=np.uint8), np.uint16(END_OF_DOCUMENT))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def main(argv: list[str]) -> int:
    """Run the verb; return its exit status."""
    example = "megatron-burst corpus --output corpus --input documents.jsonl"
    parser = Parser("corpus", __doc__, example)
    add = parser.add_argument
    text = "corpus.bin, corpus.idx and corpus.json, which has the flags of a training, go here"
    add("--output", type=Path, required=True, metavar="DIR", help=text)
    text = "text, directories or JSONL files with a text a line"
    add("--input", type=Path, nargs="+", action="extend", default=[], metavar="PATH", help=text)
    add("--paragraphs", action="store_true", help="what is between empty lines is a document")
    args = parser.parse_args(argv)
    said = prepare(args.input, args.output, paragraphs=args.paragraphs)
    content = (args.output / "corpus.json").read_text()
    found = json.loads(content)
    flags = shlex.join(["--data-path", found["prefix"], *found["tokenizer_args"]])
    print(content if args.json else f"{said}\nflags of a training on it: {flags}")
    return 0
