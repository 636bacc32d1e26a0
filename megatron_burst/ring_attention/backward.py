"""The backward loop: blocks travel as in the forward, and so do the gradients that they collect."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_burst.comm import Block
from megatron_burst.context import AttentionCall
from megatron_burst.dtypes import accumulation_dtype
from megatron_burst.layout import Interval
from megatron_burst.plan import (
    Item,
    Kind,
    Tile,
    Transfer,
    blocks_of_tile,
    gradients_of_tile,
)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of this rank's tokens in the dtypes of q, k and v."""
    rank = call.backward_plan.rank
    blocks: dict[Item, Block] = {
        Item(Kind.QUERY, rank): (q, dout, out, lse),
        Item(Kind.KV, rank): (k, v),
    }
    sums = GradientSums({Kind.D_QUERY: (q,), Kind.D_KV: (k, v)})
    arriving = {Kind.KV: (k, v), Kind.D_KV: sums.like(Kind.D_KV)}
    for number, step in enumerate(call.backward_plan.steps):
        travelling = call.communicator.post(
            step, f"backward step {number}", blocks | sums.pop_all(step.sends), like=arriving
        )
        for tile in step.tiles:
            d_query, d_kv = gradients_of_tile(tile)
            dq, dk, dv = _differentiate(tile, blocks, call)
            sums.add(d_query, tile.query_rows, (dq,))
            sums.add(d_kv, tile.key_rows, (dk, dv))
        _keep(travelling.wait(), blocks, sums)
        for item in step.release:
            del blocks[item]
    (dq,) = sums.pop(Item(Kind.D_QUERY, rank))
    dk, dv = sums.pop(Item(Kind.D_KV, rank))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _differentiate(
    tile: Tile, blocks: Mapping[Item, Block], call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    query_item, key_item = blocks_of_tile(tile)
    q, dout, out, lse = blocks[query_item]
    k, v = blocks[key_item]
    queries, keys = tile.query_rows.rows, tile.key_rows.rows
    return call.kernel.backward(
        dout[:, queries],
        q[:, queries],
        k[:, keys],
        v[:, keys],
        out[:, queries],
        lse[:, :, queries],
        tile.relation,
        call.scale,
    )


def _keep(arrived: Mapping[Item, Block], blocks: dict[Item, Block], sums: "GradientSums") -> None:
    for item, block in arrived.items():
        if item.kind.is_gradient:
            sums.add(item, Interval(0, block[0].shape[1]), block)
        else:
            blocks[item] = block


class GradientSums:
    """Sums of gradients by item, in float32 (float64 for float64 inputs).

    Args:
        shaped: for each kind of gradient, tensors of the shapes of one rank's sums.
    """

    def __init__(self, shaped: Mapping[Kind, Block]) -> None:
        self._shaped = shaped
        self._sums: dict[Item, Block] = {}

    def like(self, kind: Kind) -> Block:
        """Return tensors without storage of the shapes and dtypes of one item's sums."""
        return tuple(
            t.new_empty((1,), dtype=accumulation_dtype(t.dtype)).expand(t.shape)
            for t in self._shaped[kind]
        )

    def add(self, item: Item, rows: Interval, parts: Block) -> None:
        """Add `parts` to the given rows of the item's sums; the tensors become ours."""
        shaped = self._shaped[item.kind]
        if item not in self._sums and rows.length == shaped[0].shape[1]:
            self._sums[item] = tuple(
                part.to(accumulation_dtype(like.dtype), memory_format=torch.contiguous_format)
                for part, like in zip(parts, shaped, strict=True)
            )
            return
        if item not in self._sums:
            self._sums[item] = tuple(
                like.new_zeros(like.shape, dtype=accumulation_dtype(like.dtype)) for like in shaped
            )
        for total, part in zip(self._sums[item], parts, strict=True):
            total[:, rows.rows] += part

    def pop(self, item: Item) -> Block:
        """Hand the item's sums on; the next `add` starts from nothing."""
        return self._sums.pop(item)

    def pop_all(self, transfers: Sequence[Transfer]) -> dict[Item, Block]:
        """Hand on the sums of every gradient among these transfers."""
        return {t.item: self.pop(t.item) for t in transfers if t.item.kind.is_gradient}
