"""All known errors of command lines that Megatron's parser lets pass."""

from itertools import chain

from megatron_burst.tools.doctor import loss_checks, mask_checks, megatron_ring_checks, start_checks
from megatron_burst.tools.doctor.check import Check
from megatron_burst.tools.doctor.finding import Finding
from megatron_burst.tools.doctor.situation import Situation

CHECKS: tuple[Check, ...] = tuple(
    chain.from_iterable(
        part.CHECKS for part in (loss_checks, mask_checks, megatron_ring_checks, start_checks)
    )
)


def findings(situation: Situation) -> list[Finding]:
    """Make every check."""
    answers = ((check.name, check.look(situation)) for check in CHECKS)
    return [Finding(name, *answer) for name, answer in answers if answer is not None]
