"""Files of a data set that are missing or truncated are named before training. (fast tier)"""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

from megatron_burst.plugin.files.data_files import check_data_files  # noqa: E402


def arguments(*data_path: str, **changes: Any) -> Any:
    names = ("train_data_path", "valid_data_path", "test_data_path")
    defaults = {name: None for name in names} | {"sft": False, "dataloader_type": None}
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


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def replace_by_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "No such file or directory": Path.unlink,
    "Is a directory": replace_by_a_directory,
    "is truncated": cut,
}


@pytest.mark.parametrize("reason", DAMAGES)
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_all_broken_files_are_named_at_once(prefix: str, suffix: str, reason: str) -> None:
    other = prefix + "2"
    for end in (".idx", ".bin"):
        shutil.copy(prefix + end, other + end)
    for name in (prefix, other):
        DAMAGES[reason](Path(name + suffix))
    text = refusal("1", prefix, "2", other)
    lines = [line for line in text.splitlines() if reason in line]
    assert len(lines) == 2
    assert prefix + suffix in lines[0] and other + suffix in lines[1]


def test_another_format_is_no_index(prefix: str) -> None:
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    index.write_bytes(b"x" * len(whole))
    assert f"is no index of tokens, or is truncated: bad header, cannot read: {index}" in refusal(
        prefix
    )
    index.write_bytes(whole[:9] + struct.pack("<Q", 2) + whole[17:])
    assert "bad version" in refusal(prefix)


def test_what_is_no_file_of_tokens_is_left_alone() -> None:
    check_data_files(arguments("/nowhere/a", sft=True))
    check_data_files(arguments("/nowhere/a", dataloader_type="external"))
    check_data_files(arguments("s3://bucket/a", "msc://profile/a"))
    check_data_files(arguments(data_path=None))
