"""How many tokens a chunk has: from a memory limit, or as asked for."""

import itertools
import math
from dataclasses import dataclass, replace

import torch

from megatron_burst.kernels.dtypes import accumulation_dtype

MIB = 2**20
LEAST_MB = 512
ENOUGH = 2048
"""Tokens of a chunk for whose product the whole of dW is worth reading and writing: 2 V d FLOPs a
token stand against 8 V d bytes a chunk, whatever V and d."""
KEPT_MB = 1024  # by default for sums of dW from the forward to the backward
DEFAULT = f"max({LEAST_MB} MiB, 8/7 ({ENOUGH} tokens of a chunk + float32 sums of dW of its own))"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the memory of a call depends on."""

    tokens: int
    vocabulary: int  # rows of the weight on this rank
    hidden: int
    dtype: torch.dtype  # of hidden and weight
    ranks: int = 1  # of the vocabulary
    parts: int = 1  # ranks that hold a part of the tokens each
    statistics: int = 3  # numbers a token's logits leave
    beside: int = 0  # tensors beside the logits: the soft cap's derivative, exponentials
    fused: bool = False  # logits are in the dtype of the weight alone
    sums_apart: bool = False  # dW is summed in memory that is not its gradient's
    kept_apart: bool | None = None  # where the forward makes it; None: without the losses' weights

    @property
    def for_a_token_of_statistics(self) -> int:
        """Bytes of a token whose statistics are combined: those of all ranks, and its loss."""
        return self._wide * (self.statistics * (2 * self.ranks + 2) + 8) + 32

    def for_a_token_of_the_chunk(self, rows: int | None = None) -> int:
        """Bytes of a token in the chunk, with this rank's rows of the weight or so many of them.

        The logits in the dtype of sums, what is beside them, and where products are made in a
        narrower dtype the logits in that, by fused kernels in that alone. The hidden states, which
        are picked where tokens are left out, and as many numbers in the dtype of sums. Where
        ranks hold parts of the tokens, the hidden states of one more chunk, the gradient of one,
        and what a rank's part of both is.
        """
        narrow = self.dtype.itemsize if self.dtype.itemsize < self._wide else 0
        copies = self._wide * (1 + self.beside) + narrow
        if self.fused:
            copies = self.dtype.itemsize
        states = self._wide + self.dtype.itemsize * (1 if self.parts == 1 else 4)
        return copies * (rows or self.vocabulary) + states * self.hidden + 8 * self._wide + 40

    @property
    def row_of_sums(self) -> int:
        """Bytes of one row of dW in the dtype of sums, where its memory is not its gradient's."""
        return self.hidden * self._wide if self.sums_apart else 0

    @property
    def default_limit(self) -> int:
        """Bytes by default, see `DEFAULT`."""
        return max(LEAST_MB * MIB, self.least_for_all_rows)

    @property
    def least_for_all_rows(self) -> int:
        """Bytes for chunks of `ENOUGH` tokens beside all of dW and the statistics."""
        chunk = min(self.tokens, ENOUGH) * self.for_a_token_of_the_chunk()
        return -(-8 * (chunk + self.vocabulary * self.row_of_sums) // 7)

    @property
    def _wide(self) -> int:
        return accumulation_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunking:
    """What a call does at a time.

    `peak` is the most bytes it has beside its inputs, the weight, their gradients and the loss,
    lse, target and gradient of every token: tokens combined x `for_a_token_of_statistics` + tokens
    of the chunk x `for_a_token_of_the_chunk`, and the sums of dW that are not its gradient's own.
    """

    tokens: int  # of a chunk, as many of every part
    combined: int  # in whole chunks, whose statistics the ranks combine at a time
    rows: int | None  # of dW that are summed at a time; None: all
    tokens_of_rows: int  # of a chunk when dW is made in blocks of rows afterwards
    peak: int  # bytes
    rule: str  # that decided
    keeps: bool = False  # the forward makes the gradients, for a backward that scales them
    once: float = 0.0  # MiB with which it would; 0: with none

    @property
    def products(self) -> int:
        """How many products of a token with the weight's size are made, forward and backward.

        Logits, dh and dW; unless the forward makes all, the logits again, and a third time for
        blocks of rows.
        """
        return 3 if self.keeps else 4 if self.rows is None else 5

    def __str__(self) -> str:
        blocks = f", dW in blocks of {self.rows} rows" if self.rows else ""
        times = {3: "once", 4: "twice", 5: "three times"}[self.products]
        less = f" (once with {math.ceil(self.once)} MiB)" if self.once else ""
        text = f"{self.tokens} tokens a chunk, {self.peak / MIB:.1f} MiB ({self.rule}){blocks}"
        return f"{text}, logits made {times}{less}"


def choose(sizes: Sizes, chunk_size: int | None, limit: int | None) -> Chunking:
    """Return chunks of so many tokens, or within a limit, and whether the forward makes gradients.

    It does where it knows the weights of the losses and the limit has room for all of dW beside
    chunks of `ENOUGH` tokens; by default if dW takes no more than `KEPT_MB`, or is there anyhow.
    """
    chunking = within(sizes, limit) if chunk_size is None else of_tokens(sizes, chunk_size)
    if sizes.kept_apart is None:
        return chunking
    keeping = replace(sizes, sums_apart=sizes.kept_apart)
    sums, needed = sizes.vocabulary * keeping.row_of_sums, keeping.least_for_all_rows
    if chunk_size is not None or not sums:
        room = True
    elif limit is None:
        room = sizes.sums_apart or sums <= KEPT_MB * MIB
    else:
        room = needed <= limit
    if not room:
        return replace(chunking, once=needed / MIB)
    chunking = within(keeping, limit) if chunk_size is None else of_tokens(keeping, chunk_size)
    return replace(chunking, keeps=True)


def of_tokens(sizes: Sizes, chunk_size: int) -> Chunking:
    """Return the chunking of `chunk_size` tokens, whatever memory it takes; at least one a part."""
    if chunk_size < 1:
        raise ValueError(f"chunk size (--lm-head-chunk-size) must be positive, got {chunk_size}")
    every = max(sizes.tokens, sizes.parts)
    tokens = min(max(chunk_size // sizes.parts, 1) * sizes.parts, every)
    fixed = sizes.tokens * sizes.for_a_token_of_statistics + sizes.vocabulary * sizes.row_of_sums
    peak = fixed + tokens * sizes.for_a_token_of_the_chunk()
    return Chunking(
        tokens=tokens,
        combined=every,
        rows=None,
        tokens_of_rows=tokens,
        peak=peak,
        rule="as asked for",
    )


def within(sizes: Sizes, limit: int | None) -> Chunking:
    """Return the largest even chunks that stay within `limit` bytes; None: the default limit.

    Sums of dW that are apart from its gradient get half of the limit, or what chunks of `ENOUGH`
    tokens leave; where that is not enough for all rows they are made block by block, for which the
    logits are computed once more. Statistics get an eighth, combined as often as that takes.

    Raises:
        ValueError: one token does not fit, with the number of MiB that one needs.
    """
    rule = f"limit by default: {DEFAULT}" if limit is None else "as many as the limit allows"
    limit = sizes.default_limit if limit is None else limit
    parts, tokens_of_a_part = sizes.parts, sizes.tokens // sizes.parts
    each = parts * sizes.for_a_token_of_the_chunk()
    rows, combined, fixed = _beside_chunks(sizes, limit)
    if limit < fixed + each:
        of_all = f" on each of {parts} ranks" if parts > 1 else ""
        tried = ((n, _beside_chunks(sizes, n * MIB)[2]) for n in itertools.count(1))
        least = next(n for n, beside in tried if n * MIB >= beside + each)
        raise ValueError(
            f"memory limit (--lm-head-memory-mb) {limit / MIB:g} is too small for one token"
            f"{of_all}, with {sizes.vocabulary} rows of the vocabulary: at least {least} MiB"
        )
    tokens = _even(tokens_of_a_part, min(combined, (limit - fixed) // each))
    of_rows = tokens * each // (parts * sizes.for_a_token_of_the_chunk(rows))
    whole = combined == tokens_of_a_part
    return Chunking(
        tokens=parts * tokens,
        combined=parts * (combined if whole else combined // tokens * tokens),
        rows=rows if rows < sizes.vocabulary else None,
        tokens_of_rows=parts * _even(tokens_of_a_part, of_rows),
        peak=fixed + tokens * each,
        rule=rule,
    )


def _beside_chunks(sizes: Sizes, limit: int) -> tuple[int, int, int]:
    """Return the rows of dW at a time, a part's tokens combined at a time, and bytes of both."""
    rows, a_token = sizes.vocabulary, sizes.for_a_token_of_the_chunk()
    if sizes.sums_apart:
        left = limit - limit // 8 - min(sizes.tokens, ENOUGH) * a_token
        rows = max(1, min(rows, max(limit // 2, left) // sizes.row_of_sums))
    sums, of_statistics = rows * sizes.row_of_sums, sizes.parts * sizes.for_a_token_of_statistics
    room = min(limit // 8, limit - sums - sizes.parts * a_token)
    combined = max(1, min(sizes.tokens // sizes.parts, room // of_statistics))
    return rows, combined, combined * of_statistics + sums


def _even(tokens: int, most: int) -> int:
    """Return the size of the fewest chunks of at most `most` tokens, the last hardly smaller."""
    tokens = max(tokens, 1)
    return -(-tokens // -(-tokens // min(most, tokens)))
