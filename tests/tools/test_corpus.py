"""The corpus command: Megatron reads what it writes, and wrong input is named. (fast tier)"""

import argparse
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_burst.tools import corpus
from tests.tools.conftest import Printed

type Make = Callable[..., str]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, printed: Printed) -> Make:
    """Writes a corpus, for which small texts will do, and returns what is said of it."""
    monkeypatch.setattr(corpus, "LEAST", 1)

    def of(output: Path, *words: object, status: int = 0) -> str:
        return printed(["corpus", "--output", str(output), "--input", *map(str, words)], status)

    return of


def facts(output: Path) -> dict:
    return json.loads((output / "corpus.json").read_text())


def tokens_of(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[index].tolist() for index in range(len(dataset))]


def text_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def test_documents_are_their_bytes_and_an_end_token(tmp_path: Path, make: Make) -> None:
    folder = tmp_path / "in"
    text_file(folder / "b" / "two.txt", "zwei ü")
    text_file(folder / "a.txt", "one\n")
    text_file(folder / ".hidden", "no")
    text_file(folder / "b" / "__pycache__" / "two.pyc", "no\0")
    text_file(folder / "empty.txt", "")
    lines = text_file(tmp_path / "x.jsonl", '{"text": "one"}\n\n{"text": "two", "other": 3}\n')
    for given, texts in ((folder, [b"one\n", "zwei ü".encode()]), (lines, [b"one", b"two"])):
        make(tmp_path, given)
        found = facts(tmp_path)
        assert tokens_of(found["prefix"]) == [[*text, 256] for text in texts]
        assert (found["documents"], found["tokens"]) == (2, sum(map(len, texts)) + 2)


