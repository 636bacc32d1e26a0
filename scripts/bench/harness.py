"""What benchmarks share: flags, repetitions in turns, a quiet machine, a page and its CSV.

A row of the CSV is one case with all that decided it and all that was measured, and repeats the
columns of its origin, so that the files of several machines can be put together. A section at the
end of a page that is headed "Notes" is written by hand and stays when the page is written again.
"""

import argparse
import csv
import datetime
import os
import platform
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_burst.attention import preparing
from megatron_burst.tools.gpu_check.stage import Device
from megatron_burst.tools.hardware import commit, cpu_model
from megatron_burst.tools.one_rank import EmptyKernel
from megatron_burst.transport.nccl import loaded

RESULTS = Path(__file__).resolve().parent / "results"
NOTES = "\n## Notes"
MIB = 2**20
MAX_LOAD, PATIENCE_SECONDS = 0.5, 300.0

type Row = Mapping[str, Any]


class Flags(argparse.ArgumentParser):
    """A parser whose help is a benchmark's docstring, with the flags that all have.

    Where there are defaults of devices, --device chooses one.
    """

    def __init__(self, doc: str | None, of_devices: Mapping[str, Row] | None = None) -> None:
        how = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=how, allow_abbrev=False)
        self._of_devices = of_devices or {"cpu": {}}
        self.set_defaults(device="cpu")
        if of_devices:
            self.add_argument("--device", choices=[*of_devices])
        self.add_argument("--output", type=Path, help="the page; its CSV goes beside it")
        self.add_argument("--repetitions", type=int, default=5)
        self.add_argument("--force", action="store_true", help="measure under load too")

    def read(self, given: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse; what is not given has its device's default, and all numbers are positive."""
        args = self.parse_args(given)
        for name, value in self._of_devices[args.device].items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        for value in vars(args).values():
            numbers = value if isinstance(value, list) else [value]
            if any(type(number) in (int, float) and number <= 0 for number in numbers):
                self.error("all numbers must be positive")
        return args


def in_turns[Name, Result](
    ways: Mapping[Name, Callable[[], Result]], repetitions: int, *, seed: int = 0
) -> dict[Name, list[Result]]:
    """Call every way `repetitions` times, in a new order each time; return what the calls returned.

    The order is the same in all processes that call it so, and what disturbs a while disturbs all.
    One round goes before and does not count.
    """
    results: dict[Name, list[Result]] = {name: [] for name in ways}
    for repetition in range(-1, repetitions):
        for name in random.Random(f"{seed} {repetition}").sample(list(ways), len(ways)):
            result = ways[name]()
            if repetition >= 0:
                results[name].append(result)
    return results


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the columns that say how long repetitions took."""
    q1, middle, q3 = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    return {"median_s": middle, "q1_s": q1, "q3_s": q3, "least_s": min(seconds)}


def empty_kernels() -> AbstractContextManager[Any]:
    """Have attention call a kernel whose results have no values, and log no choice."""
    stand_ins = {"select_kernel": lambda *_: EmptyKernel(), "log_choice": lambda *_: None}
    return mock.patch.multiple(preparing, **stand_ins)


def seconds(
    run: Callable[[], object], device: str = "cpu", cpu: Callable[[], float] = time.process_time
) -> float:
    """Return how long a call takes: CPU time of this process, on a GPU the time between events."""
    if device != "cpu":
        return Device(torch.device(device), Path()).timed(run)
    started = cpu()
    run()
    return cpu() - started


def wait_until_quiet(force: bool) -> None:
    """Wait until others leave the machine alone; end the program where they do not."""
    until = time.monotonic() + PATIENCE_SECONDS
    while (load := os.getloadavg()[0]) > MAX_LOAD and not force:
        said = f"the load of the last minute is {load:.2f}, above {MAX_LOAD}"
        if time.monotonic() > until:
            sys.exit(f"{said}, and would spoil the times; wait, or pass --force")
        progress(f"waits for a quiet machine: {said}")
        time.sleep(min(20, PATIENCE_SECONDS))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def origin(device: str = "cpu") -> dict[str, str]:
    """Say when, where, with what and by which command this process measures: call it first.

    It takes one thread from then on, so that CPU time is that of one core.
    """
    torch.set_num_threads(1)
    facts = {
        "date": str(datetime.date.today()),
        "commit": commit(RESULTS),
        "command": command(),
        "device": device_name(device),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.2f}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
    if device != "cpu":
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["nccl"] = ".".join(map(str, loaded()))
    return facts


def command() -> str:
    """Return what to type, from the folder of the repository, to measure this again."""
    launch = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sizes = os.environ["GROUP_WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
        launch = ["torchrun", "--nnodes", sizes[0], "--nproc-per-node", sizes[1]]
    script = f"scripts/bench/{Path(sys.argv[0]).stem}.py"
    return shlex.join([*launch, script, *sys.argv[1:]])


def device_name(device: str) -> str:
    if device == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"CPU, {platform.machine()}, {capability}, {cpu_model()}"
    return torch.cuda.get_device_name(device)


def publish(
    args: argparse.Namespace,
    name: str,
    page: str,
    rows: Sequence[Row],
    given: Mapping[str, str],
    **words: object,
) -> None:
    """Print a page, and write it to --output and its rows to the CSV beside it.

    Args:
        args: the flags.
        name: of the page where --output is not given.
        page: a heading, then words and tables in Markdown, with places for flags and `words`.
        rows: each with some of the columns.
        given: the origin; it goes below the heading.
        words: beside the flags.
    """
    device = "cpu" if args.device == "cpu" else device_name(args.device).lower()
    path = args.output or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', device)}_{name}.md"
    heading, _, rest = page.strip().format(**vars(args), **words).partition("\n")
    lines = "\n".join(f"* {name}: {value}" for name, value in given.items())
    text = f"{heading}\n\n{lines}\n{rest}\n"
    print(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    _, notes, by_hand = before.partition(NOTES)
    path.write_text(f"{text}{notes}{by_hand}")
    columns = dict.fromkeys(column for row in rows for column in row)
    with path.with_suffix(".csv").open("w", newline="") as file:
        names = ["benchmark", *columns, *given]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells = {column: _cell(value) for column, value in row.items()}
            writer.writerow({"benchmark": name, **cells, **given})


def table(head: Iterable[str], rows: Iterable[Iterable[str]], words: int = 1) -> str:
    """Return a table in Markdown; all columns after so many of words are numbers."""
    head = list(head)
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
