"""What a user of Megatron's own context parallelism gains and loses by switching to burst."""

from collections.abc import Sequence

from megatron_burst.tools.compare.results import FIGURES, Result, shown

HEAD = ("", "yours", "burst", "burst / yours")
OURS = "burst"
_FIGURES = ("step ms", "tokens/s a rank", "memory GiB")


def stock(ran: Sequence[Result]) -> Result | None:
    """Return Megatron's own context parallelism: of its variants that ran the fastest."""
    timed = [r for r in ran if r.name.startswith("megatron ") and r.seconds_per_step]
    return min(timed, key=lambda result: result.seconds_per_step or 0.0, default=None)


def switching(ran: Sequence[Result]) -> tuple[str, list[list[str]]]:
    """Return a sentence that says what is compared, and the table's lines; none without both."""
    theirs, found = stock(ran), {result.name: result for result in ran}
    if theirs is None or OURS not in found:
        return "Megatron's own context parallelism or `burst` did not run: nothing to weigh.", []
    ours = found[OURS]
    step, loss = theirs.losses[-1]
    text = (
        f"`yours` is `{theirs.name}`, the fastest of Megatron's own that ran. After {step} steps "
    )
    text += f"the losses are {abs(ours.losses[-1][1] / loss - 1):.1e} apart."
    return text, [_line(name, theirs, ours) for name in _FIGURES]


def _line(name: str, theirs: Result, ours: Result) -> list[str]:
    old, new = (getattr(result, FIGURES[name][0]) for result in (theirs, ours))
    return [name, shown(name, old), shown(name, new), f"{new / old:.2f}" if old and new else "n/a"]
