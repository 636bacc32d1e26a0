"""The pages that are read from the code, and what they say of flags and kernels. (fast tier)"""

import sys
from pathlib import Path

import pytest

from megatron_burst.config import all_flags
from megatron_burst.kernels import KERNELS
from megatron_burst.plugin.limits import LIMITS, LM_HEAD_LIMITS

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
        default = "megatron" if flag.field == "algorithm" else flag.shown_default
        assert row.startswith(f"| `{flag.name}` | `{default}`")


def test_every_mask_runs_on_every_ring_and_layout(written: dict[str, str]) -> None:
    lines = written["support.md"].splitlines()
    rows = [line for line in lines if line.startswith("| sliding window, ")]
    assert len(rows) == 4
    assert all(line.count("| yes ") == 4 for line in rows)


def test_what_a_kernel_lacks_is_said_and_not_what_this_machine_lacks(
    written: dict[str, str],
) -> None:
    page = written["support.md"]
    (soft_cap,) = [line for line in page.splitlines() if line.startswith("| soft cap |")]
    cells = dict(zip(KERNELS, soft_cap.strip("| ").split(" | ")[1:], strict=True))
    assert cells["reference"] == cells["flash2"] == "yes" and "soft cap" in cells["cpu"]
    assert "not installed" not in page and "tensors are on" not in page


def test_every_limit_has_a_row(written: dict[str, str]) -> None:
    for limit in (*LIMITS, *LM_HEAD_LIMITS):
        assert f"| `{limit.name}` | {limit.reason} |" in written["support.md"]
