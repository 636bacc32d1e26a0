"""Two nodes on one machine: links, clean-up and the tables of the benchmark. (fast tier)

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

import pytest

from tests.scripts.stand_ins import gone

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
sys.path.append(str(BENCH))

import shaped_links as links  # noqa: E402
import two_nodes  # noqa: E402
from algorithms import Place, Sizes  # noqa: E402
from page import read_csv, write_csv  # noqa: E402
from situations import GROUPED, SHORT, SUITE, Ratio, Situation, slowest  # noqa: E402

PAYLOAD_BYTES = 2_000_000
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


def send(address: tuple[str, int]) -> dict[str, int]:
    before = links.bytes_out()
    with socket.create_connection(address) as connection:  # not bound, as gloo does it
        connection.sendall(bytes(PAYLOAD_BYTES))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the other side has everything
    return {device: total - before[device] for device, total in links.bytes_out().items()}


@pytest.fixture(scope="module")
def ranks(links_can_be_made: None) -> Iterator[Ranks]:
    with links.shaped_links(2, 2, 100) as cluster:
        yield Ranks(cluster)


@needs_links
@pytest.mark.parametrize(
    "source, target, device",
    [
        (0, 1, "near1"),
        (3, 2, "near2"),
        (0, 2, "card"),
        (0, 3, "card"),
        (1, 2, "card"),
        (3, 0, "card"),
    ],
)
def test_a_message_leaves_by_the_senders_own_link(
    ranks: Ranks, source: int, target: int, device: str
) -> None:
    sent, sender, seconds = ranks.send(source, target)
    assert sender == ranks.cluster.address(source)
    assert sent.pop(device) == pytest.approx(PAYLOAD_BYTES, rel=0.02)
    assert max(sent.values()) < 0.01 * PAYLOAD_BYTES
    if device == "card":  # both shapers let their burst pass at once
        assert seconds > (PAYLOAD_BYTES - 2 * 256 * 1024) * 8 / 100e6


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
        out, _ = process.communicate(timeout=30)
        assert (out, process.returncode) == ("made\n", status)
        assert not made_by(process.pid)
        assert anothers in links.namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", anothers], check=True)


@needs_links
@pytest.mark.slow
def test_sigterm_ends_the_ranks_and_removes_the_namespaces() -> None:
    command = "two_nodes.py --force --tokens 16 --repetitions 100000 --algorithms".split()
    command = [sys.executable, *command, "ring flat"]
    path = f"{BENCH.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(command, cwd=BENCH, env={**os.environ, "PYTHONPATH": path}, **PIPES)
    try:
        assert process.stderr is not None
        assert any("repetition 1/" in line for line in process.stderr)
        assert len(made_by(process.pid)) == 5
        inside = processes_in(made_by(process.pid))
        assert len(inside) == 4
        process.terminate()
        process.communicate(timeout=30)
    finally:
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not made_by(process.pid)
    assert all(map(gone, inside))


def processes_in(namespaces: list[str]) -> list[int]:
    listed = [subprocess.check_output(["ip", "netns", "pids", n], text=True) for n in namespaces]
    return [int(pid) for text in listed for pid in text.split()]


def test_without_iproute2_the_script_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["two_nodes.py"])
    with pytest.raises(SystemExit) as ended:
        two_nodes.main()
    assert ended.value.code == 2
    assert "shaped links need `ip` of iproute2, `tc` of iproute2" in capsys.readouterr().err


def test_without_root_the_script_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["two_nodes.py", "--suite"])
    with pytest.raises(SystemExit) as ended:
        two_nodes.main()
    assert ended.value.code == 2
    assert "root, for network namespaces and tc" in capsys.readouterr().err


def test_a_repetition_takes_as_long_as_its_slowest_rank() -> None:
    fast_then_slow, slow_then_fast = [(1.0, 5.0), (2.0, 7.0)], [(3.0, 4.0), (1.0, 8.0)]
    assert slowest([fast_then_slow, slow_then_fast]) == [(3, 5, 8), (2, 8, 10)]


def launches(*steps: float) -> list[list[tuple[float, float, float]]]:
    """Return two launches of three repetitions, the second launch twice as slow."""
    return [[(s * k / 4, s * k * 3 / 4, s * k) for s in (steps[0], *steps)] for k in (1, 2)]


TIMES = {
    "ring flat": launches(4, 100),
    "ring double": launches(3, 1),
    "burst auto": launches(2, 9),
    "ulysses": launches(1, 1),
}


def test_ratios_are_of_the_medians_of_each_launch() -> None:
    assert Ratio("step", "burst auto").of_launches(TIMES) == [0.5, 0.5]
    least = Ratio("backward", "burst auto", ("ring flat", "ring double"))
    assert least.of_launches(TIMES) == pytest.approx([2 / 3, 2 / 3])
    assert str(least) == "backward: burst auto / min(ring flat, ring double)"


def test_the_table_says_which_targets_were_reached() -> None:
    targets = (Ratio("step", "burst auto", limit=0.5), Ratio("forward", "ring double", limit=0.7))
    situation = Situation(400, SHORT, targets=targets, auto_backward="kv")
    table = two_nodes.ratios_table(situation, TIMES, list(TIMES), "query backward, flat ring")
    rows = table.splitlines()[2:]
    assert rows == [
        "| step: burst auto / ring flat | 0.500 | 0.500 0.500 | <= 0.50 | yes |",
        "| forward: ring double / ring flat | 0.750 | 0.750 0.750 | <= 0.70 | NO |",
        "| step: ring double / ring flat | 0.750 | 0.750 0.750 |  |  |",
        "| step: ulysses / ring flat | 0.250 | 0.250 0.250 |  |  |",
        "| backward of burst auto | query backward, flat ring |  | kv | NO |",
    ]


def test_kernels_alone_have_the_heads_that_the_all_to_all_leaves_them() -> None:
    assert two_nodes.share_of_heads(GROUPED, 1) == GROUPED
    assert two_nodes.share_of_heads(SHORT, 2) == Sizes(1024, 4, 4, 64)
    assert two_nodes.share_of_heads(GROUPED, 4) == Sizes(2048, 2, 1, 64)  # a KV head for each rank


def test_only_what_can_run_is_run() -> None:
    two, one = Place(4, 2), Place(4, 4)
    double = ["ring double", "burst query double", "burst kv double"]
    everything = list(two_nodes.SETTINGS)
    found = Situation(400, SHORT).algorithms(two)
    assert found == [name for name in everything if name != "burst kv flat"]  # it is the baseline
    assert Situation(400, GROUPED).algorithms(two) == found  # ulysses copies KV heads
    assert "ulysses" not in Situation(400, Sizes(512, 6, 6, 64)).algorithms(two)
    assert Situation(0, SHORT).place(2, 2) == one
    found = Situation(0, SHORT).algorithms(one)
    assert found == [name for name in everything if name not in double]
    hybrids = ["ring hybrid", "burst hybrid"]
    assert not set(Situation(400, SHORT).algorithms(Place(3, 1))) & {*double, *hybrids}


def test_the_suite_measures_every_rate_and_target() -> None:
    for sizes in (SHORT, GROUPED):
        rates = [s.mbit for s in SUITE if s.sizes == sizes]
        assert rates == [200, 400, 800, 2000, float("inf")]
    assert sum(len(situation.targets) for situation in SUITE) == 7


def test_ratios_by_link_rate(tmp_path: Path) -> None:
    names, rates = ["ring flat", "burst auto"], {400.0: 0.6, float("inf"): 1.0}
    rows = [
        {
            "benchmark": "two_nodes",
            "mbit": rate,
            **sizes._asdict(),
            "algorithm": name,
            "phase": "step",
            "ratio": 1.0 if name == "ring flat" else ratio + sizes.kv_heads / 100,
            "kernels_share": 0.5 if name == "ring flat" else 1 - ratio / 4,
        }
        for sizes in (SHORT, GROUPED)
        for rate, ratio in rates.items()
        for name in names
    ]
    assert two_nodes.rates_table(rows).splitlines()[:5] == [
        f"## By link rate: {SHORT}",
        "",
        "| step / ring flat | 400 Mbit/s | no limit |",
        "| --- | ---: | ---: |",
        "| ring flat | 1.000 | 1.000 |",
    ]
    assert "\n| burst auto | 0.680 | 1.080 |" in two_nodes.rates_table(rows)
    assert "\n| ring flat | 50% | 50% |\n| burst auto | 15% | 25% |" in two_nodes.rates_table(rows)
    assert two_nodes.rates_table(rows[:2]) == ""  # one rate
    plot = pytest.importorskip("plot", reason="pictures need matplotlib", exc_type=ImportError)
    origin = {name: name for name in ("date", "device", "torch", "python", "command")}
    write_csv(tmp_path / "rates.csv", rows, origin)
    plot.draw(tmp_path / "rates.csv", tmp_path / "rates.svg")
    picture = (tmp_path / "rates.svg").read_text()
    for text in ("no limit", "burst auto", "512 tokens a rank, 8 heads, 8 KV heads"):
        assert text in picture


def test_loopback_makes_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, names = tmp_path / "page.md", ["ring flat", "burst hybrid", "burst auto", "ulysses"]
    counts = "--mbit 0 --tokens 16 --repetitions 1 --launches 1 --force".split()
    arguments = ["two_nodes.py", *counts, "--output", str(page), "--algorithms", *names]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # main sets it; so it is restored
    two_nodes.main()
    text = page.read_text()
    assert "Burst auto: query backward, flat ring." in text
    assert all(f"\n| {name} | " in text for name in names)
    rows = read_csv(page.with_suffix(".csv"))
    assert [(row["algorithm"], row["phase"]) for row in rows] == [
        (name, phase) for name in names for phase in two_nodes.PHASES
    ]
    for row in rows:  # forward, backward and step have one order of size, and add up
        assert 0 < float(row["least_s"]) <= float(row["median_s"])
        assert float(row["kernels_s"]) > 0 and float(row["kernels_share"]) > 0
    assert rows[0]["ratio"] == "1" and rows[0]["payload_bytes_of_a_step"] != "0"


@needs_links
@pytest.mark.parametrize("mbit, shapers", [("inf", 0), ("100", 2)])
def test_a_card_without_a_limit_has_no_shaper(mbit: str, shapers: int) -> None:
    code = f"""import subprocess, shaped_links as links
with links.shaped_links(2, 1, float("{mbit}")) as cluster:
    for name, device in ((cluster.namespace(0), links.CARD), (cluster.switch, "port0")):
        subprocess.run(["tc", "-n", name, "qdisc", "show", "dev", device], check=True)
"""
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=BENCH, text=True)
    assert shown.count("tbf") == shapers
