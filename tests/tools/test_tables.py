"""The pages that are read from the code are up to date. (fast tier)"""

import sys
from pathlib import Path

import pytest

from megatron_burst.config import size_or_auto
from megatron_burst.plugin.flags import all_flags

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "docs"))
import tables  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tables.py", "--folder", str(folder)])
        tables.main()
    return {page.name: page.read_text() for page in folder.iterdir()}


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_is_up_to_date(written: dict[str, str], name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    assert page == written[name], "run python scripts/docs/tables.py"


def test_every_flag_has_a_row_that_begins_with_its_default(written: dict[str, str]) -> None:
    rows = [line for line in written["flags.md"].splitlines() if line.startswith("| `")]
    for flag, row in zip(all_flags(), rows, strict=True):
        chosen = "auto" if flag.type is size_or_auto else "none"
        default = chosen if flag.default is None else str(flag.default)
        default = "megatron" if flag.field == "algorithm" else default
        assert row.startswith(f"| `{flag.name}` | `{default}`")
