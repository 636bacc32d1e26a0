"""--burst-verify: the first micro-batch beside attention in one piece, layer by layer.

Of each layer the first forward, the first backward and, where Megatron recomputes the layer, the
pass between them are compared. A layer is compared on the q, k, v and gradients that it was given,
so that an error of one layer does not show in another. What is expected follows from Megatron's own
arguments, not from what our attention made of them.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.dense import Dense, Visibility
from megatron_burst.attention.verify import (
    Finding,
    VerificationError,
    compare,
    margin,
    spread_of,
    table,
    worst,
)
from megatron_burst.config import BurstConfig
from megatron_burst.plugin.attention.block_mask import load_block_mask
from megatron_burst.plugin.attention.documents import Documents
from megatron_burst.transport.comm import gather_objects

logger = logging.getLogger(__name__)

_SHOWN = 20  # differences in an error
_TITLE = "layer"


class Verification:
    """What the layers of one model have found, until each that began has also ended."""

    def __init__(self, config: BurstConfig) -> None:
        self.config = config
        self.is_over = False
        self.block_mask = None if config.block_mask is None else load_block_mask(config.block_mask)
        self._findings: dict[int, list[Finding]] = {}
        self._positions: dict[str, str] = {}  # what is wrong with them, by what they are
        self._begun: set[int] = set()
        self._seconds = 0.0

    def of_layer(self, config: Any, layer_number: int, scale: float | None) -> "LayerCheck":
        """Return what checks one layer, given what Megatron built its core attention with."""
        return LayerCheck(self, config, layer_number, scale)

    def begin(self, layer: int) -> None:
        """Note that a layer has run forward and will run backward."""
        self._begun.add(layer)

    def end(self, layer: int, context: BurstContext) -> None:
        """Note that a layer has run backward; after the last one report.

        Raises:
            VerificationError: on every rank of the context-parallel group, if anything is wrong.
        """
        self._begun.discard(layer)
        self.settle(context)

    def settle(self, context: BurstContext) -> None:
        """Report what was found, unless a backward is to be waited for; as `end`."""
        if not self.is_over and not self._begun and self._findings:
            self.is_over = True
            self._report(context)

    def add(self, layer: int, findings: Sequence[Finding], seconds: float) -> None:
        """Take what was found in a layer on this rank."""
        self._findings.setdefault(layer, []).extend(findings)
        self._seconds += seconds
        for finding in findings:
            if finding.where:  # should something else end the job before the report
                logger.warning("burst verify: layer %d, %s", layer, finding)

    def add_positions(self, what: str, wrong: str) -> None:
        """Take whether positions were right, an empty text, or how they were wrong."""
        self._positions[what] = self._positions.get(what) or wrong

    def _report(self, context: BurstContext) -> None:
        mine = self._findings, self._positions
        everyone = [mine]
        if context.group is not None:
            limit = context.config.timeout_seconds
            everyone = gather_objects(context.group, "report --burst-verify", mine, limit)
        rows = {
            layer: worst(f for findings, _ in everyone for f in findings.get(layer, ()))
            for layer in sorted(self._findings)
        }
        text = table(_TITLE, {str(layer): row for layer, row in rows.items()})
        wrong = [texts for _, positions in everyone for texts in positions.values() if texts]
        wrong += [f"layer {n}, {f}" for n, row in rows.items() for f in row.values() if f.where]
        if _reports():
            logger.setLevel(
                logging.INFO
            )  # of every pipeline stage one rank, whatever the others do
            logger.info("%s\n%s", self._headline(context, bool(wrong)), text)
        if wrong:
            hidden = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise VerificationError(
                "--burst-verify: attention over the context-parallel ranks is not attention in one "
                "piece:\n  " + "\n  ".join(wrong[:_SHOWN]) + hidden
            )

    def _headline(self, context: BurstContext, is_wrong: bool) -> str:
        seen = " and ".join(sorted(self._positions)) or "neither position ids nor rotary angles"
        return (
            f"burst verify: over {context.ranks} context-parallel rank(s) the first micro-batch "
            f"{'DIFFERS from' if is_wrong else 'equals'} attention in one piece (checked in "
            f"{self._seconds:.1f} s, {seen} too). The largest error of any rank and what is "
            "allowed:"
        )


class LayerCheck:
    """The check of one core attention."""

    def __init__(
        self, verification: Verification, config: Any, layer_number: int, scale: float | None
    ) -> None:
        self._verification, self._layer, self._scale = verification, layer_number, scale
        left, right = -1, -1
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            left, right = config.window_size
        self._window = left, right
        self._seen: set[bool] = set()  # the passes that were checked, by whether they have a graph
        self._asked: tuple[bool, Documents | None] | None = None

    def expect(self, is_causal: bool, documents: Documents | None, is_training: bool) -> None:
        """Say what Megatron asks of the next call."""
        over = self._verification.is_over or torch.is_grad_enabled() in self._seen
        self._asked = None if over or not is_training else (is_causal, documents)

    def around(self, attend: Callable[..., Any]) -> Callable[..., Tensor]:
        """Return `attend`, a `ring_attention`, whose calls are checked where they are new."""

        def checked(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            context: BurstContext,
            *,
            sink: Tensor | None = None,
            **more: Any,
        ) -> Tensor:
            asked, self._asked = self._asked, None
            if asked is None:
                if self._seen:
                    self._verification.settle(context)
                return attend(q, k, v, context, sink=sink, **more)
            self._seen.add(torch.is_grad_enabled())
            call = _Call(self._dense(q, k, v, sink, context, *asked), context, self._take)
            inputs = (q, k, v) if sink is None else (q, k, v, sink)
            q, k, v, *sinks = _Inputs.apply(call, *inputs)
            sink = sinks[0] if sinks else None
            out, lse = attend(q, k, v, context, sink=sink, return_lse=True, **more)
            if out.requires_grad or not torch.is_grad_enabled():  # else no backward will come
                self._verification.begin(self._layer)
            call.check({"out": out, "lse": lse.transpose(1, 2)[..., None]})
            return _Output.apply(call, out)

        return checked

    def _take(self, call: "_Call", findings: Sequence[Finding], seconds: float) -> None:
        self._verification.add(self._layer, findings, seconds)
        if call.dout is not None:
            self._verification.end(self._layer, call.context)

    def _dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        context: BurstContext,
        is_causal: bool,
        documents: Documents | None,
    ) -> Dense:
        tokens = q.shape[1] * context.ranks
        visibility = Visibility(
            causal=is_causal,
            left=self._window[0],
            right=self._window[1],
            cu_seqlens=None if documents is None else documents.cu_seqlens_q,
            blocks=self._verification.block_mask,
            tokens_per_sample=tokens // (1 if documents is None else documents.samples),
        )
        scale = q.shape[3] ** -0.5 if self._scale is None else self._scale
        spread = spread_of(context, tokens)
        return Dense(spread, visibility, scale, q, k, v, sink, margin(context))


class _Call:
    """One attention call: what it should be, and where its backward has come to."""

    def __init__(
        self,
        dense: Dense,
        context: BurstContext,
        take: Callable[["_Call", Sequence[Finding], float], None],
    ) -> None:
        self.dense, self.context, self._take = dense, context, take
        self.dout: Tensor | None = None

    def check(self, found: Mapping[str, Tensor]) -> None:
        """Compare the results of the forward, or with `dout` the gradients."""
        start = time.monotonic()
        dense, rank = self.dense, dist.get_rank() if dist.is_initialized() else 0
        expected = dense.forward() if self.dout is None else dense.backward(self.dout)
        findings = compare(expected, found, dense.spread.own, rank)
        self._take(self, findings, time.monotonic() - start)


class _Inputs(torch.autograd.Function):
    """Hands on q, k, v and the sink, and shows their gradients to a call."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=False))
        call: _Call = ctx.call
        if (dsink := found.get("dsink")) is not None:
            found["dsink"] = call.dense.spread.total(dsink.double())[None, :, None, None]
        call.check(found)
        return None, *gradients


class _Output(torch.autograd.Function):
    """Hands on the output, and keeps its gradient for a call."""

    @staticmethod
    def forward(ctx: Any, call: _Call, out: Tensor) -> Tensor:
        ctx.call = call
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
        ctx.call.dout = dout
        return None, dout


def _reports() -> bool:
    """Whether this rank speaks for its pipeline stage."""
    if not parallel_state.model_parallel_is_initialized():
        return not dist.is_initialized() or dist.get_rank() == 0
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
