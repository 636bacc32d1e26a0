"""A corpus for a first training: text as bytes, in the .bin and .idx file that Megatron reads.

    python -m megatron_burst.tools.corpus --output DIR [--input PATH ...]

Without `--input` the text is the standard library of the running Python, so that nothing is
downloaded. A file, or a line of a JSONL file, is a document; each ends with a token of its own.
"""

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
LIMIT = 32_000_000
"""Bytes of text that are taken at most, in whole documents."""
LEAST = 4097
"""Tokens that a corpus must have, for trainings need some sequences."""
_JSONL = (".jsonl", ".ndjson")
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class CorpusError(ValueError):
    """The input cannot become a corpus; the message says which file or line, and why."""


def prepare(inputs: list[Path], output: Path) -> str:
    """Leave corpus.bin, .idx and .json in `output`, unless they are of the same text already.

    Returns:
        what was done, as a line for the log.

    Raises:
        CorpusError: a file cannot be read, or there is too little text.
    """
    texts, left_out, used, was_cut = [], list[Path](), 0, False
    for text in documents(inputs, left_out):
        used += len(text)
        if was_cut := used > LIMIT:
            break
        texts.append(text)
    tokens = sum(map(len, texts)) + len(texts)
    if tokens < LEAST:
        raise CorpusError(f"too little text: {tokens} tokens, at least {LEAST} are needed")
    digest = hashlib.sha256(b"".join(len(text).to_bytes(8, "little") + text for text in texts))
    facts, prefix = output / "corpus.json", output / "corpus"
    said = f"{len(texts)} documents, {tokens} tokens" + was_cut * f", cut at {LIMIT} bytes"
    if left_out:
        said += f"; left out, not UTF-8: {len(left_out)} files ({left_out[0]} ...)"
    if facts.is_file() and json.loads(facts.read_text())["source"] == digest.hexdigest():
        return f"corpus reused: {said}"
    output.mkdir(parents=True, exist_ok=True)
    facts.unlink(missing_ok=True)
    _write(texts, prefix)
    content = {
        "prefix": str(prefix.resolve()),
        "tokenizer_args": [
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)),
            *("--null-tokenizer-eod-id", str(END_OF_DOCUMENT)),
        ],
        "documents": len(texts),
        "tokens": tokens,
        "unigram_entropy_nats": _entropy_nats(texts),
        "source": digest.hexdigest(),
    }
    facts.write_text(json.dumps(content, indent=2) + "\n")  # last: it says that the pair is whole
    return f"corpus written: {said}"


def documents(inputs: list[Path], left_out: list[Path]) -> Iterator[bytes]:
    """Yield the text of every document in UTF-8, empty ones left out, in a fixed order.

    What is not UTF-8 is added to `left_out`, or an error where it is named itself.
    """
    for path in inputs or [Path(sysconfig.get_path("stdlib"))]:
        if not path.exists():
            raise CorpusError(f"--input {path}: no such file or directory")
        for file in [path] if path.is_file() else _files(path, _SKIPPED if not inputs else set()):
            for text in _lines(file) if file.suffix in _JSONL else [file.read_bytes()]:
                try:
                    text.decode("utf-8")
                except UnicodeDecodeError as error:
                    if file in inputs:
                        what = f"{file}: not UTF-8 text at byte {error.start}"
                        raise CorpusError(what) from error
                    left_out.append(file)
                    continue
                if text:
                    yield text


def _files(root: Path, skipped: set[str]) -> list[Path]:
    """All files below a directory that are not hidden; of the standard library its modules."""
    found = (path for path in root.rglob("*.py" if skipped else "*") if path.is_file())
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
                raise CorpusError(f"{path}, line {number}: no JSON with a text: {error}") from error


def _write(texts: Iterable[bytes], prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCAB_SIZE))
    for text in texts:
        tokens = np.append(np.frombuffer(text, dtype=np.uint8), np.uint16(END_OF_DOCUMENT))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def _entropy_nats(texts: list[bytes]) -> float:
    """Of the tokens one by one: the loss of a model that knows their frequencies alone."""
    counts = np.bincount(np.frombuffer(b"".join(texts), dtype=np.uint8), minlength=VOCAB_SIZE)
    counts[END_OF_DOCUMENT] = len(texts)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_burst.tools.corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Any = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR")
    add("--input", type=Path, nargs="+", action="extend", default=[], metavar="PATH")
    args = parser.parse_args(argv)
    try:
        print(prepare(args.input, args.output))
    except (CorpusError, ModuleNotFoundError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
