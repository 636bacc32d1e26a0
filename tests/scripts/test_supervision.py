"""Whatever of a job is killed, nothing of it runs on, and its log and status are whole. (fast tier)

With stand-ins for ssh and torchrun; trainings that are killed: tests/training/test_kills.py.
"""

import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_burst.tools.launch.processes import Signals
from tests.scripts.stand_ins import ROOT, SCRIPTS, Machine, wait_for
from tests.tier import in_turn, slow_if

TWO = ("--nodes", "n1 user@n2", "--output", "out")
LINES = 20000  # more than a pipe holds


def processes(machine: Machine, *words: str) -> list[psutil.Process]:
    """Those that were started for this machine and have such words in their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STAND_INS") == str(machine.folder):
                line = " ".join(process.cmdline())
                found += [process] if all(re.search(word, line) for word in words) else []
        except psutil.Error:  # it has ended, or is somebody else's
            continue
    return found


def start(machine: Machine, launcher: tuple[str, ...], **more: str) -> subprocess.Popen[str]:
    """Start a job; return when all of its ranks run."""
    job = machine.start(*launcher, HANG="1", LEAVE_BEHIND="1", **more)
    hosts = ("n1", "n2") if "--nodes" in launcher else ("here",)
    wait_for(lambda: all(machine.text(f"hanging-{host}") for host in hosts))
    return job


VICTIMS = {
    "launcher": ("tools.launch (local|ssh)",),
    "node": ("tools.launch node",),
    "torchrun": ("sleep 600",),
}
LAUNCHERS = {"local": ("launch_local.sh", "--output", "out"), "ssh": ("launch_nodes.sh", *TWO)}


@pytest.mark.parametrize(("victim", "launcher"), in_turn(VICTIMS, ("ssh", "local")))
@pytest.mark.parametrize("number", slow_if({signal.SIGQUIT}, [signal.SIGKILL, signal.SIGQUIT]))
def test_nothing_runs_on(machine: Machine, launcher: str, victim: str, number: int) -> None:
    job = start(machine, LAUNCHERS[launcher])
    wait_for(lambda: processes(machine, *VICTIMS[victim]))[0].send_signal(number)
    out, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    wait_for(lambda: not processes(machine), 10)
    if (victim, number) != ("launcher", signal.SIGKILL):
        assert int(machine.text("out/status")) == job.returncode
        assert f"ended with status {job.returncode}; the log is" in out
    if victim == "launcher" and launcher == "local":  # the node outlives it, and so does the log
        wait_for(lambda: "ranks of this node ended with status 143" in machine.text("out/log.txt"))
        assert f"ended process {machine.text('left').strip()}" in machine.text("out/log.txt")


def test_a_guard_that_is_killed_is_replaced(machine: Machine) -> None:
    job = start(machine, LAUNCHERS["local"])
    for number in (signal.SIGTERM, signal.SIGKILL):
        (first,) = wait_for(lambda: processes(machine, "guard.py"))
        first.send_signal(number)
    wait_for(lambda: [p for p in processes(machine, "guard.py") if p.pid != first.pid])
    processes(machine, "tools.launch node")[0].kill()
    job.communicate(timeout=60)
    wait_for(lambda: not processes(machine), 10)


SUPERVISES = """
import sys
from megatron_burst.tools.launch import processes
processes.PATIENCE_SECONDS = 0.5
sys.exit(processes.supervise([("", ["bash", "-c", sys.argv[1]])], processes.Signals()))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_takes_no_notice_is_killed(machine: Machine, number: int) -> None:
    """As of compare and gpu-check, which start torchrun by themselves."""
    line = "trap '' TERM INT HUP; touch deaf; setsid sleep 600 & while :; do sleep 1; done"
    job = subprocess.Popen(
        [sys.executable, "-c", SUPERVISES, line],
        cwd=machine.folder,
        env=machine.environment | {"PYTHONPATH": str(ROOT)},
    )
    wait_for(lambda: (machine.folder / "deaf").exists())
    job.send_signal(number)
    assert job.wait(20) in (-9, 137)
    wait_for(lambda: not processes(machine), 10)


def test_without_tee_the_training_goes_on(machine: Machine) -> None:
    said = f"seq {LINES}; touch said; until [ -e more ]; do sleep 0.1; done; seq {LINES}"
    machine.training(said, "echo done")
    job = machine.start("launch_local.sh", "--output", "out", output=subprocess.DEVNULL)
    wait_for(lambda: (machine.folder / "said").exists())
    hit: list[psutil.Process] = []

    def hits_another() -> bool:  # than the one that may still be about to end
        found = [one for one in processes(machine, "^tee ") if one not in hit]
        hit.extend(found[:1])
        return bool(found)

    for number in (signal.SIGTERM, signal.SIGKILL):
        wait_for(hits_another)
        hit[-1].send_signal(number)
    (machine.folder / "more").touch()
    assert job.wait(60) == 0
    assert machine.text("out/log.txt").endswith(f"\n{LINES}\ndone\n")


def test_a_reader_that_leaves_ends_nothing(machine: Machine) -> None:
    machine.training(f"seq {LINES}", "echo done")
    line = f"set -o pipefail; '{SCRIPTS}/launch_local.sh' --output out | head -1 >first"
    subprocess.run(
        ["bash", "-c", line],
        cwd=machine.folder,
        env=machine.environment,
        timeout=60,
        check=True,
    )
    assert machine.text("first") == "1\n"
    lines = machine.text("out/log.txt").splitlines()
    assert [*map(str, range(1, LINES + 1)), "done"] == lines
    assert machine.text("out/status") == "0\n"


@pytest.mark.slow
def test_a_reader_that_has_stopped_does_not_hold_what_was_told_to_end(machine: Machine) -> None:
    machine.training(f"seq {100 * LINES}")
    job = machine.start("launch_local.sh", "--output", "out")
    wait_for(lambda: machine.text("out/log.txt"))
    job.terminate()
    time.sleep(1)
    assert job.poll() is None
    assert job.wait(30) == 143
    assert machine.text("out/status") == "143\n"
    wait_for(lambda: not processes(machine), 10)


def test_under_nohup_a_terminal_that_closes_ends_nothing() -> None:
    names = "SIGHUP SIGTERM SIGINT SIGQUIT SIGUSR1".split()
    kept = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, names)}
    try:
        for before in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, before)
            Signals()
            assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == (before is signal.SIG_IGN)
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_two_jobs_do_not_share_an_output(machine: Machine) -> None:
    job = start(machine, LAUNCHERS["local"])
    before = machine.text("out/command.txt")
    (launcher,) = processes(machine, *VICTIMS["launcher"])
    for command in (LAUNCHERS["local"], LAUNCHERS["ssh"]):
        done = machine.run(*command, "--more", expect=2)
        assert re.search(rf"/out is in use by a process on .*, {launcher.pid}, since ", done.stderr)
    assert machine.text("out/command.txt") == before
    launcher.kill()
    job.communicate(timeout=60)
    machine.run(*LAUNCHERS["local"])  # which starts at once
