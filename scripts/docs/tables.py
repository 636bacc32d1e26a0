"""Writes the pages that are read from the code: docs/flags.md, docs/api.md and docs/support.md.

python scripts/docs/tables.py [--folder docs]
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import support_table

import megatron_burst
from megatron_burst import (
    BurstConfig,
    BurstContext,
    Mask,
    latent_ring_attention,
    linear_cross_entropy,
    ring_attention,
)
from megatron_burst.config import size_or_auto
from megatron_burst.kernels import KERNELS
from megatron_burst.plugin.arguments import MEGATRON
from megatron_burst.plugin.flags import Flag, all_flags
from megatron_burst.plugin.layer_spec import burst_layer_spec

WRITTEN = "<!-- written by python scripts/docs/tables.py -->"
PUBLIC: dict[Any, tuple[str, ...]] = {  # of a class, these of its methods
    ring_attention: (),
    latent_ring_attention: (),
    BurstContext: ("create", "shard", "unshard", "layout", "positions", "bytes_sent"),
    Mask: ("causal", "full"),
    BurstConfig: (),  # its fields are the flags
    linear_cross_entropy: (),
    burst_layer_spec: (),
}
PACKAGES = re.compile(r"(?:torch|megatron_burst|collections)[.](?:\w+[.])*")
FLAGS = f"""\
# Flags

{WRITTEN}

Ours, from the code. They go beside Megatron's own; `--help` of any [way to start](launching.md)
lists them, too. The time limit of a message is Megatron's `--distributed-timeout-minutes`.
"""
API = f"""\
# API

{WRITTEN}

What is documented here is public; everything else may change without notice. Dimensions are named
by a suffix: B batch, S tokens of this rank, H heads, D head size. The fields of `BurstConfig` are
the [flags](flags.md).
"""
SUPPORT = f"""\
# What runs with what

{WRITTEN}

A cell that is not "yes" says why not, in the words of the error. Sinks (`--softmax-type`) are a
term of the merge, and run with every kernel.
"""


def flags() -> str:
    """The flags, the default of each first among its values."""
    rows = ([f"`{f.name}`", ", ".join(f"`{v}`" for v in _values(f)), f.help] for f in all_flags())
    return f"{FLAGS}\n{_table(['flag', 'values, the default first', 'what it does'], rows)}\n"


def _values(flag: Flag) -> list[str]:
    values = list(flag.values)
    if flag.field == "algorithm":
        return [MEGATRON, *values]
    if flag.field == "kernel":
        values = ["auto", *KERNELS]
    if flag.type is size_or_auto:
        return ["auto", "a number"]
    default = "none" if flag.default is None else str(flag.default)
    return [default, *(value for value in values if value != default)]


def api() -> str:
    """The public names with their signatures and docstrings."""
    parts = (part for name, methods in PUBLIC.items() for part in _of_name(name, methods))
    return "\n".join([API, *parts])


def _of_name(name: Any, methods: tuple[str, ...]) -> Iterator[str]:
    home = "megatron_burst" if hasattr(megatron_burst, name.__name__) else name.__module__
    yield f"## `{home}.{name.__name__}`\n"
    if not inspect.isclass(name):
        yield _signature(name)
    yield _text(name)
    for method in methods:
        found = inspect.getattr_static(name, method)
        yield f"### `{name.__name__}.{method}`\n"
        if not isinstance(found, property):
            yield _signature(getattr(name, method))
        yield _text(found)


def _signature(function: Callable[..., Any]) -> str:
    """One parameter a line."""
    whole = inspect.signature(function)
    lines = [f"    {parameter}," for parameter in whole.parameters.values()]
    result = inspect.formatannotation(whole.return_annotation)
    shown = "\n".join([f"{function.__name__}(", *lines, f") -> {result}"])
    return f"```python\n{PACKAGES.sub('', shown)}\n```\n"


def _text(documented: Any) -> str:
    return f"```text\n{inspect.getdoc(documented)}\n```\n"


def support_page() -> str:
    parts = (f"{text}\n{_table(head, rows)}\n" for text, head, rows in support_table.sections())
    return "\n".join([SUPPORT, *parts])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '\\|') for cell in line)} |" for line in lines
    )


PAGES = {"flags.md": flags, "api.md": api, "support.md": support_page}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    main()
