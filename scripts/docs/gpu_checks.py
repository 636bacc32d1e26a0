"""Adds a reported gpu-check to the table of docs/verify.md.

python scripts/docs/gpu_checks.py gpu-check.json --contact NAME

What is kept of a report is a file a report in scripts/bench/results/gpu_checks: date, device,
versions, verdicts and who may be asked; no host name, path or command. Without a report the table
is written again from these files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pages import fill, parser, table

ROOT = Path(__file__).parents[2]
PAGE, ROWS = ROOT / "docs" / "verify.md", ROOT / "scripts" / "bench" / "results" / "gpu_checks"
SHOWN = ("date", "device", "versions", "commit", "passed", "failed", "ask")
VERSIONS = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "flash_attn_3",
    "flash-attn-4",
)
type Row = Mapping[str, str]


def row(report: Mapping[str, Any], contact: str) -> Row:
    """Return what is kept of a report.

    Raises:
        ValueError: it is no gpu-check.json.
    """
    try:
        machine, stages = report["machine"], report["stages"]
        there = machine["versions"]
        return {
            "date": machine["time"][:10],
            "device": report["device"],
            "versions": ", ".join(f"{name} {there[name]}" for name in VERSIONS if name in there),
            "commit": str(machine["commit"])[:8],
            "passed": _stages(stages, "passed"),
            "failed": _stages(stages, "failed"),
            "ask": contact,
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no gpu-check.json: {error!r}") from error


def _stages(stages: Sequence[Mapping[str, Any]], verdict: str) -> str:
    return ", ".join(stage["name"] for stage in stages if stage["verdict"] == verdict)


def add(report: Path, contact: str, rows: Path = ROWS) -> Path:
    """Keep the row of a report; return its file."""
    new = row(json.loads(report.read_text()), contact)
    what = " ".join((*(new[key] for key in ("date", "device", "commit")), contact))
    name = re.sub(r"[^a-z0-9]+", "-", what.lower())
    rows.mkdir(parents=True, exist_ok=True)
    (file := rows / f"{name.strip('-')}.json").write_text(json.dumps(new, indent=2) + "\n")
    return file


def parts(rows: Path = ROWS) -> dict[str, str]:
    """Return what the page has of them, the newest first."""
    reports = [json.loads(file.read_text()) for file in sorted(rows.glob("*.json"), reverse=True)]
    cells = table(SHOWN, ([each[name] for name in SHOWN] for each in reports))
    return {"reports": cells if reports else "No report yet."}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("report", type=Path, nargs="?")
    arguments.add_argument("--contact", help="who may be asked, as it may stand on the page")
    given = arguments.parse_args()
    if given.report is not None:
        if not given.contact:
            arguments.error("--contact NAME: who may be asked")
        add(given.report, given.contact)
    fill(PAGE, parts())


if __name__ == "__main__":
    main()
