"""What the doctor answers: a finding, how bad it is, and what to set."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the command line does not run
    WRONG = "wrong"  # it runs, and its numbers are not what was meant
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, by which check, and what to set instead."""

    check: str  # the name of the check
    level: Level
    text: str
    remedy: str = ""  # the flag or variable to set
