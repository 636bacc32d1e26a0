"""The page of what runs with what is that of the code. (fast tier)"""

import sys
from pathlib import Path

import pytest

from megatron_burst.kernels import KERNELS
from megatron_burst.plugin.limits import LIMITS, LM_HEAD_LIMITS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "docs"))
import support_table  # noqa: E402

PAGE = ROOT / "docs" / "support.md"


@pytest.fixture(scope="module")
def page() -> str:
    return support_table.page()


def test_the_page_is_up_to_date(page: str) -> None:
    remedy = "python scripts/docs/support_table.py --write docs/support.md"
    assert PAGE.read_text() == page, f"run {remedy}"


def test_every_mask_runs_on_every_ring_and_layout(page: str) -> None:
    rows = [line for line in page.splitlines() if line.startswith("| sliding window, ")]
    assert len(rows) == 4
    assert all(line.count("| yes ") == 4 for line in rows)


def test_what_a_kernel_lacks_is_said_and_not_what_this_machine_lacks(page: str) -> None:
    (soft_cap,) = [line for line in page.splitlines() if line.startswith("| soft cap |")]
    cells = dict(zip(KERNELS, soft_cap.strip("| ").split(" | ")[1:], strict=True))
    assert cells["reference"] == cells["flash2"] == "yes" and "soft cap" in cells["cpu"]
    assert "not installed" not in page and "tensors are on" not in page


def test_every_limit_has_a_row(page: str) -> None:
    for name, reason in (*LIMITS.items(), *LM_HEAD_LIMITS.items()):
        assert f"| `{name}` | {reason} |" in page


def test_write_writes_the_page(tmp_path: Path, page: str) -> None:
    support_table.main(["--write", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == page
