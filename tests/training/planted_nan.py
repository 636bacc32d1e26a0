"""Trains as usual, but one layer of one rank is given a NaN in its third call; run by tests.

The last of its flags is LAYER:RANK:WHERE. WHERE is forward, then it is in the value, or backward,
then in the output's gradient, or loss: then in all losses of that rank from its fifth call on.
"""

import itertools
import os
import sys
from typing import Any

import torch
from torch import Tensor


def main() -> None:
    from megatron_burst import pretrain_gpt
    from megatron_burst.plugin import pretraining
    from megatron_burst.plugin.attention import core_attention

    layer, rank, where = sys.argv.pop().split(":")
    calls = itertools.count(1)
    masked_loss = pretraining._masked_loss

    def planted_loss(mask: Tensor | None, per_token: Tensor) -> Any:
        hit = where == "loss" and os.environ["RANK"] == rank and next(calls) >= 5
        return masked_loss(mask, per_token * torch.nan if hit else per_token)

    pretraining._masked_loss = planted_loss

    def with_nan_check(attend: Any, name: str) -> Any:
        checked = original(attend, name)
        if name != layer or os.environ["RANK"] != rank:
            return checked

        def planted(q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
            if next(calls) != 3:
                return checked(q, k, v, *more, **options)
            if where == "forward":
                return checked(q, k, v * torch.nan, *more, **options)
            out = checked(q, k, v, *more, **options).clone()
            out.register_hook(lambda gradient: gradient * torch.nan)
            return out

        return planted

    original = core_attention.with_nan_check
    core_attention.with_nan_check = with_nan_check
    pretrain_gpt.main()
