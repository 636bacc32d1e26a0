"""Writes figures to files, equal figures to equal ones."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

_HASHED: dict[Any, Any] = {"svg.hashsalt": "megatron_burst"}  # the names inside an SVG


def save(figure: Figure, path: Path) -> None:
    """Write `figure` in the format that the suffix of `path` names, without a date in it."""
    with rc_context(_HASHED):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
