"""What a user of Megatron's own context parallelism gains and loses by switching to burst."""

from collections.abc import Sequence

from megatron_burst.tools.compare.results import FIGURES, Result, shown

HEAD = ("", "yours", "burst", "burst / yours")
OURS = "burst"
_FIGURES = ("step ms", "tokens/s a rank", "memory GiB")


def switching(ran: Sequence[Result]) -> tuple[str, list[list[str]]]:
    """Return a sentence that says what is compared, and the table's lines; none without both."""
    found = {result.name: result for result in ran}
    stock = [r for r in ran if r.name.startswith("megatron ") and r.seconds_per_step]
    if not stock or OURS not in found:
        return "Megatron's own context parallelism or `burst` did not run: nothing to weigh.", []
    theirs = min(stock, key=lambda result: result.seconds_per_step or 0.0)
    ours = found[OURS]
    step, loss = theirs.losses[-1]
    text = f"`yours` is `{theirs.name}`, the fastest of Megatron's own that ran. After {step} "
    text += f"steps the losses are {abs(ours.losses[-1][1] / loss - 1):.1e} apart."
    return text, [_line(name, theirs, ours) for name in _FIGURES]


def _line(name: str, theirs: Result, ours: Result) -> list[str]:
    old, new = (getattr(result, FIGURES[name][0]) for result in (theirs, ours))
    return [name, shown(name, old), shown(name, new), f"{new / old:.2f}" if old and new else "n/a"]
