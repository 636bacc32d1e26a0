"""One thing that the doctor found, and how bad it is."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the command line does not run
    WRONG = "wrong"  # it runs, and its numbers are not what was meant
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, by which check, and what to set instead."""

    check: str  # the name of the check
    level: Level
    text: str
    remedy: str = ""  # the flag or variable to set


def worst(findings: list[Finding]) -> Level:
    """Return the worst level among the findings."""
    return min((finding.level for finding in findings), key=list(Level).index, default=Level.OK)
