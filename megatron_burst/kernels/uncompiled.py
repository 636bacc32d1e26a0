"""Keeps `torch.compile` out of a function, at no cost where nobody compiles."""

from collections.abc import Callable
from functools import wraps

import torch


def uncompiled[**Arguments, Result](
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """Return the same function, at which compiled code ends and behind which it begins anew.

    Its tensors go to kernels and messages that are no graph's, and its plans and chunks are plain
    Python, which tracing would carry out slowly for every new shape. `torch.compiler.disable` does
    that, but loads the compiler, so it is asked for by code that is being compiled alone.
    """
    in_compiled_code = torch._disable_dynamo(function)

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        run = in_compiled_code if torch.compiler.is_compiling() else function
        return run(*args, **kwargs)

    return call
