"""Writes what docs/flags.md, docs/api.md and docs/support.md read from the code.

python scripts/docs/tables.py
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import support_table
from pages import fill, parser, table

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

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC: dict[Any, tuple[str, ...]] = {  # of a class, these of its methods
    ring_attention: (),
    latent_ring_attention: (),
    BurstContext: ("create", "shard", "unshard", "layout", "positions", "bytes_sent"),
    Mask: ("causal", "full"),
    BurstConfig: (),  # its fields are the flags
    linear_cross_entropy: (),
    burst_layer_spec: (),
}


def flags() -> str:
    """The flags, the default of each first among its values."""
    rows = []
    for flag in all_flags():
        values = ", ".join(f"`{value}`" for value in _values(flag))
        rows.append([f"`{flag.name}`", values, _short(flag)])
    return table(["flag", "values, the default first", "what it does"], rows)


def _short(flag: Flag) -> str:
    """The beginning of its first sentence, of some words at least; --help has all."""
    said = re.split(r"; |[.] | [(]default", flag.help)[0].rstrip(".")
    before, _, _ = said.partition(": ")
    return (before if len(before.split()) > 6 else said) + "."


def _values(flag: Flag) -> list[str]:
    values = list(flag.values)
    if flag.field == "algorithm":
        return [MEGATRON, *values]
    if flag.field == "kernel":
        values = ["auto", *KERNELS]
    if flag.type is size_or_auto:
        return (
            ["auto", "a number"]
            if flag.default is None
            else [str(flag.default), "auto", "a number"]
        )
    default = "none" if flag.default is None else str(flag.default)
    return [default, *(value for value in values if value != default)]


def api() -> str:
    """The public names with their signatures and docstrings."""
    parts = (part for name, methods in PUBLIC.items() for part in _of_name(name, methods))
    return "\n".join(parts)


def _of_name(name: Any, methods: tuple[str, ...]) -> Iterator[str]:
    home = "megatron_burst" if hasattr(megatron_burst, name.__name__) else name.__module__
    yield f"## `{home}.{name.__name__}`\n"
    signature = "" if inspect.isclass(name) else f"{_signature(name)}\n\n"
    yield f"```text\n{signature}{_text(name)}\n```\n"
    for method in methods:
        attribute = inspect.getattr_static(name, method)
        shown = method if isinstance(attribute, property) else _signature(getattr(name, method))
        first = " ".join((inspect.getdoc(attribute) or "").partition("\n\n")[0].split())
        yield f"* `{name.__name__}.{shown}`: {first}"
    if methods:
        yield ""


def _signature(function: Callable[..., Any]) -> str:
    """Its arguments and their defaults."""
    whole = inspect.signature(function)
    given = [p.replace(annotation=p.empty) for n, p in whole.parameters.items() if n != "self"]
    shown = f"{function.__name__}{whole.replace(parameters=given, return_annotation=whole.empty)}"
    return textwrap.fill(shown, 110, subsequent_indent=" " * 4)


def _text(documented: Any) -> str:
    """A docstring up to the end of the code that it equals, of each argument the first clause."""
    kept, _, rest = (inspect.getdoc(documented) or "").partition("\nArgs:\n")
    kept = re.sub(r"(\n\n {4}(?:.*\n)+?)\n\S[\s\S]*", r"\1", kept)
    given = re.findall(r"^    (\w+: .*(?:\n {8}.*)*)", rest.partition("\n\n")[0], re.M)
    clauses = (re.split(r"[.;] | \(", " ".join(each.split()))[0].rstrip(".") for each in given)
    return "\n".join(
        [kept.rstrip("\n"), *["\nArgs:"] * bool(given), *(f"    {c}." for c in clauses)]
    )


PAGES: dict[str, Callable[[], dict[str, str]]] = {
    "flags.md": lambda: {"flags": flags()},
    "api.md": lambda: {"names": api()},
    "support.md": lambda: {name: table(*of) for name, of in support_table.tables().items()},
}

if __name__ == "__main__":
    parser(__doc__).parse_args()
    for name, parts in PAGES.items():
        fill(DOCS / name, parts())
