"""The corpus command: Megatron reads what it writes, and wrong input is named. (fast tier)"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_burst.tools import corpus
from megatron_burst.tools.documents import Documents


def run(output: Path, *arguments: object) -> int:
    return corpus.main(["--output", str(output), "--min-tokens", "1", *map(str, arguments)])


def facts(output: Path) -> dict:
    return json.loads((output / "corpus.json").read_text())


def tokens_of(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[index].tolist() for index in range(len(dataset))]


def text_file(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8"))
    return path


def test_documents_are_their_bytes_and_an_end_token(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    text_file(folder / "b" / "two.txt", "zwei ü")
    text_file(folder / "a.txt", "one\n")
    text_file(folder / ".hidden", "no")
    text_file(folder / "empty.txt", "")
    assert run(tmp_path, "--input", folder) == 0
    assert tokens_of(facts(tmp_path)["prefix"]) == [
        [*b"one\n", 256],
        [*"zwei ü".encode(), 256],
    ]


def test_facts_are_those_of_the_tokens(tmp_path: Path) -> None:
    run(tmp_path, "--input", text_file(tmp_path / "x.txt", "aaab"))
    found = facts(tmp_path)
    assert (found["documents"], found["tokens"], found["longest"]) == (1, 5, 5)
    expected = -(0.6 * math.log(0.6) + 2 * 0.2 * math.log(0.2))
    assert found["unigram_entropy_nats"] == pytest.approx(expected, rel=1e-12)


def test_megatrons_tokenizer_has_the_same_vocabulary_and_end_token(tmp_path: Path) -> None:
    run(tmp_path, "--input", text_file(tmp_path / "x.txt", "text"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--null-tokenizer-eod-id", type=int)
    args = parser.parse_args(facts(tmp_path)["tokenizer_args"])
    args.pad_vocab_size = False
    tokenizer = build_tokenizer(args)
    assert tokenizer.vocab_size == corpus.VOCAB_SIZE
    assert tokenizer.eod == tokens_of(facts(tmp_path)["prefix"])[0][-1] == corpus.END_OF_DOCUMENT


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"body": "one"}\n\n{"body": "two", "other": 3}\n')
    assert run(tmp_path, "--input", lines, "--json-key", "body") == 0
    assert tokens_of(facts(tmp_path)["prefix"]) == [[*b"one", 256], [*b"two", 256]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "no text"}', "x.jsonl, line 2: no text under the key 'text'"),
        ('{"text": 3}', "x.jsonl, line 2: no text under the key 'text'"),
        ('["text"]', "x.jsonl, line 2: no text under the key 'text'"),
        ('{"text": ', "x.jsonl, line 2: not JSON"),
        ('{"text": "\\ud800"}', "x.jsonl, line 2: half a surrogate pair"),
    ],
)
def test_a_bad_jsonl_line_is_named_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"text": "fine"}\n' + line + "\n")
    assert run(tmp_path, "--input", lines) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_input_that_is_no_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw").write_bytes(b"ab\xff")
    text_file(tmp_path / "empty.txt", "")
    text_file(tmp_path / "short.txt", "short")
    for arguments, message in [
        (["--input", tmp_path / "absent"], "no such file"),
        (["--input", tmp_path / "raw"], "not UTF-8 text at byte 2"),
        (["--input", tmp_path / "empty.txt"], "no text"),
        (["--input", tmp_path / "short.txt", "--min-tokens", 7], "6 tokens, --min-tokens asks for"),
    ]:
        assert run(tmp_path / "out", *arguments) == 1
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_what_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "raw").write_bytes(b"\xff")
    text_file(folder / "a", "x" * 600)
    text_file(folder / "b", "y" * 600)
    assert run(tmp_path, "--input", folder, "--max-megabytes", 0.001) == 0
    assert facts(tmp_path)["tokens"] == 601
    said = capsys.readouterr().out
    assert "cut at --max-megabytes 0.001" in said
    assert run(tmp_path, "--input", folder) == 0
    said = capsys.readouterr().out
    assert "cut" not in said
    assert "left out, not UTF-8: 1 files" in said


def test_the_same_text_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_file(tmp_path / "x.txt", "some text")
    pair = [tmp_path / "out" / "corpus.bin", tmp_path / "out" / "corpus.idx"]
    run(tmp_path / "out", "--input", text)
    first = [path.read_bytes() for path in pair]
    times = [path.stat().st_mtime_ns for path in pair]
    run(tmp_path / "out", "--input", text)
    assert "corpus reused" in capsys.readouterr().out
    assert times == [path.stat().st_mtime_ns for path in pair]
    pair[0].write_bytes(first[0][:-2])
    run(tmp_path / "out", "--input", text)
    assert "corpus written" in capsys.readouterr().out
    assert first == [path.read_bytes() for path in pair]
    run(tmp_path / "out", "--input", text_file(text, "other text"))
    assert "corpus written" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "corpus.bin",
        "corpus.idx",
        "corpus.json",
    ]


def test_a_failing_write_leaves_the_old_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "corpus"
    corpus.build(["old"], prefix)
    before = prefix.with_suffix(".bin").read_bytes()

    def failing() -> object:
        yield "new"
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        corpus.build(failing(), prefix)  # type: ignore[arg-type]
    assert prefix.with_suffix(".bin").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_ready_pair_is_only_measured(tmp_path: Path, suffix: str) -> None:
    ready = tmp_path / "ready"
    corpus.build(["abc", "d"], ready)
    assert run(tmp_path / "out", "--input", f"{ready}{suffix}") == 0
    found = facts(tmp_path / "out")
    assert (found["prefix"], found["documents"], found["tokens"]) == (str(ready), 2, 6)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["corpus.json"]


def test_a_broken_pair_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready = tmp_path / "ready"
    corpus.build(["abc"], ready)
    with ready.with_suffix(".bin").open("ab") as data:
        data.write(b"\0\0")
    assert run(tmp_path, "--input", ready) == 1
    assert "10 bytes, its index says 4 tokens of 2 bytes" in capsys.readouterr().err
    ready.with_suffix(".idx").write_bytes(b"nothing")
    assert run(tmp_path, "--input", ready) == 1
    assert "not an index that Megatron reads" in capsys.readouterr().err
    ready.with_suffix(".bin").unlink()
    assert run(tmp_path, "--input", ready) == 1
    assert "missing" in capsys.readouterr().err


def test_a_pair_without_a_common_end_token_names_none(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "p.bin"), dtype=np.int32)
    for tokens in ([1, 2, 700], [3, 4]):
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(str(tmp_path / "p.idx"))
    found = corpus.measure(tmp_path / "p")
    assert found.tokenizer_args == ["--tokenizer-type", "NullTokenizer", "--vocab-size", "701"]


def test_megatrons_gpt_dataset_serves_the_text(tmp_path: Path) -> None:
    run(tmp_path, "--input", text_file(tmp_path / "x.txt", "abcdefgh" * 40))
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
    first = next(iter(Documents(inputs=[])))
    assert "import" in first
    assert "\n" in first
