"""What attention calls of one context-parallel group share: who is in it, and what was planned."""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm import Communicator, check_agreement
from megatron_burst.config import BurstConfig
from megatron_burst.cost import bytes_sent, imbalance, kv_ring_bytes
from megatron_burst.dtypes import accumulation_dtype
from megatron_burst.kernels import Kernel, Request, check_kernel_name, passed_over, select_kernel
from megatron_burst.layout import Layout, zigzag
from megatron_burst.mask import Mask
from megatron_burst.plan import Plan, flat_kv_backward, flat_ring_forward

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plans:
    """This rank's plans for one length and mask."""

    forward: Plan
    backward: Plan


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """All of one attention call but its tensors."""

    forward_plan: Plan
    backward_plan: Plan
    kernel: Kernel
    scale: float
    communicator: Communicator


class BurstContext:
    """One context-parallel group as this rank sees it; made by `create`, once a group."""

    def __init__(
        self, config: BurstConfig, group: dist.ProcessGroup | None, communicator: Communicator
    ) -> None:
        self.config = config
        self.group = group  # None: this process alone
        self.rank = 0 if group is None else group.rank()
        self.ranks = 1 if group is None else group.size()
        self._communicator = communicator
        self._plans: dict[str, Plans] = {}

    @classmethod
    def create(cls, config: BurstConfig, group: dist.ProcessGroup | None = None) -> "BurstContext":
        """Make the context of `group`: a collective call of its ranks.

        Args:
            config: the same on every rank.
            group: the context-parallel group; None takes all ranks of the job, or this process
                alone where torch.distributed is not initialised.

        Raises:
            ValueError: the ranks disagree on the configuration, or the kernel is unknown.
        """
        check_kernel_name(config.kernel)
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is None or group.size() == 1:
            return cls(config, None, Communicator(None, config.timeout_seconds))
        check_agreement(group, "the configuration", str(config), config.timeout_seconds)
        return cls(config, group, Communicator(group, config.timeout_seconds))

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return self._communicator.bytes_sent

    def layout(self, tokens: int) -> Layout:
        """Return which tokens of a sequence each rank holds.

        Raises:
            ValueError: the sequence does not divide over the ranks.
        """
        return zigzag(tokens, self.ranks)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of this rank's rows in a sequence: int64 [local tokens]."""
        return self.layout(tokens).positions(self.rank)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of the whole tensor `x` along `dim`."""
        return self.layout(x.shape[dim]).shard(x, self.rank, dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Gather the shards of all ranks: the inverse of `shard`, a collective, no gradient."""
        x = x.detach().contiguous()
        shards = [x]
        if self.group is not None:
            shards = [torch.empty_like(x) for _ in range(self.ranks)]
            dist.all_gather(shards, x, group=self.group)
        return self.layout(x.shape[dim] * self.ranks).unshard(shards, dim)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> AttentionCall:
        """Choose the kernel and the plans for these tensors; see `ring_attention`."""
        kernel = select_kernel(self.config.kernel, Request.of(q, k, v))
        shapes = f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)}, v {tuple(v.shape)}, {mask}"
        if shapes not in self._plans:
            if self.group is not None:
                check_agreement(
                    self.group, "the shapes or the mask", shapes, self.config.timeout_seconds
                )
            self._plans[shapes] = self._make_plans(q.shape[1] * self.ranks, mask)
            self._log_plans(q, k, v, kernel, mask, self._plans[shapes])
        plans = self._plans[shapes]
        return AttentionCall(plans.forward, plans.backward, kernel, scale, self._communicator)

    def _make_plans(self, tokens: int, mask: Mask) -> Plans:
        layout = self.layout(tokens)
        return Plans(
            flat_ring_forward(layout, mask, self.rank), flat_kv_backward(layout, mask, self.rank)
        )

    def _log_plans(
        self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, mask: Mask, plans: Plans
    ) -> None:
        """Say once what was chosen and what it costs a layer."""
        if self.rank != 0:
            return
        tokens = q.shape[1] * self.ranks
        sizes = kv_ring_bytes(
            local_tokens=k.shape[0] * k.shape[1],
            kv_heads=k.shape[2],
            head_dims=k.shape[3] + v.shape[3],
            element_bytes=k.element_size(),
            gradient_bytes=accumulation_dtype(k.dtype).itemsize,
        )
        reasons = ""
        if self.config.kernel == "auto":
            reasons = passed_over(kernel, Request.of(q, k, v))
        logger.info(
            "burst attention: %d tokens over %d ranks (%s), %s mask, flat kv ring, kernel %s; a "
            "layer sends %.2f MiB a rank forward and %.2f MiB backward; FLOPs max/mean %.3f",
            tokens,
            self.ranks,
            self.config.layout,
            "causal" if mask.is_causal else "full",
            f"{kernel.name} ({reasons})" if reasons else kernel.name,
            bytes_sent(plans.forward, sizes) / 2**20,
            bytes_sent(plans.backward, sizes) / 2**20,
            imbalance(self.layout(tokens), mask),
        )
