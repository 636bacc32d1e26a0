"""The table of flags in docs/flags.md is that of the code. (fast tier)"""

import sys
from pathlib import Path

import pytest

from megatron_burst.config import all_flags

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "docs"))
import flags_table  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"


def test_the_readme_is_up_to_date() -> None:
    text = PAGE.read_text()
    remedy = "python scripts/docs/flags_table.py --write docs/flags.md"
    assert flags_table.replaced(text) == text, f"run {remedy}"


def test_every_flag_has_a_row_that_begins_with_its_default() -> None:
    rows = flags_table.table().splitlines()[2:]
    for flag, row in zip(all_flags(), rows, strict=True):
        default = "none" if flag.default is None else flag.default
        default = "megatron" if flag.field == "algorithm" else default
        assert row.startswith(f"| `{flag.name}` | `{default}`")


def test_write_changes_what_is_between_the_markers_alone(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"above\n{flags_table.BEGIN}\nformerly\n{flags_table.END}\nbelow\n")
    flags_table.main(["--write", str(file)])
    text = file.read_text()
    assert text.startswith(f"above\n{flags_table.BEGIN}\n| flag ") and "formerly" not in text
    assert text.endswith(f"|\n{flags_table.END}\nbelow\n")


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        f"{flags_table.END}\n{flags_table.BEGIN}",
        f"{flags_table.BEGIN}\n{flags_table.BEGIN}\n{flags_table.END}",
    ],
)
def test_a_page_without_both_markers_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        flags_table.main(["--write", str(file)])
    assert ended.value.code == 1 and "expected these two lines" in capsys.readouterr().err
    assert file.read_text() == text
