"""Looks at what Megatron's data sets read: cached indices, and tokens beyond the vocabulary.

Megatron takes a cached file as it is. One that is cut off fails at every start until it is deleted,
one of zeros trains on other samples; and a token without a row in the embedding is an index error
without a name, on a GPU one of the device, or with tensor parallelism nothing at all.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.training as training
import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from megatron_burst.plugin.compat import wrap

_PAIRS = "sample_index"  # of a document and where in it a sample begins
_OF_SAMPLES = ("document_index", _PAIRS, "shuffle_index")
_OF_BLEND = ("dataset_index", "dataset_sample_index")
_AT_ONCE = 2**20  # documents
type Indices = tuple[Any, ...]


def attach() -> None:
    """Let Megatron's data sets of documents, and their blends, look at what they read."""
    samples = functools.partial(_checked, _OF_SAMPLES, _damage_of_samples)
    blend = functools.partial(_checked, _OF_BLEND, _damage_of_blend)
    wrap(GPTDataset, "_build_document_sample_shuffle_indices", samples)
    wrap(BlendedDataset, "_build_indices", blend)
    wrap(GPTDataset, "_query_document_sample_shuffle_indices", _with_known_tokens)


def _checked(
    names: tuple[str, ...],
    damage: Callable[..., Iterator[tuple[str, str]]],
    build: Callable[..., Indices],
) -> Callable[..., Indices]:
    """Megatron's method that builds or loads indices; ValueError for one that cannot be right."""

    @functools.wraps(build)
    def build_and_look(dataset: Any) -> Indices:
        paths = [path for name in names if (path := _cached(dataset, f"{name}.npy"))]
        for path in paths if paths and all(path.is_file() for path in paths) else ():
            _read(path)
        indices = build(dataset)
        is_late = any(index is None for index in indices)  # --dataloader-defer-npy-index-mmap
        if is_late or dataset.config.fast_cache_load:
            return indices
        for name, text in itertools.chain(_kinds(names, indices), damage(dataset, *indices)):
            if text:
                raise ValueError(_remedy(_cached(dataset, f"{name}.npy") or name, text))
        return indices

    return build_and_look


def _cached(dataset: Any, suffix: str) -> Path | None:
    """Where Megatron caches a file of a data set; None for one that is not cached."""
    split = getattr(dataset, "index_split", None) or dataset.split
    folder, kind = dataset.config.path_to_cache, type(dataset).__name__
    if not folder and (dataset.config.mock or not hasattr(dataset, "dataset")):
        return None
    folder = folder or os.path.join(dataset.dataset.path_prefix, "cache", f"{kind}_indices")
    return Path(folder, f"{dataset.unique_description_hash}-{kind}-{split.name}-{suffix}")


def _read(path: Path) -> None:
    try:
        np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # whatever parsing a garbled header brings
        raise ValueError(_remedy(path, f"it cannot be read: {error}")) from error


def _remedy(file: object, text: str) -> str:
    return f"{file}, an index that Megatron cached, is damaged: {text}: delete it; it is made anew"


def _kinds(names: tuple[str, ...], indices: Indices) -> Iterator[tuple[str, str]]:
    for name, index in zip(names, indices, strict=True):
        if index.dtype.kind not in "iu" or index.shape[1:] != ((2,) if name == _PAIRS else ()):
            yield name, f"it has shape {index.shape} of {index.dtype}"


