"""Chunks from a memory limit or a number of tokens,. (fast tier)"""

import dataclasses

import pytest
import torch

from megatron_burst.loss.chunk_size import MIB, Sizes, of_tokens, within
from tests.loss.oracle import make_case, ours

SIZES = Sizes(tokens=8192, vocabulary=32768, hidden=1024, dtype=torch.float32)


@pytest.mark.parametrize("limit", [16, 64, 512, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sums_apart", [False, True])
def test_chunks_are_the_largest_even_ones_within_the_limit(
    limit: int, dtype: torch.dtype, sums_apart: bool
) -> None:
    sizes = dataclasses.replace(SIZES, dtype=dtype, sums_apart=sums_apart)
    found = within(sizes, limit * MIB)
    assert found.peak <= limit * MIB
    chunks = -(-sizes.tokens // found.tokens)
    assert found.tokens * (chunks - 1) < sizes.tokens <= found.tokens * chunks
    if chunks > 1:  # one chunk less would not fit
        larger = -(-sizes.tokens // (chunks - 1))
        more = (larger - found.tokens) * sizes.for_a_token_of_the_chunk()
        assert found.peak + more > limit * MIB


def test_a_token_of_logits_in_every_copy_that_lives() -> None:
    row = SIZES.vocabulary
    expected = {
        (torch.float32, 0): 4 * row + 8 * 1024,
        (torch.bfloat16, 0): 6 * row + 6 * 1024,
        (torch.float16, 1): 10 * row + 6 * 1024,
        (torch.float64, 2): 24 * row + 16 * 1024,
    }
    for (dtype, beside), most in expected.items():
        sizes = dataclasses.replace(SIZES, dtype=dtype, beside=beside)
        assert 0 <= sizes.for_a_token_of_the_chunk() - most <= 104


def test_one_token_that_does_not_fit_is_an_error_with_what_is_needed() -> None:
    tight = dataclasses.replace(SIZES, vocabulary=2**20, tokens=1000)
    with pytest.raises(ValueError, match=r"too small for one token, with .*at least 5 MiB"):
        within(tight, 4 * MIB)
    assert within(tight, 5 * MIB).tokens == 1
    # What is beside a chunk grows with the limit.
    of_eight = dataclasses.replace(
        SIZES, vocabulary=128256 // 8, hidden=4096, ranks=8, parts=8, sums_apart=True
    )
    with pytest.raises(ValueError, match=r"at least (\d+) MiB") as error:
        within(of_eight, MIB)
    least = int(str(error.value).split()[-2])
    assert within(of_eight, least * MIB).tokens
    with pytest.raises(ValueError, match=f"at least {least} MiB"):
        within(of_eight, (least - 1) * MIB)


@pytest.mark.parametrize("tokens", [4 * 2**20, 2**30])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_no_length_is_refused_for_its_statistics(tokens: int, ranks: int) -> None:
    """They take an eighth of the limit, however many ranks they come from."""
    for limit in (64, 512):
        sizes = dataclasses.replace(SIZES, tokens=tokens, ranks=ranks, vocabulary=16 * 1024)
        found = within(sizes, limit * MIB)
        assert found.peak <= limit * MIB and found.tokens >= 64
        assert found.combined * sizes.for_a_token_of_statistics <= limit * MIB // 8
        assert found.combined % found.tokens == 0 and found.combined > 4 * found.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sums_apart", [False, True])
@pytest.mark.parametrize("tokens", [100, 32 * 1024, 2**22])
def test_by_default_chunks_are_worth_reading_dw(
    tokens: int, sums_apart: bool, dtype: torch.dtype
) -> None:
    large = Sizes(tokens=tokens, vocabulary=2**17, hidden=4096, dtype=dtype, sums_apart=sums_apart)
    found = within(large, None)
    assert found.tokens >= min(tokens, 2048) and found.rows is None
    assert found.peak <= large.default_limit and "max(512 MiB" in str(found)
    if tokens > 2048:  # the limit is no larger than it need be
        assert found.peak > 0.85 * large.default_limit
    small = dataclasses.replace(large, vocabulary=2**13)
    assert small.default_limit == 512 * MIB and within(small, None).peak <= 512 * MIB


def test_short_sequences_are_combined_at_once() -> None:
    assert within(SIZES, 64 * MIB).combined == SIZES.tokens


def test_sums_of_dw_that_do_not_fit_are_made_in_blocks() -> None:
    apart = dataclasses.replace(SIZES, dtype=torch.bfloat16, sums_apart=True)
    assert within(apart, 160 * MIB).rows
    assert within(apart, 512 * MIB).rows is None
    found = within(apart, 64 * MIB)
    assert found.rows and found.rows * apart.row_of_sums <= 32 * MIB
    assert found.peak <= 64 * MIB and f"dW in blocks of {found.rows} rows" in str(found)
    assert of_tokens(apart, 100).rows is None


@pytest.mark.parametrize("objective", [{}, {"label_smoothing": 0.1, "logit_softcap": 4.0}])
def test_dw_in_blocks_is_the_same(objective: dict[str, float]) -> None:
    case = make_case((40,), 3000, 64, torch.bfloat16)
    arguments = objective
    at_once = ours(case, memory_mb=8, **arguments)
    in_blocks = ours(case, memory_mb=0.5, **arguments)  # dW alone takes 0.73 MiB in float32
    for a, b in zip(at_once, in_blocks, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


def test_a_chunk_size_is_taken_as_it_is() -> None:
    assert of_tokens(SIZES, 100).tokens == 100
    assert of_tokens(SIZES, 10**9).tokens == SIZES.tokens
    with pytest.raises(ValueError, match="--lm-head-chunk-size.*positive, got 0"):
        of_tokens(SIZES, 0)
