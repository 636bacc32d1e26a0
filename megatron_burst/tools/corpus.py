"""Turns text into a corpus Megatron trains on: byte-level tokens in one .bin/.idx pair.

    python -m megatron_burst.tools.corpus --output DIR [--input PATH ...]

Without `--input` the text is the standard library of the running Python, so that a first training
needs no download. One file (or one JSONL line) is one document; each ends with the
end-of-document token.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from megatron_burst.tools.documents import CorpusError, Documents
from megatron_burst.tools.extras import extra

with extra("train", __name__):
    from megatron.core.datasets.indexed_dataset import (
        DType,
        IndexedDataset,
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )
    from megatron.core.tokenizers.text.libraries import ByteLevelTokenizer

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
MEGABYTE = 1_000_000
INDEX_MAGIC = b"MMIDIDX\0\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """What a .bin/.idx pair holds and how Megatron is told to read it; stored as corpus.json."""

    prefix: str
    tokenizer_args: list[str]
    documents: int
    tokens: int
    longest: int
    unigram_entropy_nats: float


# ---- the .bin/.idx pair --------------------------------------------------------------------------


def build(documents: Iterable[str], prefix: Path) -> None:
    """Writes the tokens of `documents` to prefix.bin and .idx; both appear only when whole."""
    tokenizer = ByteLevelTokenizer(
        vocab_size=VOCAB_SIZE, _eos_id=END_OF_DOCUMENT, _pad_id=END_OF_DOCUMENT
    )
    unfinished = prefix.with_name(f"{prefix.name}.unfinished-{os.getpid()}")
    parts = [Path(of(str(unfinished))) for of in (get_bin_path, get_idx_path)]
    try:
        builder = IndexedDatasetBuilder(str(parts[0]), dtype=DType.optimal_dtype(VOCAB_SIZE))
        for document in documents:
            tokens = [*tokenizer.text_to_ids(document), tokenizer.eod]
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(str(parts[1]))
        for part in parts:
            part.replace(prefix.with_suffix(part.suffix))
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def measure(prefix: Path) -> Corpus:
    """Reads the pair once and counts it; raises CorpusError where the two files do not agree."""
    for of in (get_bin_path, get_idx_path):
        if not Path(of(str(prefix))).is_file():
            raise CorpusError(f"{of(str(prefix))}: missing; a corpus is a .bin and an .idx file")
    with Path(get_idx_path(str(prefix))).open("rb") as index:
        if index.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
            raise CorpusError(f"{prefix}.idx is not an index that Megatron reads")
    dataset = IndexedDataset(str(prefix))
    lengths, starts = dataset.sequence_lengths, dataset.document_indices
    tokens, itemsize = int(lengths.sum(dtype=np.int64)), np.dtype(dataset.index.dtype).itemsize
    size = Path(get_bin_path(str(prefix))).stat().st_size
    if size != tokens * itemsize:
        raise CorpusError(
            f"{prefix}.bin has {size} bytes, its index says {tokens} tokens of {itemsize} bytes"
        )
    if tokens == 0:
        raise CorpusError(f"{prefix}.bin is empty")
    data = np.memmap(get_bin_path(str(prefix)), mode="r", dtype=dataset.index.dtype)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[starts]
    return Corpus(
        prefix=str(prefix.resolve()),
        tokenizer_args=_tokenizer_args(data, ends),
        documents=len(starts) - 1,
        tokens=tokens,
        longest=int(np.diff(ends).max()),
        unigram_entropy_nats=_entropy_nats(data),
    )


def _tokenizer_args(data: np.ndarray, ends: np.ndarray) -> list[str]:
    """Flags for a tokenizer of Megatron's that needs no files and only knows the vocabulary.

    A document-ending token shared by all documents is the end-of-document token; without one
    Megatron's default stays, the last of the vocabulary.
    """
    last = np.unique(data[ends[1:] - 1])
    size = int(data.max()) + 1
    args = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]
    return args + (["--null-tokenizer-eod-id", str(int(last[0]))] if len(last) == 1 else [])


def _entropy_nats(data: np.ndarray, chunk: int = 1 << 24) -> float:
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(data), chunk):
        part = np.bincount(data[start : start + chunk], minlength=len(counts))
        part[: len(counts)] += counts
        counts = part
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


# ---- the command ---------------------------------------------------------------------------------


def prepare(documents: Documents, output: Path, *, min_tokens: int) -> tuple[Corpus, str]:
    """Leaves corpus.json, and unless the input is a ready pair corpus.bin/.idx, in `output`.

    Returns what the corpus holds and how it was come by: "written", "reused" (made earlier from the
    same text, and whole) or "checked" (a ready pair). Raises CorpusError.
    """
    inputs = documents.inputs
    ready = [prefix for prefix in map(_ready_prefix, inputs) if prefix is not None]
    output.mkdir(parents=True, exist_ok=True)
    facts = output / "corpus.json"
    if ready:
        if len(inputs) > 1:
            raise CorpusError(f"{ready[0]} is a ready .bin/.idx pair; it must be the only --input")
        corpus, how, source = measure(ready[0]), "checked", "ready"
    else:
        prefix, source = output / "corpus", _fingerprint(documents)
        stored = _stored(facts, prefix, source)
        if stored is None:
            facts.unlink(missing_ok=True)
            build(documents, prefix)
        corpus, how = stored or measure(prefix), "reused" if stored else "written"
    if corpus.tokens < min_tokens:
        raise CorpusError(
            f"too little text: {corpus.tokens} tokens, --min-tokens asks for {min_tokens}"
        )
    _write_json(facts, {**asdict(corpus), "source": source})
    return corpus, how


def _ready_prefix(path: Path) -> Path | None:
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if Path(get_idx_path(str(prefix))).is_file() and not path.is_dir() else None


def _fingerprint(documents: Iterable[str]) -> str:
    key, count = hashlib.sha256(b"byte-level tokens, end of document 256, uint16"), 0
    for document in documents:
        data = document.encode("utf-8")
        key.update(len(data).to_bytes(8, "little") + data)
        count += 1
    if count == 0:
        raise CorpusError("no text: every input is empty, not UTF-8, or over --max-megabytes")
    return key.hexdigest()


def _stored(facts: Path, prefix: Path, source: str) -> Corpus | None:
    """The corpus made earlier from the same text, when both its files are still what they were."""
    try:
        stored = json.loads(facts.read_text())
        corpus = measure(prefix)
    except (OSError, ValueError):
        return None  # whatever is missing or broken is written anew
    return corpus if stored == {**asdict(corpus), "source": source} else None


def _write_json(path: Path, content: object) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    unfinished.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_burst.tools.corpus")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="text files, directories of text, JSONL files, or one ready .bin/.idx prefix, which "
        "is only checked and measured (default: the standard library of this Python)",
    )
    parser.add_argument("--json-key", default="text", help="key of the text in a JSONL line")
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=32.0,
        help="take whole documents up to this size (default: %(default)s)",
    )
    parser.add_argument(
        "--min-tokens",
        type=int,
        default=4097,
        help="refuse a smaller corpus (default: %(default)s)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args, console, start = _parser().parse_args(argv), Console(highlight=False), time.monotonic()
    documents = Documents(
        inputs=args.input, json_key=args.json_key, limit=int(args.max_megabytes * MEGABYTE)
    )
    try:
        corpus, how = prepare(documents, args.output, min_tokens=args.min_tokens)
    except CorpusError as error:
        errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        errors.print(f"corpus: {error}", style="red")
        return 1
    lines = [
        f"corpus {how} in {time.monotonic() - start:.1f} s: {corpus.documents} documents, "
        f"{corpus.tokens} tokens, the longest document {corpus.longest} tokens",
        f"unigram entropy {corpus.unigram_entropy_nats:.4f} nats; {corpus.prefix}.bin",
    ]
    if documents.was_cut:
        lines.append(f"cut at --max-megabytes {args.max_megabytes:g}: the rest is not in it")
    if documents.left_out:
        some = ", ".join(map(str, sorted(documents.left_out)[:3]))
        lines.append(f"left out, not UTF-8: {len(documents.left_out)} files ({some} ...)")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
