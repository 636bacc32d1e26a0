"""Two nodes on one machine: links, clean-up and attention over them. (fast tier)

What needs namespaces is skipped where they cannot be made, with the reason.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attention
import pytest
import shaped_links as links

from tests.scripts.stand_ins import gone

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
PAYLOAD_BYTES, ON_THE_WIRE = 2_000_000, 1514 / 1448  # of a frame, with its headers
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


needs_links = pytest.mark.usefixtures("links_can_be_made")


@pytest.fixture(scope="module")
def links_can_be_made() -> None:
    try:
        with links.shaped_links(1, 1, 100):
            pass
    except links.LinkError as error:
        pytest.skip(str(error))


class Ranks:
    """A thread in every rank's namespace."""

    def __init__(self, cluster: links.Cluster) -> None:
        self.cluster = cluster
        names = map(cluster.namespace, cluster.ranks)
        self.threads = [ThreadPoolExecutor(1, "", links.enter, (name,)) for name in names]

    def send(self, source: int, target: int) -> tuple[dict[str, int], str, float]:
        """Return what each device of the source sent, what address it had, and the seconds."""
        address = self.cluster.address(target)
        listener = self.threads[target].submit(socket.create_server, (address, 0)).result()
        received = self.threads[target].submit(receive, listener)
        sent = self.threads[source].submit(send, listener.getsockname())
        seconds, sender = received.result(30)
        return sent.result(30), sender, seconds


def receive(listener: socket.socket) -> tuple[float, str]:
    start, missing = time.perf_counter(), PAYLOAD_BYTES
    with listener, listener.accept()[0] as connection:
        while missing:
            missing -= len(connection.recv(1 << 20))
        return time.perf_counter() - start, connection.getpeername()[0]


def bytes_out() -> dict[str, int]:
    """How many bytes each device of this thread's namespace has sent, headers included."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    rows = (line.split(":") for line in lines)
    return {name.strip(): int(numbers.split()[8]) for name, numbers in rows}


def send(address: tuple[str, int]) -> dict[str, int]:
    before = bytes_out()
    with socket.create_connection(address) as connection:  # not bound, as gloo does it
        connection.sendall(bytes(PAYLOAD_BYTES))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the other side has everything
    return {device: total - before[device] for device, total in bytes_out().items()}


@pytest.fixture(scope="module")
def ranks(links_can_be_made: None) -> Iterator[Ranks]:
    with links.shaped_links(2, 2, 100) as cluster:
        yield Ranks(cluster)


@needs_links
@pytest.mark.parametrize(
    "source, target, device",
    [(0, 1, "near1"), (3, 2, "near2"), (0, 2, "nic"), (0, 3, "nic"), (1, 2, "nic"), (3, 0, "nic")],
)
def test_a_message_leaves_by_the_senders_own_link(
    ranks: Ranks, source: int, target: int, device: str
) -> None:
    sent, sender, seconds = ranks.send(source, target)
    assert sender == ranks.cluster.address(source)
    assert sent.pop(device) == pytest.approx(PAYLOAD_BYTES, rel=0.02)
    assert max(sent.values()) < 0.01 * PAYLOAD_BYTES
    if device == "nic":  # 2 ms of the rate are saved up
        assert seconds > ON_THE_WIRE * PAYLOAD_BYTES * 8 / 100e6 - 2.5e-3


@needs_links
def test_nothing_starts_slowly_after_idling(ranks: Ranks) -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
    assert {thread.submit(setting.read_text).result().strip() for thread in ranks.threads} == {"0"}


def made_by(process: int) -> list[str]:
    return [name for name in links.namespaces() if name.startswith(f"burst{process}-")]


@needs_links
@pytest.mark.parametrize(
    "ending, status",
    [
        ("pass", 0),
        ("raise RuntimeError", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGHUP)", 128 + signal.SIGHUP),
    ],
)
def test_nothing_is_left_behind(ending: str, status: int) -> None:
    # In a process of its own: the names of namespaces carry the process id.
    # In a job in the background of a shell SIGINT is ignored; here it shall count.
    code = f"""import os, signal, shaped_links as links
signal.signal(signal.SIGINT, signal.default_int_handler)
with links.shaped_links(2, 1, 100) as cluster:
    assert set(cluster.namespaces) <= set(links.namespaces())
    print("made", flush=True)
    {ending}
"""
    anothers = f"burst{os.getpid()}-of-another"
    subprocess.run(["ip", "netns", "add", anothers], check=True)
    try:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=BENCH, **PIPES)
        out, _ = process.communicate(timeout=200)
        assert (out, process.returncode) == ("made\n", status)
        assert not made_by(process.pid)
        assert anothers in links.namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", anothers], check=True)


@pytest.mark.slow
@needs_links
def test_sigterm_ends_the_ranks_and_removes_the_namespaces() -> None:
    command = (
        "attention.py --force --mbit 400 --places 2x2 --tokens 16 --repetitions 100000".split()
    )
    command = [sys.executable, *command, "--algorithms", "ring flat"]
    path = f"{BENCH.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(command, cwd=BENCH, env={**os.environ, "PYTHONPATH": path}, **PIPES)
    try:
        assert process.stderr is not None
        assert any("launch 1/" in line for line in process.stderr)
        assert len(made_by(process.pid)) == 5
        inside = processes_in(made_by(process.pid))
        assert len(inside) == 4
        process.terminate()
        process.communicate(timeout=300)
    finally:
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not made_by(process.pid)
    assert all(map(gone, inside))


def processes_in(namespaces: list[str]) -> list[int]:
    listed = [subprocess.check_output(["ip", "netns", "pids", n], text=True) for n in namespaces]
    return [int(pid) for text in listed for pid in text.split()]


@pytest.mark.parametrize("lacking", ["`ip` of iproute2, `tc` of iproute2", "root, for network"])
def test_what_is_missing_for_links_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str
) -> None:
    if "root" in lacking:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["attention.py", "--mbit", "400"])
    with pytest.raises(links.LinkError, match=lacking):
        attention.main()


@needs_links
@pytest.mark.parametrize("mbit, shapers", [("inf", 0), ("100", 2)])
def test_a_nic_without_a_limit_has_no_shaper(mbit: str, shapers: int) -> None:
    code = f"""import subprocess, shaped_links as links
with links.shaped_links(2, 1, float("{mbit}")) as cluster:
    for name, device in ((cluster.namespace(0), links.NIC), (cluster.switch, "port0")):
        subprocess.run(["tc", "-n", name, "qdisc", "show", "dev", device], check=True)
"""
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=BENCH, text=True)
    assert shown.count("tbf") == shapers