def _damage_of_samples(
    dataset: Any, documents: Any, samples: Any, shuffled: Any
) -> Iterator[tuple[str, str]]:
    """Yield each index and what is wrong with it, "" for nothing.

    Raises:
        ValueError: there is no sample, of which Megatron says no more than that.
    """
    chosen, count = dataset.indices, len(samples) - 1  # the last one says where they end
    if not count:
        tokens = dataset.dataset.sequence_lengths[chosen].sum(dtype=np.int64)
        raise ValueError(
            f"{dataset.dataset_path}: {dataset.index_split.name} has {tokens} tokens, and a sample "
            f"takes {dataset.config.sequence_length + 1}: pass it more, or --split with 0 for it"
        )
    epochs = max(1, len(documents) // len(chosen))
    bounds, total = (int(chosen.min()), int(chosen.max())), int(chosen.sum(dtype=np.int64))
    yield "document_index", _wrong(documents, epochs * len(chosen), bounds, epochs * total)
    yield _PAIRS, _uneven(dataset, samples, documents)
    yield "shuffle_index", _wrong(shuffled, count, (0, count - 1), count * (count - 1) // 2)


def _wrong(index: Any, length: int, bounds: tuple[int, int], total: int | None = None) -> str:
    """Say how an index has not so many entries, within the bounds, with this sum; "" if it has."""
    least, most = bounds
    if len(index) != length:
        return f"it has {len(index)} entries, not {length}"
    beyond = (index < least) | (index > most)
    if beyond.any():
        n = int(beyond.argmax())
        return f"entry {n} of {length} is {index[n]}, not {least} to {most}"
    found = int(index.sum(dtype=np.int64))
    return "" if total in (None, found) else f"its sum is {found}, not {total}: some are missing"


def _uneven(dataset: Any, samples: Any, documents: Any) -> str:
    """Say which sample does not begin a sequence length behind the one before it."""
    tokens, config = dataset.config.sequence_length, dataset.config
    at, starts, before = samples[:, 0], samples[:, 1].astype(np.int64), 0
    falls = at[1:] < at[:-1]
    if text := _wrong(at, len(at), (0, len(documents) - 1)):
        return text
    if falls.any():
        return f"sample {int(falls.argmax()) + 1} begins in a document before that of the last one"
    for first in range(0, len(documents), _AT_ONCE):
        sizes = dataset.dataset.sequence_lengths[documents[first : first + _AT_ONCE]]
        ends = np.cumsum(sizes, dtype=np.int64) + before
        here = slice(*np.searchsorted(at, (first, first + _AT_ONCE)))
        starts[here] += (ends - sizes)[at[here] - first]
        before = int(ends[-1])
    steps = np.diff(starts, prepend=-tokens)
    wrong = steps != tokens
    if dataset.index_split is Split.valid and not config.drop_last_partial_validation_sequence:
        wrong[1:][-2:] &= (steps[1:][-2:] < 0) | (steps[1:][-2:] > tokens)  # a rest
    n = int(wrong.argmax())
    if not wrong[n]:
        return ""
    return f"sample {n} begins at token {starts[n]}, {steps[n]} behind the one before, not {tokens}"


def _damage_of_blend(dataset: Any, sets: Any, samples: Any) -> Iterator[tuple[str, str]]:
    """Yield each index and what is wrong with it, "" for nothing."""
    size = sum(dataset.weights) if dataset.size is None else dataset.size
    number = len(dataset.datasets)
    yield "dataset_index", _wrong(sets, size, (0, number - 1))
    counts = np.bincount(sets, minlength=number)
    yield "dataset_sample_index", _wrong(samples, size, (0, int(counts.max()) - 1))
    wrong = _sums(sets, samples, number) != counts * (counts - 1) // 2
    if wrong.any():
        n = int(wrong.argmax())
        yield "dataset_sample_index", f"it does not hold each of {counts[n]} of data set {n} once"


def _sums(sets: Any, samples: Any, count: int) -> Any:
    """Return the exact sums of the samples of each set.

    NumPy adds in float64, in which those of 2**27 samples are not exact, but those of halves are.
    """
    low, high = (
        np.bincount(sets, weights=half, minlength=count).astype(np.int64)
        for half in (samples & 0xFFFF, samples >> 16)
    )
    return (high << 16) + low


def _with_known_tokens(query: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's method that reads a sample; ValueError for a token beyond the embedding."""

    @functools.wraps(query)
    def query_and_look(dataset: Any, idx: int) -> Any:
        text, documents, lengths = query(dataset, idx)
        most = training.get_args().padded_vocab_size
        if text.view(np.uint64).max() < most:  # nor is one negative
            return text, documents, lengths
        for document in documents:
            tokens = dataset.dataset.get(int(document))
            wrong = (tokens >= most) | (tokens < 0)
            wrong &= tokens != dataset._pad_token_id
            if wrong.any():
                n = int(wrong.argmax())
                raise ValueError(
                    f"{dataset.dataset.path_prefix}.bin: token {n} of sequence {document} is "
                    f"{tokens[n]}, and the embedding has {most} rows: take the tokenizer that the "
                    "data were made with (--tokenizer-type, --tokenizer-model, --vocab-size)"
                )
        return text, documents, lengths

    return query_and_look
