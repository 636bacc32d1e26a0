"""Pages in Markdown, by the templates beside this file."""

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def page(name: str, **values: Any) -> str:
    """Return the page that a template makes of some values; one that is missing is an error."""
    loader = PackageLoader("megatron_burst.tools")
    places = Environment(  # what is shown is text, and a page no HTML
        loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    places.filters["row"] = _row
    return places.get_template(f"{name}.md").render(values)


def _row(cells: Sequence[str]) -> str:
    """A line of a table, whose cells nothing parts."""
    return f"| {' | '.join(str(c).replace('|', '/').replace('\n', ' ') for c in cells)} |"
