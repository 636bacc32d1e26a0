"""A rank that is killed ends the job, soon and entirely. (slow tier)"""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.training.launcher import BURST, command, environment


@pytest.mark.slow
def test_a_killed_rank_ends_the_job(tmp_path: Path, data: tuple[str, ...]) -> None:
    log = tmp_path / "log.txt"
    model = ("--hybrid-layer-pattern", "*-*-")
    flags = (*data, *BURST, *model, "--context-parallel-size", "2", "--train-iters", "100000")
    with log.open("w") as file:
        job = subprocess.Popen(
            command(2, *flags), stdout=file, stderr=subprocess.STDOUT, env=environment()
        )
    try:
        _wait_for(lambda: "iteration        3/" in log.read_text(errors="replace"), 300)
        ranks = psutil.Process(job.pid).children(recursive=True)
        (victim,) = (p for p in ranks if p.environ().get("RANK") == "1")
        os.kill(victim.pid, signal.SIGKILL)
        status = job.wait(timeout=200)
    finally:
        job.kill()
    assert status != 0, log.read_text()[-2000:]
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert "SIGKILL" in log.read_text(errors="replace")


def _wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the job did not come so far"
        time.sleep(0.2)
