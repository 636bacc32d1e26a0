"""Cached indices that cannot be right, and tokens beyond the vocabulary, are named. (fast tier)"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
from megatron.core.datasets.blended_dataset import BlendedDataset  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer  # noqa: E402

from megatron_burst.data_checks import data_indices  # noqa: E402

SAMPLES = 40  # several epochs
REPLACED = {
    GPTDataset: (
        "_build_document_sample_shuffle_indices",
        "_query_document_sample_shuffle_indices",
    ),
    BlendedDataset: ("_build_indices",),
}


@pytest.fixture(autouse=True)
def attached(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    for holder, names in REPLACED.items():
        for name in names:
            monkeypatch.setattr(holder, name, getattr(holder, name))
    args = argparse.Namespace(padded_vocab_size=128)
    monkeypatch.setattr(data_indices.training, "get_args", lambda: args)
    data_indices.attach()
    return args


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., Any]:
    """The training and the validation set of two files, with caches."""
    for name, last in (("a", 99), ("b", 127)):
        builder = indexed_dataset.IndexedDatasetBuilder(f"{tmp_path / name}.bin", dtype=np.uint16)
        for length in (40, 1, 33, 0, 7, 90):
            builder.add_document(np.arange(last + 1 - length, last + 1), [length])
        builder.finalize(f"{tmp_path / name}.idx")

    def build(*names: str, **changes: Any) -> Any:
        settings = {
            "random_seed": 1,
            "sequence_length": 16,
            "blend": (
                [str(tmp_path / name) for name in names or "ab"],
                None if names else [0.3, 0.7],
            ),
            "split": "60,40,0",
            "path_to_cache": str(tmp_path / "cache"),
            "tokenizer": NullTokenizer(128, eod_id=127),
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
        }
        config = GPTDatasetConfig(**settings | changes)
        sizes = [SAMPLES, 2, 0]
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()

    return build


@pytest.mark.parametrize(
    "changes",
    [{}, {"drop_last_partial_validation_sequence": False}, {"add_extra_token_to_sequence": False}],
)
def test_what_megatron_makes_passes(built: Any, changes: dict[str, Any]) -> None:
    for _ in range(2):  # made, then read
        train, valid, _ = built(**changes)
        assert len([train[number] for number in range(len(train))]) == SAMPLES
        assert [valid[number] for number in range(len(valid))]
    assert len(built("a", path_to_cache=None, **changes)[0]) >= SAMPLES


def test_a_set_without_a_sample_is_named(built: Any, tmp_path: Path) -> None:
    """Its last two sequences have 97 tokens; of what is only evaluated no epoch is repeated."""
    with pytest.raises(ValueError, match=r"a: test has 97 tokens, and a sample takes 129: pass it"):
        built("a", sequence_length=128, split="67,0,33")
    assert len(built("a", sequence_length=96, split="67,0,33")[2]) == 1


def test_caches_that_are_to_be_loaded_fast_are_taken_as_they_are(
    built: Any, tmp_path: Path
) -> None:
    one = ([str(tmp_path / "a")], None)
    apart = {"blend": None, "split": None, "blend_per_split": [one, one, None]}
    whole, fast = (built(**apart, fast_cache_load=fast)[0] for fast in (False, True))
    assert fast[SAMPLES - 1]["tokens"].equal(whole[SAMPLES - 1]["tokens"])


def zeroed(data: bytes) -> bytes:
    return data[:128] + bytes(len(data) - 128)


def one_larger(data: bytes) -> bytes:
    return data[:132] + bytes([data[132] + 1]) + data[133:]


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "garbled": lambda data: b"\0" * len(data),
    "a header that is no text": lambda data: data[:20] + b"\x1c" + data[21:],
    "an archive": lambda data: b"PK\3\4" + data[4:],
    "zeroed": zeroed,
    "a number": one_larger,
    "negative": lambda data: data[:128] + b"\xff" * 8 + data[136:],
    "floats": lambda data: data.replace(b"<i", b"<f", 1).replace(b"<u", b"<f", 1),
}
AFFIXES = ("document_index", "sample_index", "shuffle_index", "dataset_index")
AFFIXES = (*AFFIXES, "dataset_sample_index")


@pytest.mark.parametrize("affix", AFFIXES)
def test_a_damaged_cache_is_named(built: Any, tmp_path: Path, affix: str) -> None:
    built()
    (file, *_) = sorted((tmp_path / "cache").glob(f"*-train-{affix}.npy"))
    whole = file.read_bytes()
    for name, damage in DAMAGES.items():
        damaged = damage(whole)
        if damaged == whole:
            continue
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged: .*delete it; it is made anew") as told:
            built()
        named = affix.replace("dataset_index", "dataset_sample_index")  # one without the other
        assert str(file) in str(told.value) or f"-{named}.npy" in str(told.value), name
    file.unlink()
    built()
    assert file.read_bytes() == whole


def test_sums_of_a_blend_of_very_many_samples_are_exact() -> None:
    samples = np.arange(2**31 - 2**22, 2**31 - 1, dtype=np.int64)
    sets = (np.arange(len(samples)) % 3 > 0).astype(np.int16)
    found = data_indices._sums(sets, samples, 3)
    assert found.tolist() == [int(samples[sets == n].sum()) for n in range(3)]


def test_a_token_beyond_the_vocabulary_is_named(
    built: Any, tmp_path: Path, attached: argparse.Namespace
) -> None:
    attached.padded_vocab_size = 127
    train = built("a")[0]
    assert train[0]["tokens"].max() < 127
    train = built("b")[0]
    with pytest.raises(
        ValueError, match=r"token \d+ of sequence \d is 127, and the embedding"
    ) as e:
        [train[number] for number in range(len(train))]
    assert f"{tmp_path / 'b'}.bin: token" in str(e.value) and "has 127 rows" in str(e.value)
