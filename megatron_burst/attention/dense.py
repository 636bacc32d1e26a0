"""Attention of a sequence that is spread over ranks, in one piece: what a ring must equal.

It shares no code with the rings, their plans, masks and kernels. Every rank gathers what the others
hold, a head at a time, and works in float64 on slices of the queries, so that memory grows with the
length of the sequence and not with its square. Beside each result comes how far attention that
rounds to the dtype of its inputs may be from it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype

MARGIN = 6.0
"""How many times the error of one rounding in every place is allowed: rings round oftener."""
_PAIRS_AT_ONCE = 2**24  # of queries and keys: 128 MiB in float64, of which a few are alive
_ROUNDINGS = 32  # of a score or a sum in float32 arithmetic
_COARSE_EXP = 2.0**-12  # kernels for 16 bits may approximate exponentials so far


def megatrons_positions(tokens: int, ranks: int) -> list[Tensor]:
    """Return the positions that Megatron's data loader gives each rank: chunks r and 2P-1-r."""
    if ranks == 1:
        return [torch.arange(tokens)]
    chunks = torch.arange(tokens).view(2 * ranks, -1)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """Which keys a query sees, written out pair by pair, in Megatron's words."""

    causal: bool
    left: int = -1
    """`window_size[0]`: how many keys before it a query sees beside itself; -1 is all."""
    right: int = -1
    """`window_size[1]`: the same behind it."""
    cu_seqlens: Tensor | None = None
    """Where documents begin; the last value, where the sequence ends, may be repeated."""
    blocks: Tensor | None = None
    """A table of booleans: which equal part of a sample sees which."""
    tokens_per_sample: int = 0
    """The length of a sample, needed with `blocks`."""

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        """Return for positions [Q] and [K] whether one sees the other: bool [Q, K]."""
        before = query[:, None] - key
        seen = torch.ones_like(before, dtype=torch.bool)
        if self.causal:
            seen &= before >= 0
        if self.left != -1:
            seen &= before <= self.left
        if self.right != -1:
            seen &= -before <= self.right
        if self.cu_seqlens is not None:
            ends = self.cu_seqlens.to(key.device, key.dtype)
            documents = [torch.searchsorted(ends, x, right=True) for x in (query, key)]
            seen &= documents[0][:, None] == documents[1]
        if self.blocks is not None:
            sample = self.tokens_per_sample
            table, size = self.blocks.to(key.device), sample // len(self.blocks)
            numbers = [x % sample // size for x in (query, key)]
            seen &= table[numbers[0]][:, numbers[1]]
            seen &= (query // sample)[:, None] == key // sample
        return seen


class Spread:
    """A sequence whose tokens are spread over the ranks of a group.

    Args:
        positions: of the tokens of each rank, in the order of its rows.
        group: the ranks; None is this process alone.
    """

    def __init__(self, positions: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.own = positions[self.rank]
        self.all = torch.cat(list(positions))

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows [batch, rows, ...] of all ranks one behind the other: a collective."""
        x = x.detach().contiguous()
        if self.group is None:
            return x
        # Gloo reaches only the host's memory.
        wire = x.cpu() if dist.get_backend(self.group) == dist.Backend.GLOO else x
        shards = [torch.empty_like(wire) for _ in range(self.group.size())]
        dist.all_gather(shards, wire, group=self.group)
        return torch.cat(shards, dim=1).to(x.device)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' values: a collective."""
        return self.gather(x[None, None]).sum((0, 1))


@dataclass(frozen=True, slots=True)
class Expected:
    """What one head of a tensor should be on this rank, and how far from it is still right."""

    tensor: str
    head: int
    value: Tensor  # [batch, rows, size]
    allowed: Tensor  # [batch, rows]: of the norm of a row's error


class Dense:
    """One attention call of a group of ranks; its methods are collective calls of all of them.

    Args:
        spread: who holds what.
        visibility: which keys a query sees.
        scale: of the scores.
        q: [batch, rows, heads, head size], this rank's rows.
        k: [batch, rows, kv heads, head size].
        v: [batch, rows, kv heads, value head size].
        sink: [heads], a score beside those of the keys; None is none.
        margin: see `MARGIN`.
    """

    def __init__(
        self,
        spread: Spread,
        visibility: Visibility,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None = None,
        margin: float = MARGIN,
    ) -> None:
        self.spread, self._visibility, self._scale = spread, visibility, scale
        self._q, self._k, self._v = (x.detach() for x in (q, k, v))
        self._sink = None if sink is None else sink.detach().double()
        self._margin, self._dtype = margin, q.dtype
        self._queries_of_a_key = q.shape[2] // k.shape[2]
        self._own, self._all = (x.to(q.device) for x in (spread.own, spread.all))

    def forward(self) -> Iterator[Expected]:
        """Give `out` and `lse`, the latter [batch, rows, 1], of each query head."""
        for head in range(self._q.shape[2]):
            q, (k, v) = self._q[:, :, head].double(), self._keys_of(head)
            slices = zip(*_slices(k, q, self._own), strict=True)
            parts = [self._attend(head, q_, positions, k, v)[:3] for q_, positions in slices]
            lse, out, rough = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
            grain = self._grain(q, k)
            yield Expected("out", head, out, self._noise(rough, out) + grain * _norm(out))
            size = lse.masked_fill(lse.isneginf(), 0.0).abs()
            yield Expected("lse", head, lse[..., None], grain * (1 + size))

    def backward(self, dout: Tensor) -> Iterator[Expected]:
        """Give `dq` of each query head, `dk` and `dv` of each kv head, and `dsink` of the group.

        Args:
            dout: [batch, rows, heads, value head size].
        """
        sinks = []
        for kv_head in range(self._k.shape[2]):
            sums = _KeySums(self._k[:, :, kv_head].double(), self._v[:, :, kv_head].double())
            first = kv_head * self._queries_of_a_key
            for head in range(first, first + self._queries_of_a_key):
                q, d = self._q[:, :, head].double(), dout[:, :, head].detach().double()
                dq, numbers = self._differentiate(head, q, d)
                yield dq
                sinks.append(self._dsink(head, numbers, self._grain(q, sums.k)))
                self._add_to_keys(sums, *(self.spread.gather(x) for x in (q, d, numbers)))
            sizes = {"dk": _norm(sums.dk) + sums.size, "dv": _norm(sums.dv)}
            results = {"dk": (sums.rough_dk, sums.dk), "dv": (sums.rough_dv, sums.dv)}
            for name, (rough, exact) in results.items():
                allowed = self._noise(rough, exact) + sums.grain * sizes[name]
                yield Expected(name, kv_head, exact, allowed)
        if self._sink is not None:
            exact, squares, grain = self.spread.total(torch.stack(sinks)).unbind(-1)
            allowed = self._margin * squares.sqrt() + grain
            yield Expected("dsink", 0, exact[None, :, None], allowed[None])

    def _keys_of(self, head: int) -> tuple[Tensor, Tensor]:
        """Gather the keys and values that a query head reads: [batch, all rows, size]."""
        kv_head = head // self._queries_of_a_key
        k, v = (self.spread.gather(x[:, :, kv_head]) for x in (self._k, self._v))
        return k.double(), v.double()

    def _attend(
        self, head: int, q: Tensor, positions: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return lse [batch, rows], out, out with roundings, and the weights of some queries."""
        scores = self._scores(q, positions, k, self._all)
        lse = scores.logsumexp(-1)
        if self._sink is not None:
            lse = torch.logaddexp(lse, self._sink[head])
        weights = _weights(scores, lse)
        rough = _rounded(_rounded(weights, self._dtype) @ v, self._dtype)
        return lse, weights @ v, rough, weights

    def _differentiate(self, head: int, q: Tensor, dout: Tensor) -> tuple[Expected, Tensor]:
        """Return the gradient of a head's queries, and four numbers a row for the keys' gradients.

        These are lse, delta, delta with roundings, and the size of what delta is a sum of.
        """
        k, v = self._keys_of(head)
        parts = []
        for q_, positions, dout_ in zip(*_slices(k, q, self._own, dout), strict=True):
            lse, out, rough_out, weights = self._attend(head, q_, positions, k, v)
            delta, rough_delta = ((dout_ * x).sum(-1) for x in (out, rough_out))
            numbers = torch.stack([lse, delta, rough_delta, _norm(dout_) * _norm(out)], dim=-1)
            exact, rough = self._dscores(weights, dout_ @ v.mT, numbers)
            parts.append((exact @ k, _rounded(rough @ k, self._dtype), numbers))
        dq, rough, numbers = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        size = self._scale * _norm(k).max() * numbers[..., 3]
        noise = self._noise(rough, dq) + self._grain(q, k) * (_norm(dq) + size)
        return Expected("dq", head, dq, noise), numbers

    def _dscores(self, weights: Tensor, dweights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of q kᵀ, and the same with roundings."""
        _, delta, rough_delta, _ = (x[..., None] for x in numbers.unbind(-1))
        exact, rough = (weights * (dweights - x) for x in (delta, rough_delta))
        return self._scale * exact, self._scale * _rounded(rough, self._dtype)

    def _add_to_keys(self, sums: "_KeySums", q: Tensor, dout: Tensor, numbers: Tensor) -> None:
        """Add what the queries of the whole sequence leave at this rank's keys."""
        sums.grain = max(sums.grain, self._grain(q, sums.k))
        slices = _slices(sums.k, q, self._all, dout, numbers)
        for q_, positions, dout_, numbers_ in zip(*slices, strict=True):
            scores = self._scores(q_, positions, sums.k, self._own)
            weights = _weights(scores, numbers_[..., 0])
            exact, rough = self._dscores(weights, dout_ @ sums.v.mT, numbers_)
            sums.dk += exact.mT @ q_
            sums.rough_dk += rough.mT @ q_
            sums.dv += weights.mT @ dout_
            sums.rough_dv += _rounded(weights, self._dtype).mT @ dout_
            size = self._scale * numbers_[..., 3] * _norm(q_)
            sums.size += (weights.mT @ size[..., None])[..., 0]

    def _dsink(self, head: int, numbers: Tensor, grain: float) -> Tensor:
        """Return this rank's part of a sink's gradient, its rows' errors squared, and its grain."""
        lse, delta, rough_delta, size = numbers.unbind(-1)
        if self._sink is None:
            return lse.new_zeros(3)
        weights = (self._sink[head] - lse).exp()
        errors = (weights * (rough_delta - delta)).square()
        parts = (-weights * delta, errors, weights * size * grain)
        return torch.stack([part.sum() for part in parts])

    def _scores(self, q: Tensor, positions: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        seen = self._visibility.pairs(positions, keys)
        return (self._scale * (q @ k.mT)).masked_fill(~seen, -math.inf)

    def _noise(self, rough: Tensor, exact: Tensor) -> Tensor:
        """What roundings to the dtype of the inputs may add up to, row by row."""
        return self._margin * _norm(_rounded(rough, self._dtype) - exact)

    def _grain(self, q: Tensor, k: Tensor) -> float:
        """How far arithmetic in float32 may shift a score, or a sum that its exponential weighs."""
        wide = accumulation_dtype(self._dtype)
        largest = self._scale * _norm(q).max().item() * _norm(k).max().item()
        grain = _ROUNDINGS * torch.finfo(wide).eps * (1 + largest)
        return grain if wide is self._dtype else grain + _COARSE_EXP


class _KeySums:
    """The gradients of one kv head's keys and values on this rank, exact and with roundings."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        self.dk, self.rough_dk = torch.zeros_like(k), torch.zeros_like(k)
        self.dv, self.rough_dv = torch.zeros_like(v), torch.zeros_like(v)
        self.size = torch.zeros_like(k[..., 0])  # of what dk is the difference of
        self.grain = 0.0


def _slices(keys: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut tensors of queries into parts whose scores against `keys` fit into memory.

    One-dimensional ones are positions, the others are [batch, rows, ...].
    """
    rows = max(1, _PAIRS_AT_ONCE // (keys.shape[0] * keys.shape[1]))
    return [x.split(rows, dim=0 if x.ndim == 1 else 1) for x in tensors]


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return softmax's weights; zeros for a query that sees nothing."""
    return (scores - lse.masked_fill(lse.isneginf(), math.inf)[..., None]).exp()


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)
