"""Writes docs/api.md: the public names with their signatures and docstrings.

scripts/docs/api.py [--output docs/api.md]
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import megatron_burst
from megatron_burst import BurstConfig, BurstContext, Mask, linear_cross_entropy, ring_attention
from megatron_burst.plugin.layer_spec import burst_layer_spec

NAMES: dict[Any, tuple[str, ...]] = {  # of a class, these of its methods
    ring_attention: (),
    BurstContext: ("create", "shard", "unshard", "layout", "positions", "bytes_sent"),
    Mask: ("causal", "full"),
    BurstConfig: (),  # its fields are the flags
    linear_cross_entropy: (),
    burst_layer_spec: (),
}
PACKAGES = re.compile(r"(?:torch|megatron_burst|collections)[.](?:\w+[.])*")
HEADER = """# API

<!-- written by python scripts/docs/api.py -->

What is documented here is public; everything else may change without notice. Dimensions are named
by a suffix: B batch, S tokens of this rank, H heads, D head size. The fields of `BurstConfig` are
the [flags](flags.md).
"""


def page() -> str:
    return "\n".join([HEADER, *chain.from_iterable(starmap(of_name, NAMES.items()))])


def of_name(name: Any, methods: tuple[str, ...]) -> Iterator[str]:
    home = "megatron_burst" if hasattr(megatron_burst, name.__name__) else name.__module__
    yield f"## `{home}.{name.__name__}`\n"
    if not inspect.isclass(name):
        yield signature(name)
    yield text(name)
    for method in methods:
        found = inspect.getattr_static(name, method)
        yield f"### `{name.__name__}.{method}`\n"
        if not isinstance(found, property):
            yield signature(getattr(name, method))
        yield text(found)


def signature(function: Callable[..., Any]) -> str:
    """One parameter a line."""
    whole = inspect.signature(function)
    lines = [f"    {parameter}," for parameter in whole.parameters.values()]
    result = inspect.formatannotation(whole.return_annotation)
    shown = "\n".join([f"{function.__name__}(", *lines, f") -> {result}"])
    return f"```python\n{PACKAGES.sub('', shown)}\n```\n"


def text(documented: Any) -> str:
    return f"```text\n{inspect.getdoc(documented)}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/api.md"))
    parser.parse_args().output.write_text(page())


if __name__ == "__main__":
    main()