def test_files_are_those_that_megatron_writes(tmp_path: Path) -> None:
    corpus.Corpus([b"one", b"", b"two\xff"], False).write(tmp_path)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), DType.optimal_dtype(257))
    for words in ([*b"one", 256], [256], [*b"two\xff", 256]):
        builder.add_document(np.array(words), [len(words)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{suffix}" for name in ("corpus", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes(), suffix


def test_a_corpus_needs_no_megatron_and_no_torch(tmp_path: Path) -> None:
    block = "import sys\nfor name in ('megatron', 'torch'): sys.modules[name] = None\n"
    text = text_file(tmp_path / "x.txt", "text " * 1000)
    words = ["corpus", "--output", str(tmp_path), "--input", str(text)]
    run = f"from megatron_burst.tools.command import main\nsys.exit(main({words!r}))"
    subprocess.run([sys.executable, "-c", block + run], check=True, timeout=200)
    assert len(IndexedDataset(facts(tmp_path)["prefix"])) == facts(tmp_path)["documents"]


def test_megatrons_tokenizer_has_the_same_vocabulary_and_end_token(
    tmp_path: Path, make: Make
) -> None:
    make(tmp_path, text_file(tmp_path / "x.txt", "text"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--null-tokenizer-eod-id", type=int)
    args = parser.parse_args(facts(tmp_path)["tokenizer_args"])
    args.pad_vocab_size = False
    tokenizer = build_tokenizer(args)
    assert tokenizer.vocab_size == corpus.VOCAB_SIZE
    assert tokenizer.eod == tokens_of(facts(tmp_path)["prefix"])[0][-1] == corpus.END_OF_DOCUMENT


def test_paragraphs_are_documents_if_asked_and_lengths_are_said(tmp_path: Path, make: Make) -> None:
    text = text_file(tmp_path / "x.txt", "a\nb\n\n\nccccc\r\n\r\ndd")
    said, flags = make(tmp_path, text, "--paragraphs").splitlines()
    assert tokens_of(facts(tmp_path)["prefix"]) == [[*t, 256] for t in (b"a\nb", b"ccccc", b"dd")]
    assert "3 documents, 13 tokens; mean 4, median 4, longest 6" in said
    assert f"--data-path {tmp_path / 'corpus'} --tokenizer-type NullTokenizer --vocab-size" in flags


def test_it_says_of_which_files(tmp_path: Path, make: Make) -> None:
    files = [text_file(tmp_path / "in" / name, "text") for name in ("a.txt", "b.txt", "c.csv")]
    assert "of files 2 .txt, 1 .csv: 3 documents" in make(tmp_path, files[0].parent)


@pytest.mark.parametrize(
    "line", ['{"body": "no text"}', '{"text": 3}', '["text"]', '{"text": ', '{"text": "\\ud800"}']
)
def test_a_bad_jsonl_line_is_named_by_its_number(tmp_path: Path, make: Make, line: str) -> None:
    lines = text_file(tmp_path / "x.jsonl", '{"text": "fine"}\n' + line + "\n")
    assert "x.jsonl, line 2: no JSON with a text" in make(tmp_path, lines, status=1)


def test_input_that_is_no_text_is_refused(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "LEAST", 7)
    for path, message in [
        (tmp_path / "absent", "no such file"),
        (text_file(tmp_path / "empty.txt", ""), "too little text: 0 tokens"),
        (text_file(tmp_path / "short.txt", "short"), "6 tokens, at least 7 are needed"),
        (text_file(tmp_path / "x.png", "PNG\0 bytes"), f"--input {tmp_path}/x.png has NUL bytes"),
    ]:
        assert message in make(tmp_path / "out", path, status=1)


def test_too_much_is_cut_between_documents(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_file(tmp_path / "in" / "a", "x" * 600)
    folder = text_file(tmp_path / "in" / "b", "y" * 600).parent
    assert "cut at" not in make(tmp_path, folder)
    assert facts(tmp_path)["tokens"] == 1202
    monkeypatch.setattr(corpus, "LIMIT", 1000)
    assert "cut at 1000 bytes" in make(tmp_path, folder)
    assert facts(tmp_path)["tokens"] == 601
    monkeypatch.setattr(corpus, "LIMIT", 500)
    said = make(tmp_path, folder, status=1)
    assert "the first document has 600 bytes, and 500 are taken" in said


def test_of_lines_no_more_are_read_than_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "LIMIT", 5000)
    lines = text_file(tmp_path / "x.jsonl", '{"text": "one"}\n' * 200_000)
    tracemalloc.start()
    assert corpus.gather([lines]).is_cut
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_another_text_replaces_the_first_and_has_another_digest(tmp_path: Path, make: Make) -> None:
    text, out = text_file(tmp_path / "x.txt", "some text"), tmp_path / "out"
    make(out, text)
    first = facts(out)
    make(out, text_file(text, "other text"))
    assert tokens_of(first["prefix"]) == [[*b"other text", 256]]
    assert facts(out)["source"] != first["source"]


def test_who_reads_the_old_files_keeps_them(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in place, a mapped file that became shorter would end its reader by SIGBUS."""
    text, out = text_file(tmp_path / "x.txt", "some text" * 1000), tmp_path / "out"
    make(out, text)
    names = ("corpus.bin", "corpus.idx", "corpus.json")
    before = [(out / name).stat() for name in names]
    make(out, text)
    after = [(out / name).stat() for name in names]
    assert [(s.st_ino, s.st_mtime_ns) for s in before] == [(s.st_ino, s.st_mtime_ns) for s in after]
    mapped = IndexedDataset(facts(out)["prefix"])
    text_file(text, "short")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(np, "append", lambda *_: 1 / 0)  # as an error while it writes
        make(out, text)
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    make(out, text)
    assert mapped[0].tolist() == [*b"some text" * 1000, 256]
    assert tokens_of(facts(out)["prefix"]) == [[*b"short", 256]]


def test_megatrons_gpt_dataset_serves_the_text(tmp_path: Path, make: Make) -> None:
    make(tmp_path, text_file(tmp_path / "x.txt", "abcdefgh" * 40))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([facts(tmp_path)["prefix"]], None),
        split="100,0,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=NullTokenizer(corpus.VOCAB_SIZE, eod_id=corpus.END_OF_DOCUMENT),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config)
    sample = builder.build()[0][0]
    text = bytes(sample["tokens"].tolist()[:16]).decode()
    assert text in "abcdefgh" * 40
    assert sample["labels"].tolist()[:15] == sample["tokens"].tolist()[1:16]


def test_the_standard_library_is_the_default() -> None:
    first = next(corpus.documents([]))
    assert b"import" in first and b"\n" in first
