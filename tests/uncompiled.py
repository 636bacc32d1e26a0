"""Imported before Megatron: nothing of it is compiled.

Megatron wraps small functions in `torch.compile` as it is imported. What torch loads for that takes
longer than all the rest, in every process that imports Megatron, and no test compiles anything.
"""

from collections.abc import Callable
from typing import Any

import torch


def _as_it_is(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    return (lambda function: function) if model is None else model


torch.compile = _as_it_is

with torch.device("meta"):  # reads which functions make tensors once, before tests replace some
    torch.empty(0)
