"""What `plan` answers to a whole command: the doctor's findings, its step, and that with ours."""

import importlib.util
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_burst.tools.doctor import checks
from megatron_burst.tools.doctor.launch_line import OUR_RUNNER, LaunchLine
from megatron_burst.tools.doctor.parsing import parse, see_beside
from megatron_burst.tools.doctor.report import Finding, Level, lines_of
from megatron_burst.tools.flags import Flags, arguments
from megatron_burst.tools.plan import screen
from megatron_burst.tools.plan.advice import nothing_fits
from megatron_burst.tools.plan.memory import GIB
from megatron_burst.tools.plan.pasted import CONNECTIONS, Change, Pasted, as_it_stands, change
from megatron_burst.tools.plan.ranking import Candidate, candidate

_COLUMNS = "U", "GPU", "host", "exposed", "s/step", "tok/s", "MFU"
_KEPT: Flags = {"recompute-attention-fraction": 0}


@dataclass(frozen=True)
class Answer:
    """The three parts; a step that cannot be predicted is a reason."""

    pasted: Pasted
    findings: Sequence[Finding] | None  # None where Megatron is not installed
    stands: Candidate | str
    change: Change
    ours: Candidate | str
    left: Sequence[Finding]  # what stops the command with our flags
    kept: Candidate | None = None  # with these, and attention not recomputed: if faster

    def as_json(self) -> str:
        """Return one JSON object."""

        def said(step: Candidate | str, words: Sequence[str]) -> dict[str, Any]:
            figures = {"error": step} if isinstance(step, str) else screen.figures(step)
            return {**figures, "command": shlex.join(words)}

        kept = _keeping(self.change).of_command(self.pasted)

        return json.dumps(
            {
                "findings": None if self.findings is None else [*map(asdict, self.findings)],
                "as_it_stands": said(self.stands, self.pasted.words),
                "with_our_flags": said(self.ours, self.change.of_command(self.pasted)),
                "and_attention_kept": self.kept and said(self.kept, kept),
                "add": arguments(self.change.add),
                "drop": arguments(self.change.drop),
                "environment": self.change.environment,
                "errors_with_our_flags": [*map(asdict, self.left)],
                "assumed": self.pasted.assumed,
            },
            indent=2,
        )

    def lines(self) -> Iterator[str]:
        """Yield what is read on a screen."""
        steps = {"as it stands": self.stands, "with our flags": self.ours}
        if known := [step for step in steps.values() if isinstance(step, Candidate)]:
            yield from (*screen.about(known[0].load), _sizes(known[0]))
        yield from screen.filled(self.pasted.assumed)
        yield f"\ndoctor, {self.pasted.target}:"
        if self.findings is None:
            yield "  megatron-core is not installed here, and its parser is what the doctor runs"
        else:
            yield from [*_indented(self.findings)] or ["  nothing was found"]
        yield ""
        yield from _table(steps | ({"and attention kept": self.kept} if self.kept else {}))
        yield from (f"{name}: {step}" for name, step in steps.items() if isinstance(step, str))
        yield from self._changes()
        if len(known) == 2:
            yield from ("", *screen.filled(_gain(*known)))

    def _changes(self) -> Iterator[str]:
        line, names = self.pasted.line, {"add": self.change.add, "drop": self.change.drop}
        yield ""
        if not line.starts_us:
            yield f"start: -m {OUR_RUNNER} {line.program}"
        for name, value in self.change.environment.items():
            yield f"environment: not {name}=1" if value is None else f"environment: {name}={value}"
        yield from (
            f"{name}: {shlex.join(arguments(flags))}" for name, flags in names.items() if flags
        )
        if self.kept:
            yield f"for attention kept, also add: {shlex.join(arguments(_KEPT))}"
        if self.change.add or self.change.drop or CONNECTIONS in self.change.environment:
            command = screen.wrapped(shlex.join(self.change.of_command(self.pasted)))
            yield from ("", "the command with our flags:", command)
        elif isinstance(self.ours, Candidate):
            yield "it has our flags"
        if more := [each for each in self.left if each not in (self.findings or ())]:
            yield from ("what then stops it, by the doctor:", *_indented(more))


