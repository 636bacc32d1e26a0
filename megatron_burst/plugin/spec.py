"""`--spec megatron_burst.plugin.spec gpt` or `hybrid`, a way to start of earlier versions.

--use-checkpoint-args brings it from their checkpoints; beside --context-parallel-algo it is passed
over.
"""

from typing import Any, NoReturn

from megatron.core.transformer.spec_utils import ModuleSpec


def gpt(*_: Any) -> NoReturn:
    """Raise a ValueError that says how to start."""
    raise ValueError(
        "--spec megatron_burst.plugin.spec is no more: drop it and --cp-comm-type, and start "
        "python -m megatron_burst.run SCRIPT --context-parallel-algo burst"
    )


class _Stack:
    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        gpt()


hybrid = ModuleSpec(module=_Stack)
