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
    """A sequence whose tokens are spread over the ranks of a group; its methods are collective.

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

    def rows(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' values [batch, all rows, ...], of it this rank's rows."""
        return self.total(x).split(len(self.own), dim=1)[self.rank]

    def _wire(self, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        # Gloo reaches only the host's memory.
        return x.cpu() if dist.get_backend(self.group) == dist.Backend.GLOO else x


@dataclass(frozen=True, slots=True)
class Expected:
    """What one head of a tensor should be on this rank, and how far from it is still right."""

    tensor: str
    head: int
    value: Tensor  # [batch, rows, size]
    allowed: Tensor  # [batch, rows]: of the norm of a row's error


class Reference:
    """One attention call of a group of ranks; what it expects of it is a collective call.

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
        self._noises = torch.Generator(q.device).manual_seed(0)

    def forward(self) -> Iterator[Expected]:
        """Give `out` and `lse`, the latter [batch, rows, 1], of each query head."""
        for head in range(self._q.shape[2]):
            k, v = self._keys_of(head // self._queries_of_a_key)
            grain = self._grain(head, k)
            exact, rough = self._run(head, k, v, 0.0), self._run(head, k, v, grain)
            yield self._expected("out", head, exact, rough)
            lse = exact["lse"]
            allowed = grain * (1 + lse.masked_fill(lse.isneginf(), 0.0).abs())
            yield Expected("lse", head, lse[..., None], allowed)

    def backward(self, dout: Tensor) -> Iterator[Expected]:
        """Give `dq` of each query head, `dk` and `dv` of each kv head, and `dsink` of the group.

        Args:
            dout: [batch, rows, heads, value head size].
        """
        dsinks = []
        for kv_head in range(self._k.shape[2]):
            k, v = self._keys_of(kv_head)
            sums: tuple[dict[str, Tensor], ...] = {}, {}
            first = kv_head * self._queries_of_a_key
            for head in range(first, first + self._queries_of_a_key):
                grains = 0.0, self._grain(head, k)
                exact, rough = (self._run(head, k, v, grain, dout) for grain in grains)
                yield self._expected("dq", head, exact, rough)
                dsinks.append((exact["dsink"], (rough["dsink"] - exact["dsink"]).square()))
                for total, found in zip(sums, (exact, rough), strict=True):
                    _add(total, {name: found[name] for name in ("dk", "dv")})
            for name in ("dk", "dv"):
                pair = ({name: self.spread.rows(total[name])} for total in sums)
                yield self._expected(name, kv_head, *pair)
        if self._sink is not None:
            parts = torch.stack([torch.stack([x.sum() for x in pair]) for pair in dsinks])
            value, squares = self.spread.total(parts).unbind(-1)
            allowed = self._margin * squares.sqrt()
            yield Expected("dsink", 0, value[None, :, None], allowed[None])

    def _expected(
        self, name: str, head: int, exact: dict[str, Tensor], rough: dict[str, Tensor]
    ) -> Expected:
        error = rough[name].to(self._dtype).double() - exact[name]
        return Expected(name, head, exact[name], self._margin * _norm(error))

    def _keys_of(self, kv_head: int) -> tuple[Tensor, Tensor]:
        """Gather the keys and values of a kv head: [batch, all rows, size]."""
        k, v = (self.spread.gather(x[:, :, kv_head]).double() for x in (self._k, self._v))
        return k, v

    def _run(
        self, head: int, k: Tensor, v: Tensor, grain: float, dout: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Attend with this rank's queries; return what is theirs, and what they leave at the keys.

        Args:
            head: of the queries.
            k: of all ranks.
            v: of all ranks.
            grain: how rough it is, see `_grain`; with 0 nothing is rounded.
            dout: of all heads; None for the forward alone.
        """
        rows: dict[str, list[Tensor]] = {}
        keys: dict[str, Tensor] = {}
        step = max(1, _PAIRS_AT_ONCE // (k.shape[0] * k.shape[1]))
        for start in range(0, len(self._own), step):
            part = slice(start, start + step)
            q = self._q[:, part, head].double()
            d = None if dout is None else dout[:, part, head].detach().double()
            seen = self._visibility.pairs(self._own[part], self._all)
            of_rows, of_keys = self._attend(head, q, k, v, seen, grain, d)
            for name, x in of_rows.items():
                rows.setdefault(name, []).append(x)
            _add(keys, of_keys)
        return keys | {name: torch.cat(parts, dim=1) for name, parts in rows.items()}

    def _attend(
        self,
        head: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Tensor,
        grain: float,
        dout: Tensor | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Attend with some queries; return what is theirs, and what they leave at the keys."""

        def rounded(x: Tensor) -> Tensor:
            return x.to(self._dtype).double() if grain else x

        scores = self._scale * (q @ k.mT)
        if grain:
            scores = self._noisy(scores, grain)
        scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        if self._sink is not None:
            lse = torch.logaddexp(lse, self._sink[head])
        # A query that sees nothing: exp(score - inf) is 0.
        weights = (scores - lse.masked_fill(lse.isneginf(), math.inf)[..., None]).exp()
        out = rounded(rounded(weights) @ v)
        if dout is None:
            return {"out": out, "lse": lse}, {}
        delta = (dout * out).sum(-1)
        if grain:
            delta = self._noisy(delta, grain * _norm(dout) * _norm(out))
        dscores = self._scale * rounded(weights * (dout @ v.mT - delta[..., None]))
        weight = torch.zeros_like(lse) if self._sink is None else (self._sink[head] - lse).exp()
        of_rows = {"dq": dscores @ k, "dsink": -weight * delta}
        return of_rows, {"dk": dscores.mT @ q, "dv": rounded(weights).mT @ dout}

    def _noisy(self, x: Tensor, size: Tensor | float) -> Tensor:
        noise = torch.randn(x.shape, generator=self._noises, device=x.device, dtype=x.dtype)
        return x + size / MARGIN * noise  # of what it leads to the margin is taken

    def _grain(self, head: int, k: Tensor) -> float:
        """How far arithmetic in float32 may shift a score of this rank's queries."""
        wide = accumulation_dtype(self._dtype)
        largest = self._scale * (_norm(self._q[:, :, head].double()).max() * _norm(k).max()).item()
        grain = _ROUNDINGS * torch.finfo(wide).eps * (1 + largest)
        return grain if wide is self._dtype else grain + _COARSE_EXP


def _add(sums: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, x in more.items():
        sums[name] = sums[name] + x if name in sums else x


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)
