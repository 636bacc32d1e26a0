"""The pages that are read from the code are up to date. (fast tier)"""

from pathlib import Path

import pages
import pytest
import tables

from megatron_burst.config import size_or_auto
from megatron_burst.plugin.flags import all_flags

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    page = (tables.DOCS / name).read_text()
    assert pages.filled(page, tables.PAGES[name]()) == page, "run python scripts/docs/tables.py"


@pytest.mark.parametrize("parts", [{}, {"of": "new", "other": ""}])
def test_a_part_that_is_not_on_the_page_or_not_written_is_noticed(parts: dict[str, str]) -> None:
    page = "<!-- of: written by x -->\n\nold\n\n<!-- end of of -->\n"
    assert pages.filled(page, {"of": "new"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="the page has parts"):
        pages.filled(page, parts)


def test_every_flag_has_a_row_that_begins_with_its_default() -> None:
    rows = [line for line in tables.flags().splitlines() if line.startswith("| `")]
    for flag, row in zip(all_flags(), rows, strict=True):
        chosen = "auto" if flag.type is size_or_auto else "none"
        default = chosen if flag.default is None else str(flag.default)
        default = "megatron" if flag.field == "algorithm" else default
        assert row.startswith(f"| `{flag.name}` | `{default}`")
