"""What plans cost, counted: bytes that ranks send and pairs of tokens that they compute."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_burst.config import GradDtype
from megatron_burst.plans.choice.machine import Machine
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.schedule import Messages
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.layout import contiguous
from megatron_burst.plans.visibility.mask import Mask

_SUM_BYTES = 4  # of an element of a sum, unless the tensors' are wider
_ROOM = 1 / 16  # of a device's speed, which tiles lose where they leave room to messages


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What a token's K and V of all heads are made of, in multi-latent attention."""

    size: int  # numbers a token: the latent and the rotary key
    weight: int  # numbers of the up-projection of a rank's heads


@dataclass(frozen=True, slots=True)
class Shape:
    """What of one rank's tensors decides how many bytes an item has."""

    tokens: int  # batch x tokens of a rank
    query_heads: int  # of a rank, after tensor and head parallelism
    kv_heads: int
    head_dim: int  # of queries and keys
    value_head_dim: int
    element_bytes: int
    gradient_bytes: int  # of an element of a sum of gradients on the wire
    row_bytes: int = 4  # of a log-sum-exp, or a delta: float32
    sends_raw: bool = False  # whether partial gradients go as a kernel made them
    latents: LatentShape | None = None  # if they travel in the place of K and V
    batch: int = 1  # for the Ulysses degree, which is chosen before a call says it

    @classmethod
    def of(
        cls,
        tokens: int,
        heads: tuple[int, int],  # of queries, and of keys and values
        head_dims: tuple[int, int],  # of queries and keys, and of values
        element_bytes: int,
        sent_as: GradDtype,
    ) -> "Shape":
        """Return that of tensors of a dtype, the gradients of which are sent as is said."""
        wide = max(_SUM_BYTES, element_bytes)
        return cls(
            *(tokens, *heads, *head_dims, element_bytes),
            gradient_bytes=element_bytes if sent_as is GradDtype.MODEL else wide,
            row_bytes=wide,
            sends_raw=sent_as is GradDtype.AUTO,
        )

    def item_bytes(self, *, backward: bool = True) -> dict[Kind, int]:
        """Return the payload bytes of one item of each kind that is sent.

        A hop of the kv backward is n·Hkv·(dk + dv)·(e + g), one of the query backward
        n·Hq·(e·(dk + dv) + g·dk + 8). In the forward queries go alone, n·Hq·e·dk, and their outputs
        with a log-sum-exp, n·Hq·(e·dv + 4). Where latents travel, their size stands for
        Hkv·(dk + dv).
        """
        queries = self.tokens * self.query_heads
        dims = self.head_dim + self.value_head_dim
        kv = self.tokens * (self.latents.size if self.latents else self.kv_heads * dims)
        query = self.element_bytes * self.head_dim
        partial = self.element_bytes if self.sends_raw else self.gradient_bytes
        if backward:  # with dO, its log-sum-exp and delta
            query = self.element_bytes * dims + 2 * self.row_bytes
        return {
            Kind.KV: kv * self.element_bytes,
            Kind.D_KV: kv * self.gradient_bytes,
            Kind.PARTIAL_D_KV: kv * partial,
            Kind.QUERY: queries * query,
            Kind.D_QUERY: queries * self.head_dim * self.gradient_bytes,
            Kind.PARTIAL_D_QUERY: queries * self.head_dim * partial,
            Kind.OUTPUT: queries * (self.value_head_dim * self.element_bytes + self.row_bytes),
        }

    def added_bytes(self, *, backward: bool) -> tuple[int, int, int]:
        """Return what is read and written to add a tile's results to the sums: a query, and a key.

        And for a block of another rank's queries that comes: in the forward to round its output, in
        the backward to make one, for none is sent.
        """
        each = self.element_bytes + 2 * _SUM_BYTES
        a_query = self.query_heads * (self.head_dim if backward else self.value_head_dim)
        a_key = self.kv_heads * (self.head_dim + self.value_head_dim) if backward else 0
        output = self.tokens * self.query_heads * self.value_head_dim
        a_number = self.element_bytes + (self.element_bytes if backward else _SUM_BYTES)
        return a_query * each, a_key * each, output * a_number

    def exchange_bytes(self, head_parallel_size: int) -> int:
        """Return what a rank sends of q, k, v and the output for its heads of `size` ranks' tokens.

        n·(Hq + Hkv)·(dk + dv)·e·(U - 1)/U, in the backward as in the forward.
        """
        heads, dims = self.query_heads + self.kv_heads, self.head_dim + self.value_head_dim
        held = self.tokens * heads * dims * self.element_bytes
        return held * (head_parallel_size - 1) // head_parallel_size


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes that leave: the most of any rank, and of any rank's NIC, to other nodes."""

    rank: int
    nic: int

    @property
    def bottleneck(self) -> int:
        """The bytes on the bottleneck link: a NIC's, or within one node a rank's."""
        return self.nic or self.rank


def traffic(
    messages: Iterable[Messages],
    sizes: Mapping[Kind, int],
    nodes: Sequence[Hashable],
    local_tokens: int,
) -> Traffic:
    """Count what the messages of all ranks, placed on these nodes, put on the links.

    `sizes` are the bytes of a whole item of each kind, `local_tokens` its rows.
    """
    number = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    node, ranks = np.array([number[node] for node in nodes]), len(nodes)
    sent, through_nic = np.zeros(ranks), np.zeros(ranks)
    for each in messages:
        sources, targets, size, *_ = each.loads(sizes, local_tokens, summed=True)
        goes = size.nonzero()  # of few pairs of ranks under a sparse mask
        source, size = sources[goes], size[goes]
        sent += np.bincount(source, size, ranks)
        through_nic += np.bincount(source, size * (node[source] != node[targets[goes]]), ranks)
    return Traffic(int(sent.max()), int(through_nic.max()))


def attention_flops(
    pairs: float, heads: int, head_dim: int, value_head_dim: int, *, backward: bool = False
) -> float:
    """Return what a kernel computes: two matrix products forward, five backward."""
    dims = 3 * head_dim + 2 * value_head_dim if backward else head_dim + value_head_dim
    return 2.0 * pairs * heads * dims


def workspace_bytes(heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes that an attention kernel's backward needs for a query beside its results.

    Measured on an H200 in bfloat16 (scripts/bench/results/h200_first_run.md): dQ in float32 and,
    where query heads share K and V, dK and dV of every query head in cuDNN and FlashAttention-2;
    FlashAttention-3 needs half as much for these with 8 KV heads of 32.
    """
    return heads * head_dim * (4 + 4 * (kv_heads < heads))


def room_pays(tiling: Tiling, shape: Shape, traffic: Traffic, machine: Machine) -> bool:
    """Say whether tiles should leave room to messages, which else may begin when they are through.

    It costs a share of the tiles' time, without it at worst all of the messages' time is added.
    """
    link = machine.nic_rate / machine.gpus_per_nic if traffic.nic else machine.within_rate
    pairs = tiling.needs.pairs.sum() / tiling.ranks * (shape.tokens // tiling.local_tokens)
    flops = attention_flops(pairs, shape.query_heads, shape.head_dim, shape.value_head_dim)
    tiles = flops / machine.forward_rate
    return bool(traffic.bottleneck / link > _ROOM * tiles)


def visible_pairs(mask: Mask, tokens: int) -> int:
    """Return how many (query, key) pairs of a sequence the mask lets through."""
    return int(Tiling(contiguous(tokens, 1), mask)(0, 0).cells.pairs.sum())
