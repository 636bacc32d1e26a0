"""A known error of command lines: its name, where it was seen, and what recognises it."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_burst.tools.doctor.finding import Level
from megatron_burst.tools.doctor.situation import Situation

type Answer = tuple[Level, str, str] | None  # how bad, why, and what to set


@dataclass(frozen=True, slots=True)
class Check:
    """One known error.

    Attributes:
        name: by which findings and the documentation call it.
        about: what goes wrong.
        seen: where it was reported; MC is Megatron-LM, TE is TransformerEngine.
        look: answers for a command line; None where it is not concerned.
    """

    name: str
    about: str
    seen: str
    look: Callable[[Situation], Answer]
