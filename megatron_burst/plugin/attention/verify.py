"""--burst-check reference: the first micro-batch beside the unsharded reference, layer by layer.

Of each layer the first forward, the first backward and, where Megatron recomputes the layer, the
pass between them are compared. A layer is compared on the q, k, v and gradients that it was given,
so that an error of one layer does not show in another. What is expected follows from Megatron's own
arguments, not from what our attention made of them.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_burst.attention.autograd import ring_attention
from megatron_burst.attention.context import BurstContext
from megatron_burst.plugin.attention.documents import PackedDocuments
from megatron_burst.plugin.compat import is_first_of_its_stage
from megatron_burst.reference.dense import Visibility
from megatron_burst.reference.verify import (
    Finding,
    VerificationError,
    attend_beside_reference,
    table,
    worst,
)

logger = logging.getLogger(__name__)

_SHOWN = 20  # differences in an error


class Verification:
    """What the layers of one model have found, until each that began has also ended."""

    def __init__(self, block_mask: Tensor | None) -> None:
        self.is_over = False
        self.block_mask = block_mask  # its table
        self.positions: dict[str, str] = {}  # how each kind is wrong; empty where it is right
        self._findings: dict[str, list[Finding]] = {}
        self.begun: set[str] = set()  # layers that have run forward and will run backward

    def settle(self, context: BurstContext) -> None:
        """Report what was found, unless a backward is to be waited for.

        Raises:
            VerificationError: on every rank of the context-parallel group, if anything is wrong.
        """
        if not self.is_over and not self.begun and self._findings:
            self.is_over = True
            self._report(context)

    def add(
        self, layer: str, context: BurstContext, is_backward: bool, findings: Sequence[Finding]
    ) -> None:
        """Take what was found in a layer on this rank; after the last backward report."""
        self._findings.setdefault(layer, []).extend(findings)
        for finding in findings:
            if finding.where:  # should something else end the job before the report
                logger.warning("burst check: layer %s, %s", layer, finding)
        if is_backward:
            self.begun.discard(layer)
            self.settle(context)

    def _report(self, context: BurstContext) -> None:
        everyone = context.gather("collect what was found", (self._findings, self.positions))
        by_layer = {
            layer: worst(f for findings, _ in everyone for f in findings.get(layer, ()))
            for layer in self._findings
        }
        wrong = [text for _, positions in everyone for text in positions.values() if text]
        wrong += [f"layer {n}, {f}" for n, row in by_layer.items() for f in row.values() if f.where]
        if is_first_of_its_stage():
            logger.setLevel(logging.INFO)  # of a pipeline stage one rank, whatever the others do
            logger.info(
                "burst check: over %d context-parallel rank(s) the first micro-batch %s the "
                "unsharded reference (%s too). The largest error of any rank and what is "
                "allowed:\n%s",
                context.ranks,
                "DIFFERS from" if wrong else "equals",
                " and ".join(sorted(self.positions)) or "neither position ids nor rotary angles",
                table("layer", by_layer),
            )
        if wrong:
            title = (
                "--burst-check reference: attention over the context-parallel ranks is not the "
                "unsharded reference:"
            )
            more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            raise VerificationError("\n  ".join([title, *wrong[:_SHOWN], *more]))


@dataclass
class LayerCheck:
    """Stands in for `ring_attention` in one core attention, and checks the calls that are new.

    It is given the name of the layer, and what Megatron built the core attention with.
    """

    verification: Verification
    layer: str
    config: Any
    layer_number: int
    scale: float | None
    # The passes that were checked, by whether they have a graph.
    _seen: set[bool] = field(default_factory=set, init=False)
    _expected: tuple[bool, PackedDocuments] | None = field(default=None, init=False)

    def expect(self, is_causal: bool, documents: PackedDocuments, is_training: bool) -> None:
        """Say what Megatron asks of the next call."""
        over = self.verification.is_over or torch.is_grad_enabled() in self._seen
        self._expected = None if over or not is_training else (is_causal, documents)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, context: BurstContext, **more: Any
    ) -> Tensor:
        """Attend as `ring_attention` does."""
        expected, self._expected = self._expected, None
        if expected is None:
            if self._seen:
                self.verification.settle(context)
            return ring_attention(q, k, v, context, **more)
        self._seen.add(torch.is_grad_enabled())
        visibility = self._visibility(q.shape[1] * context.ranks, *expected)
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        take = functools.partial(self.verification.add, self.layer, context)
        out = attend_beside_reference(
            *(ring_attention, q, k, v, context, visibility, scale, take), **more
        )
        if out.requires_grad or not torch.is_grad_enabled():  # else no backward will come
            self.verification.begun.add(self.layer)
        return out

    def _visibility(self, tokens: int, is_causal: bool, documents: PackedDocuments) -> Visibility:
        size, skip = self.config.window_size, self.config.window_attn_skip_freq
        left, right = size if is_layer_window_attention(size, skip, self.layer_number) else (-1, -1)
        lengths = None if documents.lengths is None else torch.tensor(documents.lengths)
        return Visibility(
            causal=is_causal,
            left=left,
            right=right,
            cu_seqlens=documents.cu_seqlens_q
            if lengths is None
            else torch.tensor(documents.bounds),
            lengths=lengths,
            blocks=self.verification.block_mask,
            tokens_per_sample=tokens // documents.samples,
        )
