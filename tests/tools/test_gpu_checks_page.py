"""A reported gpu-check becomes a row of the page, without what names a machine. (fast tier)"""

import json
from pathlib import Path
from typing import Any

import gpu_checks
import pages
import pytest

from megatron_burst.tools import hardware
from megatron_burst.tools.gpu_check.report import Report, Result
from megatron_burst.tools.gpu_check.stage import Check


def report(folder: Path) -> dict[str, Any]:
    """As the tool writes it: a stage that passed, and one that failed."""
    machine = hardware.describe("gpu-check", ["megatron-burst", "gpu-check"])
    checks = [Check("a line", "1", "2", passed=True)], [Check("a line", "3", "2", passed=False)]
    results = [
        Result(n, name, "", "", 1.0, lines)
        for n, (name, lines) in enumerate(zip(("machine", "kernels"), checks, strict=True), 1)
    ]
    Report(device="NVIDIA H100", machine=machine, results=results).write(folder)
    return json.loads((folder / "gpu-check.json").read_text())


def test_a_report_becomes_a_row(tmp_path: Path) -> None:
    content = report(tmp_path)
    file = gpu_checks.add(tmp_path / "gpu-check.json", "an-engineer", tmp_path / "rows")
    kept = json.loads(file.read_text())
    assert kept["date"] == content["machine"]["time"][:10] and kept["ask"] == "an-engineer"
    assert (kept["passed"], kept["failed"]) == ("machine", "kernels")
    assert f"torch {content['machine']['versions']['torch']}" in kept["versions"]
    assert content["machine"]["host"] not in kept.values()
    shown = gpu_checks.parts(tmp_path / "rows")["reports"].splitlines()
    assert len(shown) == 3 and "| NVIDIA H100 |" in shown[-1]


def test_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no gpu-check.json"):
        gpu_checks.row({"stages": []}, "x")


def test_the_page_has_the_rows_that_are_kept() -> None:
    page = gpu_checks.PAGE.read_text()
    assert pages.filled(page, gpu_checks.parts()) == page
