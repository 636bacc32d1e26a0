"""The unsharded reference: what attention over ranks must equal, and how far from it it may be.

It shares no code with the rings, their plans, masks and kernels. Every rank gathers the keys and
values of all, a head at a time, and attends with its own queries in float64, slice by slice, so
that memory grows with the length of the sequence and not with its square. What its queries leave at
the keys is summed over the ranks. The same once more, rounded where kernels round and with the
noise of float32 arithmetic, says how large an error may be.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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
    left: int = -1  # `window_size[0]`: the keys before it that a query sees; -1 is all
    right: int = -1  # `window_size[1]`: the same behind it
    cu_seqlens: Tensor | None = None  # the last value, where the sequence ends, may be repeated
    lengths: Tensor | None = None  # of each document, without the padding at its end
    blocks: Tensor | None = None  # bool [n, n]: which equal part of a sample sees which
    tokens_per_sample: int = 0  # needed with `blocks`

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
            if self.lengths is not None:
                stops = ends[:-1] + self.lengths.to(ends)
                real = [x < stops[n - 1] for x, n in zip((query, key), documents, strict=True)]
                seen &= real[0][:, None] & real[1]
        if self.blocks is not None:
            sample = self.tokens_per_sample
            table, size = self.blocks.to(key.device), sample // len(self.blocks)
            numbers = [x % sample // size for x in (query, key)]
            seen &= table[numbers[0]][:, numbers[1]]
            seen &= (query // sample)[:, None] == key // sample
        return seen


class Spread:
    """A sequence whose tokens are spread over the ranks of a group; its methods are collective.

    `positions` are those of each rank's rows; a group of None is this process alone.
    """

    def __init__(self, positions: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.own = positions[self.rank]
        self.all = torch.cat(list(positions))

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows [batch, rows, ...] of all ranks one behind the other."""
        if self.group is None:
            return x
        wire = self._wire(x)
        shards = [torch.empty_like(wire) for _ in range(self.group.size())]
        dist.all_gather(shards, wire, group=self.group)
        return torch.cat(shards, dim=1).to(x.device)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' values."""
        if self.group is None:
            return x
        wire = self._wire(x.clone())
        dist.all_reduce(wire, group=self.group)
        return wire.to(x.device)

    def _wire(self, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        # Gloo reaches only the host's memory.
        by_gloo = f"{x.device.type}:{dist.Backend.GLOO}" in dist.get_backend_config(self.group)
        return x.cpu() if by_gloo else x


class Expected(NamedTuple):
    """What some heads of a tensor should be on this rank, and how far from it is still right."""

    tensor: str
    heads: slice
    value: Tensor  # [batch, rows, heads, size]
    allowed: Tensor  # [batch, rows, heads]: of the norm of the error of a row's head


@dataclass(frozen=True, slots=True)
class Reference:
    """One attention call of a group of ranks."""

    spread: Spread
    visibility: Visibility
    scale: float
    q: Tensor  # [batch, rows, heads, head size], this rank's rows
    k: Tensor  # [batch, rows, kv heads, head size]
    v: Tensor  # [batch, rows, kv heads, value head size]
    sink: Tensor | None = None  # [heads], a score beside those of the keys
    margin: float = MARGIN

    @torch.no_grad()
    def expect(self, dout: Tensor | None = None) -> Iterator[Expected]:
        """Give what the tensors of one kv head and its query heads should be; then of the next.

        A collective call. These are `out` and `lse` [batch, rows, heads, 1], or with `dout`, of the
        shape of `out`, the gradients `dq`, `dk`, `dv` and, with a sink, `dsink` [1, 1, heads, 1].
        """
        size = self.q.shape[2] // self.k.shape[2]
        noises = torch.Generator(self.q.device).manual_seed(0)
        for number in range(self.k.shape[2]):
            k, v = (self.spread.gather(x[:, :, number]).double() for x in (self.k, self.v))
            heads = slice(number * size, (number + 1) * size)
            grain = self._grain(heads, k)
            ways = _Arithmetic(self.q.dtype), _Arithmetic(self.q.dtype, grain, noises)
            exact, rough = (self._run(heads, k, v, dout, way) for way in ways)
            for name, value in exact.items():
                if name == "lse":
                    length = value.masked_fill(value.isneginf(), 0.0).abs().squeeze(-1)
                    yield Expected(name, heads, value, grain * (1 + length))
                elif name == "dsink":
                    yield self._sink_gradient(heads, value, rough[name])
                elif name in ("dk", "dv"):  # summed over the ranks, of all rows
                    whole = (self.spread.total(x)[:, :, None] for x in (value, rough[name]))
                    pair = [x.split(self.q.shape[1], dim=1)[self.spread.rank] for x in whole]
                    yield self._expected(name, slice(number, number + 1), *pair)
                else:
                    yield self._expected(name, heads, value, rough[name])

    def _expected(self, name: str, heads: slice, exact: Tensor, rough: Tensor) -> Expected:
        error = rough.to(self.q.dtype).double() - exact
        return Expected(name, heads, exact, self.margin * _norm(error))

    def _sink_gradient(self, heads: slice, exact: Tensor, rough: Tensor) -> Expected:
        """Sum up what the rows of all ranks add."""
        parts = [x.sum((0, 1, 3)) for x in (exact, (rough - exact).square())]
        value, squares = self.spread.total(torch.stack(parts))[:, None, None]
        return Expected("dsink", heads, value[..., None], self.margin * squares.sqrt())

    def _run(
        self, heads: slice, k: Tensor, v: Tensor, dout: Tensor | None, way: "_Arithmetic"
    ) -> dict[str, Tensor]:
        """Attend with this rank's queries of some heads to one head of all ranks' k and v.

        Returns:
            [batch, rows, heads, size] each, and of `dk` and `dv` [batch, all rows, size].
        """
        chunks: dict[str, list[Tensor]] = {}
        sums: dict[str, Tensor] = {}
        own, everybody = (x.to(k.device) for x in (self.spread.own, self.spread.all))
        step = max(1, _PAIRS_AT_ONCE // (len(k) * k.shape[1] * (heads.stop - heads.start)))
        for start in range(0, len(own), step):
            part = slice(start, start + step)
            q, *d = (
                x[:, part, heads].double().transpose(1, 2) for x in (self.q, dout) if x is not None
            )
            seen = self.visibility.pairs(own[part], everybody)
            results = self._attend(heads, q, k[:, None], v[:, None], seen, way, *d)
            for name, x in results.items():
                if name in ("dk", "dv"):
                    sums[name] = sums.get(name, 0.0) + x.sum(1)
                else:
                    chunks.setdefault(name, []).append(x.transpose(1, 2))
        return {x: sums[x] if x in sums else torch.cat(chunks[x], dim=1) for x in results}

    def _attend(
        self,
        heads: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Tensor,
        way: "_Arithmetic",
        dout: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Attend with some queries, [batch, heads, rows, size] each."""
        scores = way.noisy(self.scale * (q @ k.mT)).masked_fill(~seen, -math.inf)
        lse, sink = scores.logsumexp(-1, keepdim=True), None
        if self.sink is not None:
            sink = self.sink.double()[heads, None, None]
            lse = torch.logaddexp(lse, sink)
        # A query that sees nothing: exp(score - inf) is 0.
        weights = (scores - lse.masked_fill(lse.isneginf(), math.inf)).exp()
        out = way.rounded(way.rounded(weights) @ v)
        if dout is None:
            return {"out": out, "lse": lse}
        size = _norm(dout) * _norm(out)
        delta = way.noisy((dout * out).sum(-1, keepdim=True), size[..., None])
        dscores = self.scale * way.rounded(weights * (dout @ v.mT - delta))
        gradients = {"dq": dscores @ k, "dk": dscores.mT @ q, "dv": way.rounded(weights).mT @ dout}
        return gradients if sink is None else gradients | {"dsink": -(sink - lse).exp() * delta}

    def _grain(self, heads: slice, k: Tensor) -> Tensor:
        """How far arithmetic in float32 may shift a score of this rank's queries: [heads]."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        largest = self.scale * _norm(self.q[:, :, heads].double()).amax((0, 1)) * _norm(k).max()
        grain = _ROUNDINGS * torch.finfo(wide).eps * (1 + largest)
        return grain if wide is self.q.dtype else grain + _COARSE_EXP


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """How exactly is reckoned: as in `dtype` where there is a grain, a size of noise [heads]."""

    dtype: torch.dtype
    grain: Tensor | None = None
    noises: torch.Generator | None = None

    def rounded(self, x: Tensor) -> Tensor:
        return x if self.grain is None else x.to(self.dtype).double()

    def noisy(self, x: Tensor, size: Tensor | float = 1.0) -> Tensor:
        if self.grain is None:
            return x
        noise = torch.randn(x.shape, generator=self.noises, device=x.device, dtype=x.dtype)
        return x + self.grain[:, None, None] * size / MARGIN * noise  # it becomes the margin again


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)
