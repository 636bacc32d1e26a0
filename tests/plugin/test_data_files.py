"""Files of a data set that are missing or truncated are named before training. (fast tier)"""

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

from megatron_burst.data_checks import data_files  # noqa: E402
from megatron_burst.data_checks.data_files import check_data_files  # noqa: E402


def arguments(*data_path: str, **changes: Any) -> Any:
    names = "train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path"
    defaults = dict.fromkeys(names.split()) | {"sft": False, "dataloader_type": None}
    defaults |= {"split": "100,0,0"}
    return SimpleNamespace(**defaults | {"data_path": list(data_path)} | changes)


@pytest.fixture(params=[numpy.uint8, numpy.uint16, numpy.int32])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Megatron's own writer makes the files."""
    made = tmp_path / "corpus"
    builder = indexed_dataset.IndexedDatasetBuilder(f"{made}.bin", dtype=request.param)
    for length in (5, 0, 7):
        builder.add_document(numpy.arange(length), [length])
    builder.finalize(f"{made}.idx")
    return str(made)


def refusal(*data_path: str, **changes: Any) -> str:
    with pytest.raises(ValueError, match="the data set cannot be read:\n") as error:
        check_data_files(arguments(*data_path, **changes))
    return str(error.value)


def test_whole_files_pass_with_and_without_weights(prefix: str) -> None:
    check_data_files(arguments(prefix))
    check_data_files(arguments("0.3", prefix, "7e-1", prefix))
    check_data_files(arguments(train_data_path=[prefix], valid_data_path=["1", prefix]))


def test_every_byte_that_is_missing_is_noticed(prefix: str) -> None:
    for suffix in (".idx", ".bin"):
        file = Path(prefix + suffix)
        whole = file.read_bytes()
        for size in range(len(whole)):
            file.write_bytes(whole[:size])
            assert str(file) in refusal(prefix), size
        file.write_bytes(whole)
    check_data_files(arguments(prefix))


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_all_broken_files_are_named_at_once(prefix: str, suffix: str) -> None:
    other = prefix + "2"
    for end in (".idx", ".bin"):
        shutil.copy(prefix + end, other + end)
    for name in (prefix, other):
        Path(name + suffix).unlink()
    Path(other + suffix).mkdir()
    _, first, second = refusal("1", prefix, "2", other).splitlines()
    assert "No such file or directory" in first and prefix + suffix in first
    assert "Is a directory" in second and other + suffix in second


def test_another_format_is_no_index(prefix: str) -> None:
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    index.write_bytes(b"x" * len(whole))
    assert f"is no index of tokens, or is truncated: bad header, cannot read: {index}" in refusal(
        prefix
    )
    index.write_bytes(whole[:9] + struct.pack("<Q", 2) + whole[17:])
    assert "bad version" in refusal(prefix)


@pytest.mark.parametrize(
    ("split", "fault"),
    [
        ("60,0,40", None),
        ("1,1,1", "--split 1,1,1 gives valid none of the tokens of its 3 sequences"),
        ("9,0,1", "--split 9,0,1 gives test none of"),
        (None, "--split 969, 30, 1 gives valid none of"),  # Megatron's default
    ],
)
def test_no_part_of_a_split_is_empty(prefix: str, split: str | None, fault: str | None) -> None:
    """Megatron would look for its first token for ever."""
    if fault is None:
        check_data_files(arguments(prefix, split=split))
    else:
        assert f"{prefix}: {fault}" in refusal("1", prefix, split=split)
    check_data_files(arguments(data_path=None, valid_data_path=[prefix], split=None))


def test_what_is_no_file_of_tokens_is_left_alone() -> None:
    check_data_files(arguments("/nowhere/a", sft=True))
    check_data_files(arguments("/nowhere/a", dataloader_type="external"))
    check_data_files(arguments("s3://bucket/a", "msc://profile/a"))
    check_data_files(arguments(data_path=None))


def with_change(index: Path, field: str, at: int, value: int) -> None:
    """Change one number of the index of `prefix`: 3 sequences in 3 documents."""
    start, size = {"lengths": (34, 4), "pointers": (46, 8), "documents": (70, 8)}[field]
    data = bytearray(index.read_bytes())
    data[start + size * at : start + size * (at + 1)] = value.to_bytes(size, "little", signed=True)
    index.write_bytes(data)


@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        ("lengths", 0, -5, "sequence 0 of 3 has -5 tokens at byte 0, and the one before it ends"),
        ("lengths", 0, 4, "sequence 1 of 3 has 0 tokens at byte "),
        ("lengths", 2, 6, "is of another file: it says "),
        ("pointers", 0, 8, "sequence 0 of 3 has 5 tokens at byte 8, and the one before it ends at"),
        ("pointers", 2, -8, "sequence 2 of 3 has 7 tokens at byte -8, and the one before it ends"),
        ("documents", 0, 1, "documents are sequences [1] to [3], and there are 3"),
        ("documents", 1, 3, "document 1 of 3 is sequences 3 to 2"),
        ("documents", 3, 2, "documents are sequences [0] to [2], and there are 3"),
    ],
)
def test_one_wrong_number_anywhere_in_an_index_is_found(
    prefix: str, field: str, at: int, value: int, message: str
) -> None:
    with_change(Path(f"{prefix}.idx"), field, at, value)
    assert message in refusal(prefix)


def test_an_index_of_zeros_of_floats_or_of_other_tokens(prefix: str) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    whole = index.read_bytes()
    index.write_bytes(whole[:34] + bytes(len(whole) - 34))
    assert "its 3 sequences have no tokens" in refusal(prefix)
    index.write_bytes(whole[:17] + b"\7" + whole[18:])
    assert "its tokens are float32" in refusal(prefix)
    index.write_bytes(whole[:18] + b"\xff" * 16 + whole[34:])
    assert "is no index of tokens, or is truncated" in refusal(prefix)
    index.write_bytes(whole)
    tokens.write_bytes(tokens.read_bytes() + b"\0")
    assert f"of {tokens.stat().st_size} bytes of {tokens}" in refusal(prefix)


@pytest.mark.parametrize("prefix", [numpy.uint16], indirect=True)
def test_every_flipped_bit_of_what_counts_is_found(prefix: str) -> None:
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    for bit in range(8 * 9, 8 * len(whole), 3):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        index.write_bytes(changed)
        if bit // 8 != 17 and not 78 <= bit // 8 < 94:  # another type, or border of documents
            assert prefix in refusal(prefix), bit


def test_an_index_longer_than_what_is_looked_at_once(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_AT_ONCE", 1)
    check_data_files(arguments(prefix))
    with_change(Path(f"{prefix}.idx"), "pointers", 2, 0)
    assert "sequence 2 of 3 has 7 tokens at byte 0, and the one before" in refusal(prefix)


def test_prefixes_in_files_are_looked_at(prefix: str, tmp_path: Path) -> None:
    listed = tmp_path / "list"
    listed.write_text(f"0.5 {prefix}\n0.5 {prefix}2\n")
    assert f"{prefix}2.idx" in refusal(data_path=None, data_args_path=str(listed))
    listed.write_text(json.dumps({"train": f"1 {prefix}", "valid": [f"{prefix}3"], "test": None}))
    assert f"{prefix}3.idx" in refusal(data_path=None, per_split_data_args_path=str(listed))
    for text in ("", "[" * 100000, '{"train": "a"}', "[]", '{"train": 3}'):
        listed.write_text(text)
        with pytest.raises(ValueError, match=f"--per-split-data-args-path {listed} is no JSON of"):
            check_data_files(arguments(data_path=None, per_split_data_args_path=str(listed)))
