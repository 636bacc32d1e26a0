"""The command-line flags, derived from the fields of the configurations."""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_burst.config import BurstConfig, FlagConfig, LmHeadConfig, flag_name, members
from megatron_burst.plugin.training_config import FileConfig, LayerConfig, MlpConfig


class Flag(NamedTuple):
    """One command-line flag, derived from a field of a configuration."""

    field: str
    name: str
    type: Callable[[str], Any]  # what its value is read as
    values: tuple[str, ...]  # what it may be; empty where any string is accepted
    default: Any
    help: str


ENDED = {
    "--burst-check-nan": "pass --burst-check nan",
    "--burst-verify": "pass --burst-check reference",
    "--burst-segments": "drop it: --burst-layout segmented-zigzag takes as many as pay",
    "--burst-high-priority-streams": "drop it: ours have it unless TORCH_NCCL_HIGH_PRIORITY=0",
    "--burst-blocks-per-call": "drop it: heads are shared out where one block's tile is too small",
    "--recompute-attention-offload": "pass --recompute-offload",
}
"""Flags of before, and what to do in their place."""


def flags(config: type[FlagConfig] = BurstConfig) -> tuple[Flag, ...]:
    """Return every command-line flag that a configuration describes, in the order of its fields."""
    docs = _field_docstrings(config)  # type: ignore[arg-type] # it asks instances for a hash
    named = [(flag_name(config, spec), spec) for spec in dataclasses.fields(config)]
    return tuple(
        Flag(
            field=spec.name,
            name=name,
            type=spec.metadata.get("type") or _type(spec),
            values=tuple(map(str, spec.metadata.get("values", members(spec)))),
            default=spec.default,
            help=docs[spec.name],
        )
        for name, spec in named
        if name != spec.name
    )


def attention_flags() -> tuple[Flag, ...]:
    """Return the flags that have no effect without our attention."""
    return (*flags(), *flags(LayerConfig))


def all_flags() -> tuple[Flag, ...]:
    """Return every flag of the group "burst", those of attention first."""
    return (*attention_flags(), *flags(LmHeadConfig), *flags(MlpConfig), *flags(FileConfig))


def _type(spec: dataclasses.Field[Any]) -> type:
    return next((t for t in (bool, int, float) if spec.type in (t, t | None)), str)


@functools.cache
def _field_docstrings(config: type) -> dict[str, str]:
    """Python drops the string after a field, so read it from the source."""
    (cls,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(cls, ast.ClassDef)
    docs = {}
    for node, following in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(node.target, ast.Name)
            docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs
