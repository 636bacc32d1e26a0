"""Goes through a layer, block or stack spec of Megatron and makes a changed copy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


def rewrite_spec(spec: Any, rewrite: Callable[[str, Any], Any], name: str = "") -> Any:
    """Copy a spec, each value replaced by `rewrite(field name, value)` before it is gone through.

    Goes through dataclasses (ModuleSpec, ...Submodules), lists, tuples, dicts and
    `functools.partial`, however nested; an item of a container has the name of the container's
    field. Every other value is kept as it is.
    """
    spec = rewrite(name, spec)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return dataclasses.replace(
            spec,
            **{
                field.name: rewrite_spec(getattr(spec, field.name), rewrite, field.name)
                for field in dataclasses.fields(spec)
                if field.init
            },
        )

    def walk(value: Any) -> Any:
        return rewrite_spec(value, rewrite, name)

    if isinstance(spec, functools.partial):
        keywords = {key: walk(value) for key, value in spec.keywords.items()}
        return functools.partial(walk(spec.func), *map(walk, spec.args), **keywords)
    if type(spec) in (list, tuple):
        return type(spec)(walk(item) for item in spec)
    if type(spec) is dict:
        return {key: walk(value) for key, value in spec.items()}
    return spec