def answer(pasted: Pasted) -> Answer:
    """Ask the doctor, and predict the step as it stands and with our flags."""
    stands, line = _predicted(pasted, as_it_stands), pasted.line
    try:
        changed = change(pasted)
        ours, ours_line = _predicted(pasted, changed.of), changed.of_line(line)
    except ValueError as reason:
        changed, ours, ours_line = Change({}, {}), str(reason), line
    findings = _doctor(pasted, line)
    left = _errors(_doctor(pasted, ours_line) if ours_line != line else findings)
    return Answer(pasted, findings, stands, changed, ours, left, _kept(pasted, changed, ours, left))


def _kept(
    pasted: Pasted, changed: Change, ours: Candidate | str, left: Sequence[Finding]
) -> Candidate | None:
    """Its step with attention kept, where that fits, is faster, and no other error stops it."""
    if isinstance(ours, str) or not ours.load.repeats_attention or _KEPT.keys() & ours.flags.keys():
        return None
    more = _keeping(changed)
    step = _predicted(pasted, more.of)
    if isinstance(step, str) or step.lacks or step.time.seconds >= ours.time.seconds:
        return None
    errors = _errors(_doctor(pasted, more.of_line(pasted.line)))
    return None if any(each not in left for each in errors) else step


def _keeping(changed: Change) -> Change:
    """The same with attention kept."""
    return replace(changed, add={**changed.add, **_KEPT})


def show(pasted: Pasted, *, as_json: bool) -> None:
    """Print the answer.

    Raises:
        ValueError: with our flags it does not fit either.
    """
    answered = answer(pasted)
    print(answered.as_json() if as_json else "\n".join(answered.lines()))
    if isinstance(answered.ours, Candidate) and answered.ours.lacks:
        raise ValueError(nothing_fits([answered.ours]))


def _predicted(pasted: Pasted, flags_of: Callable[[Flags], Flags]) -> Candidate | str:
    """A step, or why it cannot be predicted."""
    try:
        return candidate(flags_of(pasted.flags), pasted.cluster, pasted.gpus)
    except ValueError as reason:
        return str(reason)


def _doctor(pasted: Pasted, line: LaunchLine) -> list[Finding] | None:
    """What the doctor finds, but for memory; None where Megatron is not installed."""
    if importlib.util.find_spec("megatron") is None:
        return None
    see_beside(line)
    with pasted.target.pretended():
        findings = [*checks.findings(line, pasted.target, parse(line, pasted.target))]
    return [*checks.variable_findings(line.environment), *findings]


def _errors(findings: Sequence[Finding] | None) -> list[Finding]:
    return [each for each in findings or () if each.level is Level.ERROR]


def _indented(findings: Sequence[Finding]) -> Iterator[str]:
    for text in lines_of(findings):
        yield from screen.filled(text, "  ", " " * 11)


def _sizes(step: Candidate) -> str:
    texts = screen.cells(step)
    names = ("TP", "CP", "DP", *(name for name in ("PP", "EP") if texts[name] != "1"))
    return ", ".join(f"{name} {texts[name]}" for name in names)


def _table(steps: Mapping[str, Candidate | str]) -> Iterator[str]:
    predicted = {name: step for name, step in steps.items() if isinstance(step, Candidate)}
    if not predicted:
        return
    lines = [["", "attention", "loss", *_COLUMNS]]
    for name, step in predicted.items():
        loss = "chunked" if step.load.chunked_loss else "all logits"
        mark, texts = f"{name} (does not fit)" if step.lacks else name, screen.cells(step)
        lines.append([mark, screen.shown(step), loss, *(texts[column] for column in _COLUMNS)])
    yield from screen.aligned(lines)
    yield from ("", *screen.legend([*predicted.values()], _COLUMNS))


def _gain(stands: Candidate, ours: Candidate) -> str:
    less = (stands.memory.total - ours.memory.total) / GIB
    said = f"a GPU holds {abs(less):.1f} GiB {'less' if less >= 0 else 'more'}"
    if stands.lacks and not ours.lacks:
        said += f", and it fits: as it stands it {screen.missing(stands)}"
    return f"with our flags a step is {screen.compared(stands, ours)}, {said}"
