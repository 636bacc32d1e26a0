"""The algorithms that benchmarks of attention compare, and one of them on this rank's tokens."""

import math
import time
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import seconds
from ranks import PATIENCE_SECONDS

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.attention.launches import rows_of
from megatron_burst.attention.preparing import prepare
from megatron_burst.config import LayoutName
from megatron_burst.plans.balance.balanced import balanced
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.head_parallel import kv_head_copies
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.tools.one_rank import Sizes

BASELINE = "ring flat"
HEAD_PARALLEL = 2  # of the hybrids: heads over pairs of ranks
HEAD_CHUNKS = 2
DEFAULT = "burst default"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {"algorithm": "ring", "topology": "flat"},
    "ring double": {"algorithm": "ring", "topology": "double"},
    "ring hybrid": {"algorithm": "ring", "head_parallel_size": HEAD_PARALLEL},
    "burst query flat": {"backward": "query", "topology": "flat"},
    "burst query double": {"backward": "query", "topology": "double"},
    "burst kv flat": {"backward": "kv", "topology": "flat"},
    "burst kv double": {"backward": "kv", "topology": "double"},
    "burst mesh": {"topology": "mesh"},
    "burst hybrid": {"head_parallel_size": HEAD_PARALLEL},
    "burst auto": {"head_parallel_size": 1},  # of rings and meshes
    DEFAULT: {},  # of them and heads over ranks
    "burst chunks": {"head_chunks": HEAD_CHUNKS},
    "burst balanced": {"layout": "balanced"},
    "allgather": {"algorithm": "allgather"},
    "ulysses": {"algorithm": "ulysses"},
}


class Place(NamedTuple):
    """Where the ranks are."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.ranks} ranks" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


def runs_here(name: str, place: Place, sizes: Sizes) -> bool:
    """Whether an algorithm can share out these heads, and is not a simpler one of the list."""
    share = place.ranks if name == "ulysses" else SETTINGS[name].get("head_parallel_size", 1)
    try:
        kv_head_copies(sizes.heads, sizes.kv_heads, share)
    except ValueError:
        return False
    if name == "burst chunks":
        return sizes.kv_heads % HEAD_CHUNKS == 0
    if name == "burst mesh":
        count = place.nodes if place.nodes > 1 else place.ranks
        return any(count % other == 0 for other in range(2, count))
    if "double" in name:
        return 1 not in (place.nodes, place.ranks_per_node)
    if "hybrid" in name:
        # Pairs of a node's ranks, or of nodes of one.
        shared = place.ranks if place.ranks_per_node == 1 else place.ranks_per_node
        return place.ranks > HEAD_PARALLEL and shared % HEAD_PARALLEL == 0
    # Between nodes its gradients return by the chain, as those of the baseline do.
    return name != "burst kv flat" or place.nodes == 1


def make_context(name: str, place: Place, shape: Shape | str = "", **settings: Any) -> BurstContext:
    """Make an algorithm's context, for tensors of that shape: a collective call."""
    config = {**SETTINGS[name], "ranks_per_node": place.ranks_per_node, **settings}
    made = BurstConfig(**config, timeout_seconds=PATIENCE_SECONDS)
    return BurstContext.create(made, shape=shape)


class Attention:
    """Attention of one context on random tokens of this rank; the values say nothing."""

    def __init__(
        self, context: BurstContext, sizes: Sizes, mask: Mask, device: str, dtype: torch.dtype
    ) -> None:
        self.context = context
        self.how: dict[str, Any] = {"mask": mask, "layout": layout_of(context, mask, sizes)}
        *qkv, self.dout = sizes.draw(device, dtype, context.rank)
        self.qkv = [x.requires_grad_() for x in qkv]

    def forward(self) -> None:
        self.out = ring_attention(*self.qkv, self.context, **self.how)

    def backward(self) -> None:
        torch.autograd.grad(self.out, self.qkv, self.dout)

    def count_bytes(self) -> tuple[int, int]:
        """Return the payload that this rank sends forward and backward."""
        before = self.context.bytes_sent
        self.forward()
        between = self.context.bytes_sent
        self.backward()
        return between - before, self.context.bytes_sent - between


def layout_of(context: BurstContext, mask: Mask, sizes: Sizes) -> Layout | None:
    """Return which tokens the ranks hold where documents decide it."""
    if context.config.layout is not LayoutName.BALANCED or mask.documents is None:
        return None
    return balanced(mask, context.ranks * sizes.tokens, context.nodes).layout


class Kernels:
    """The kernel calls of this rank's plans alone, on the own block in place of visitors'."""

    def __init__(
        self, context: BurstContext, sizes: Sizes, mask: Mask, device: str, dtype: torch.dtype
    ) -> None:
        shared = share_of_heads(sizes, context.heads.size)
        q, k, v, dout = shared.draw(device, dtype, context.rank)
        layout = layout_of(context, mask, sizes)
        self.call = prepare(context, q, k, v, mask, sizes.head_dim**-0.5, layout=layout)
        self.qkv = q, k, v
        batch, tokens, heads, _ = q.shape
        of_rows = (batch, heads, tokens)
        lse = torch.full(of_rows, math.log(tokens), device=q.device)  # about what it would be
        self.finished = dout, torch.zeros_like(dout), lse

        steps = chain(self.call.forward_plan.steps, self.call.backward_plan.steps)
        done = [(step.receives, step.sends, [one.blocks for one in step.blocks]) for step in steps]
        config = context.config
        # Equal where two algorithms do the same: who sees which rows follows from layout and mask.
        self.plan = context.heads.size, config.head_chunks, config.layout, done

    def forward(self) -> None:
        for launch in chain(*self.call.forward_launches):
            self.call.kernel.forward(self.call.of_rows(launch, *self.qkv))

    def backward(self) -> None:
        for launch in chain(*self.call.backward_launches):
            finished = rows_of(self.finished, launch.queries)
            self.call.kernel.backward(self.call.of_rows(launch, *self.qkv), *finished)


def share_of_heads(sizes: Sizes, ranks: int) -> Sizes:
    """Return what a rank holds after an all-to-all over the heads with so many ranks."""
    copies = kv_head_copies(sizes.heads, sizes.kv_heads, ranks)
    heads, kv_heads = sizes.heads // ranks, sizes.kv_heads * copies // ranks
    return Sizes(sizes.tokens * ranks, heads, kv_heads, sizes.head_dim)


def once(run: Attention | Kernels, device: str) -> tuple[float, float]:
    """Return the seconds of one forward and of one backward, each after a barrier."""
    dist.barrier()
    forward = seconds(run.forward, device, time.perf_counter)
    dist.barrier()
    return forward, seconds(run.backward, device, time.perf_counter)
