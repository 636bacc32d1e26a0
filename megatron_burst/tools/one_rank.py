"""What one rank of a ring computes: its own plans, loops, kernels and sums; and a single call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.kv import KeysAndValues
from megatron_burst.attention.passes import backward, forward
from megatron_burst.attention.preparing import prepare
from megatron_burst.config import BurstConfig
from megatron_burst.kernels import Kernel, KernelInput, Request
from megatron_burst.kernels.protocol import Gradients
from megatron_burst.plans.choice.cost import workspace_bytes
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.transport.comm import Communicator, Posted
from megatron_burst.transport.lowered import Batch
from megatron_burst.transport.memory import side_by_side

type Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and dout


def drawing(device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> Callable[..., Tensor]:
    """Return what draws a tensor of the shape that it is given, normal with variance 1."""
    is_meta = torch.device(device).type == "meta"
    generator = None if is_meta else torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)


class Sizes(NamedTuple):
    """Of the tensors of one attention call, batch 1."""

    tokens: int  # of a rank
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"{self.heads} heads, {self.kv_heads} KV heads, head size {self.head_dim}"
        return f"{self.tokens} tokens a rank, {heads}"

    def draw(self, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> Tensors:
        """Return q, k, v and dout [1, tokens, heads, head_dim], normal with variance 1."""
        drawn = drawing(device, dtype, seed)
        queries, keys = ((1, self.tokens, n, self.head_dim) for n in (self.heads, self.kv_heads))
        return drawn(*queries), drawn(*keys), drawn(*keys), drawn(*queries)


class Silence(Communicator):
    """Sends nothing; what would be received is what lies in its buffer."""

    def __init__(self, ranks: int) -> None:
        super().__init__(range(ranks), {}, timeout_seconds=1.0)

    def start(self, batch: Batch, own: Mapping[Kind, Tensor], memory: Tensor) -> Posted:
        """Return nothing to wait for."""
        return Posted(batch, (), (), None)


def context_of(
    rank: int, nodes: Sequence[int], config: BurstConfig, communicator: Communicator
) -> BurstContext:
    """Return the context of one of the ranks that are placed on these nodes, without a group."""
    grid, _ = choose_grid(config.shape_of_rings, nodes)
    context = BurstContext(config, None, grid, nodes, communicator, head_groups(nodes, 1))
    context.rank = rank
    return context


class OneRank:
    """Both passes of one rank's attention, causal if there is no mask; `pairs` are of a forward.

    Raises:
        ValueError: no kernel serves the tensors.
    """

    def __init__(self, context: BurstContext, tensors: Tensors, mask: Mask | None = None) -> None:
        self._q, k, v, self._dout = tensors
        k, v = side_by_side((k, v))  # as attention keeps them
        self.tensors: Tensors = self._q, k, v, self._dout
        self.call = prepare(context, self._q, k, v, mask or Mask.causal(), k.shape[-1] ** -0.5)
        self._kv = KeysAndValues(self.call.forward_plan.rank, k, v)
        blocks = (tiles for step in self.call.forward_plan.steps for tiles in step.blocks)
        self.pairs = sum(int(tiles.cells.pairs.sum()) for tiles in blocks)
        self.result: tuple[Tensor, Tensor] | None = None

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        self.result = None  # else it would live beside the next
        self.result = forward(self._q, self._kv, self.call)
        return self.result

    def backward(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return (dq, dk, dv, None) of the last forward."""
        out, lse = self.result or self.forward()
        return backward(self._dout, self._q, self._kv, out, lse, self.call)


class EmptyKernel:
    """Returns what a kernel returns, without values, and has as large a workspace meanwhile."""

    name = "empty"

    def reasons_against(self, _: Request) -> list[str]:
        """Return nothing: it serves all."""
        return []

    def forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        q, _, v = tile.qkv
        lse_BHS = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        return q.new_empty((*q.shape[:3], v.shape[3])), lse_BHS

    def backward(self, tile: KernelInput, *_: Tensor) -> Gradients:
        """Return (dq, dk, dv)."""
        (batch, queries, heads, dim), kv_heads = tile.q.shape, tile.k.shape[2]
        nbytes = batch * queries * workspace_bytes(heads, kv_heads, dim)
        workspace = tile.q.new_empty(nbytes, dtype=torch.uint8)
        q, k, v = map(torch.empty_like, tile.qkv)
        del workspace
        return q, k, v


def silent_rank(nodes: Sequence[int], tensors: Tensors, **settings: Any) -> OneRank:
    """Return the rank in the middle of those that are on some nodes, by itself.

    The values of what would arrive say nothing.
    """
    config = BurstConfig(**settings)
    return OneRank(context_of(len(nodes) // 2, nodes, config, Silence(len(nodes))), tensors)


class OneCall:
    """One call of a kernel; `pairs` is how many of a query and a key it computes."""

    def __init__(
        self, kernel: Kernel, tensors: Tensors, band: Band = Band.CAUSAL, leaves_room: bool = False
    ) -> None:
        q, k, v, self._dout = tensors
        self.pairs = band.pairs(q.shape[1], k.shape[1])
        self._kernel = kernel
        self._tile = KernelInput(q, k, v, band, k.shape[-1] ** -0.5, leaves_room=leaves_room)
        self.result: tuple[Tensor, Tensor] | None = None

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        self.result = None  # as above
        self.result = self._kernel.forward(self._tile)
        return self.result

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of the last forward."""
        out, lse = self.result or self.forward()
        return self._kernel.backward(self._tile, self._dout, out, lse)
