"""Generation: tokens behind a cache of keys and values go to Megatron's own core attention."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn


class Decoder:
    """What stood in the layer spec, built when a first token follows a prompt.

    Args:
        build: makes it.
        why_not: what keeps it from standing in for ours; None: nothing.
    """

    def __init__(self, build: Callable[[], Any] | None, why_not: str | None) -> None:
        self._build, self._why_not = build, why_not
        self._built: Any = None

    def check(self) -> None:
        """Refuse the prompt already where no token could follow it; see `__call__`.

        Megatron's mode alone stays on behind a static engine, for evaluations of other models, too.
        """
        if InferenceMode.is_active() and torch.is_inference_mode_enabled():
            self._refuse()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask_type: AttnMaskType | None,
        sink: Tensor | None,
    ) -> Tensor:
        """Attend as Megatron does: fewer queries [s, b, heads, d] than keys and values.

        Raises:
            ValueError: it cannot stand in for ours.
        """
        self._refuse()
        if self._built is None:
            assert self._build is not None
            self._built = self._build().eval()
            if isinstance(sink, nn.Parameter):  # the only weight there is: both have one
                self._built.softmax_offset = sink
        out: Tensor = self._built(query, key, value, None, attn_mask_type=mask_type)
        return out

    def _refuse(self) -> None:
        if self._why_not is not None:
            raise ValueError(f"no token can be generated {self._why_not}")
