"""The algorithms that benchmarks of attention compare, and one of them on this rank's tokens."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import PATIENCE_SECONDS

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.plans.head_parallel import kv_head_copies
from megatron_burst.plans.plan import Kind

BASELINE = "ring flat"
HEAD_PARALLEL = 2  # of the hybrids: heads over pairs of ranks
PHASES = ("forward", "backward", "step")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {"algorithm": "ring", "topology": "flat"},
    "ring double": {"algorithm": "ring", "topology": "double"},
    "ring hybrid": {"algorithm": "ring", "head_parallel_size": HEAD_PARALLEL},
    "burst query flat": {"backward": "query", "topology": "flat"},
    "burst query double": {"backward": "query", "topology": "double"},
    "burst kv flat": {"backward": "kv", "topology": "flat"},
    "burst kv double": {"backward": "kv", "topology": "double"},
    "burst hybrid": {"head_parallel_size": HEAD_PARALLEL},
    "burst auto": {},
    "allgather": {"algorithm": "allgather"},
    "ulysses": {"algorithm": "ulysses"},
}


class Sizes(NamedTuple):
    """Of the tensors of one attention call, batch 1."""

    tokens: int  # of a rank
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"{self.heads} heads, {self.kv_heads} KV heads, head size {self.head_dim}"
        return f"{self.tokens} tokens a rank, {heads}"


class Place(NamedTuple):
    """Where the ranks are."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.ranks} ranks" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


def heads_fit(name: str, heads: int, kv_heads: int, place: Place) -> bool:
    """Whether an algorithm can share out these heads."""
    setting = SETTINGS[name]
    share = place.ranks if name == "ulysses" else setting.get("head_parallel_size", 1)
    try:
        kv_head_copies(heads, kv_heads, share)
    except ValueError:
        return False
    return True


def is_itself(name: str, place: Place) -> bool:
    """Whether an algorithm is not the same as a simpler one of the list."""
    if "double" in name:
        return 1 not in (place.nodes, place.ranks_per_node)
    if "hybrid" in name:
        return place.ranks_per_node % HEAD_PARALLEL == 0 and place.ranks > HEAD_PARALLEL
    # Between nodes its gradients return by the chain, as those of the baseline do.
    return name != "burst kv flat" or place.nodes == 1


def make_context(name: str, place: Place, **settings: Any) -> BurstContext:
    """Make an algorithm's context: a collective call."""
    config = {**SETTINGS[name], "ranks_per_node": place.ranks_per_node, **settings}
    return BurstContext.create(BurstConfig(**config, timeout_seconds=PATIENCE_SECONDS))


class Attention:
    """Attention of one context on random tokens of this rank; the values say nothing."""

    def __init__(
        self,
        context: BurstContext,
        sizes: Sizes,
        mask: Mask,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.context, self.mask, self.device = context, mask, device
        generator = torch.Generator(device).manual_seed(context.rank)
        heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
        shapes = [(1, sizes.tokens, n, sizes.head_dim) for n in heads]
        q, k, v, self.dout = (
            torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes
        )
        self.qkv = (q, k, v)
        for x in self.qkv:
            x.requires_grad_()

    def forward(self) -> Any:
        return ring_attention(*self.qkv, self.context, mask=self.mask)

    def backward(self, out: Any) -> None:
        torch.autograd.grad(out, self.qkv, self.dout)

    def choice(self) -> str:
        """Say what travels in the backward, and in which rings."""
        plan = self.context.prepare(*self.qkv, self.mask, 1.0).backward_plan
        kind = Kind.QUERY if any(send.item.kind is Kind.QUERY for send in plan.sends) else Kind.KV
        return f"{kind} backward, {self.context.grid}"

    def once(self) -> tuple[float, float]:
        """Return the seconds of one forward and of one backward, each after a barrier."""
        dist.barrier()
        started = self._mark()
        out = self.forward()
        between = self._mark()
        dist.barrier()
        resumed = self._mark()
        self.backward(out)
        ended = self._mark()
        return self._seconds(started, between), self._seconds(resumed, ended)

    def count_bytes(self) -> tuple[int, int]:
        """Return the payload that this rank sends forward and backward."""
        counts = [self.context.bytes_sent]
        out = self.forward()
        counts.append(self.context.bytes_sent)
        self.backward(out)
        return counts[1] - counts[0], self.context.bytes_sent - counts[1]

    def _mark(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if self.device == "cpu":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3
