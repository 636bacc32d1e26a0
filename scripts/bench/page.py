"""A benchmark's page and the CSV beside it: figures, and where and by what they were measured.

A row of the CSV is one case with all that decided it and all that was measured, and repeats the
columns of its origin, so that the files of several machines can be put together. A section at the
end of a page that is headed "Notes" is written by hand and stays when the page is written again.
"""

import argparse
import csv
import datetime
import os
import platform
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_burst.tools.hardware import commit, cpu_model

RESULTS = Path(__file__).resolve().parent / "results"
NOTES = "\n## Notes"
WIDTH = 100

type Row = Mapping[str, Any]
type Origin = dict[str, str]  # the columns that say where figures come from


def origin(device: str = "cpu", load: str = "") -> Origin:
    """Say when, where, with what and by which command this process measures: call it first."""
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
    if device != "cpu":
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "date": str(datetime.date.today()),
        "commit": commit(RESULTS),
        "command": command(),
        "device": device_name(device),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": load or f"{os.getloadavg()[0]:.2f}",
        **versions,
    }


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


@dataclass(frozen=True)
class Page:
    """What a benchmark found, in words and as rows."""

    title: str
    about: str  # paragraphs; they are filled
    body: str  # Markdown
    rows: Sequence[Row]
    origin: Origin

    def __str__(self) -> str:
        paragraphs = (_filled(text) for text in self.about.strip().split("\n\n"))
        parts = [f"# {self.title}", *paragraphs, _origin_lines(self.origin), self.body.strip()]
        return "\n\n".join(parts) + "\n"

    def publish(self, path: Path) -> None:
        """Print the page, and write it to `path` and its rows to the CSV beside it."""
        text = str(self)
        print(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else ""
        _, heading, notes = before.partition(NOTES)
        path.write_text(f"{text}{heading}{notes}")
        write_csv(path.with_suffix(".csv"), self.rows, self.origin)
        print(f"written to {path} and {path.with_suffix('.csv')}")


def write_csv(path: Path, rows: Sequence[Row], given: Origin) -> None:
    """Write rows, each with some of the columns, under the columns of all and of their origin."""
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *given], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _cell(value) for name, value in row.items()} | given)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int | None = None) -> str:
    """Return a table in Markdown; the columns from number `numbers` on are set to the right."""
    left = len(head) if numbers is None else numbers
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser whose help is a benchmark's docstring, with where the page goes."""
    about = (doc or "").split("\n\n")
    made = argparse.ArgumentParser(description=about[0], epilog=about[2])
    text = f"the page, its CSV beside it; default: results/DEVICE_{name}.md"
    made.add_argument("--output", type=Path, help=text)
    return made


def parse(
    made: argparse.ArgumentParser,
    arguments: Sequence[str],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> argparse.Namespace:
    """Parse flags; one that is not given has its device's default, and no number is below 1."""
    args = made.parse_args(arguments)
    for name, value in (defaults[args.device] if defaults else {}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for value in vars(args).values():
        numbers = value if isinstance(value, list) else [value]
        if any(type(number) is int and number < 1 for number in numbers):
            made.error("all numbers must be positive")
    return args


def output(args: argparse.Namespace, name: str) -> Path:
    """Return where the page goes."""
    device = getattr(args, "device", "cpu")
    kind = "cpu" if device == "cpu" else device_name(device).lower()
    return args.output or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', kind)}_{name}.md"


def _origin_lines(given: Origin) -> str:
    """Return an origin as a list in Markdown."""
    names = {"torch": "torch", "python": "Python", "system": "", "cuda": "CUDA"}
    names |= {"cudnn": "cuDNN", "nccl": "NCCL"}
    versions = [f"{name} {given[key]}".strip() for key, name in names.items() if key in given]
    threads = f"{given['threads']} thread{'s' if given['threads'] != '1' else ''} a process"
    lines = [
        f"date: {given['date']}, commit {given['commit']}",
        f"device: {given['device']}, {given['cores']} cores, {threads}",
        f"load before: {given['load']}",
        f"versions: {', '.join(versions)}",
        f"command: `{given['command']}`",
    ]
    return "\n".join(_filled(f"* {line}", "  ") for line in lines)


def _filled(text: str, indent: str = "") -> str:
    """Break lines as prose, but nowhere else than at spaces."""
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
