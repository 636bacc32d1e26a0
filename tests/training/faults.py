"""Trainings to which something happens: signals at a moment, what was logged, what was saved."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.training.launcher import command, environment, outcome, rank_processes

MODULE = "megatron_burst.pretrain_gpt"
STEP = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)")
TRACKER = "latest_checkpointed_iteration.txt"
LONGEST = 600.0  # seconds; a checkpoint waits for a disk that others use, too


class Training:
    """A job that runs while the test goes on."""

    def __init__(self, directory: Path, ranks: int, *flags: str) -> None:
        self._log = directory / "log.txt"
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(1)
        assert not rank_processes(), "another job runs"
        self._outcome = self._pool.submit(
            outcome, MODULE, directory, ranks, *flags, timeout=LONGEST
        )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def has_ended(self) -> bool:
        return self._outcome.done()

    def reaches(self, step: int) -> bool:
        return any(number >= step for number in steps(self.text))

    def wait_until(self, condition: Callable[[], bool], seconds: float = LONGEST) -> bool:
        """Wait for it; False if the job ended before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the job did not come so far\n{self.text[-3000:]}"
            if self.has_ended():
                return False
            time.sleep(0.002)
        return True

    def processes(self) -> list[psutil.Process]:
        self.wait_until(lambda: len(rank_processes()) == self._ranks)
        return rank_processes()

    def end(self) -> tuple[int, str]:
        """Wait for the job; return its status and all that it printed."""
        status, text = self._outcome.result()
        self._pool.shutdown()
        return int(status), text


class TorchrunJob:
    """A job of two ranks under torchrun; in a `with`, at the end of which it is killed."""

    def __init__(self, directory: Path, *flags: str, restarts: int = 0) -> None:
        self._log = directory / "log.txt"
        self._flags, self._restarts = flags, restarts

    def __enter__(self) -> "TorchrunJob":
        line = command(2, *self._flags)
        place = line.index("--standalone") + 1
        line[place:place] = ["--max-restarts", str(self._restarts)]
        with self._log.open("w") as file:
            settings = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.process = psutil.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=settings)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_running():
            for process in self.process.children(recursive=True):
                process.kill()
            self.process.kill()

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = LONGEST) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline, f"the job did not come so far\n{self.text[-3000:]}"
            time.sleep(0.05)

    def ranks(self) -> list[psutil.Process]:
        processes = self.process.children(recursive=True)
        ranks = {p.environ().get("RANK", ""): p for p in processes}
        return [ranks["0"], ranks["1"]]

    def end(self, seconds: float = LONGEST) -> int:
        """Wait for the end and return the status; AssertionError if a process is left."""
        ranks = self.process.children(recursive=True)
        status = self.process.wait(timeout=seconds)
        assert not psutil.wait_procs(ranks, timeout=60)[1]
        return int(status)


def steps(text: str) -> dict[int, tuple[str | None, str]]:
    """The loss and gradient norm of each step as they are printed, the loss with seven digits.

    The second loss after a start is None: what Megatron prints there is the mean of two steps.
    """
    found = [(int(m[1]), m[2], m[3]) for m in map(STEP.search, text.splitlines()) if m]
    return {step: (None if i == 1 else loss, norm) for i, (step, loss, norm) in enumerate(found)}


def check_same_steps(text: str, expected: str) -> list[int]:
    """Compare what two logs say of the steps of the first; return these steps."""
    known = steps(expected)
    for step, (loss, norm) in steps(text).items():
        assert norm == known[step][1], step
        assert None in (loss, known[step][0]) or loss == known[step][0], step
    return list(steps(text))


def recorded(checkpoint: Path) -> int:
    """The iteration of the newest checkpoint, 0 without any."""
    tracker = checkpoint / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, parameters and the optimizer's state, by its name."""
    if (folder / ".metadata").exists():
        file = folder.parent / f"{folder.name}.pt"
        dcp_to_torch_save(folder, file)
        files = [file]
    else:
        files = sorted(folder.glob("mp_rank_*/*.pt"))
    trees = {file.name: torch.load(file, weights_only=False) for file in files}
    return dict(_tensors(trees, ""))


def _tensors(tree: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _tensors(value, f"{path}/{key}")


def check_same_state(found: Path, expected: Path) -> int:
    """Compare two checkpoints bit by bit; return how many tensors they have."""
    a, b = saved_state(found), saved_state(expected)
    assert len(b) > 10
    names = {name: name.replace(found.name, expected.name) for name in a}
    assert sorted(names.values()) == sorted(b)
    different = [name for name, other in names.items() if not torch.equal(a[name], b[other])]
    assert not different, different
    return len(names)


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own; skips the test where it cannot be mounted."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
