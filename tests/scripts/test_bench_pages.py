"""What benchmarks share: turns, the load, pages and their CSV, what makes them all. (fast tier)"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"
sys.path.append(str(BENCH))

import end_to_end  # noqa: E402
import page  # noqa: E402
import turns  # noqa: E402


def test_ways_take_turns_in_new_orders_that_are_the_same_everywhere() -> None:
    def calls() -> tuple[list[str], dict[str, list[int]]]:
        order: list[str] = []
        ways = {name: lambda name=name: order.append(name) or len(order) for name in "abcd"}
        return order, turns.in_turns(ways, 5, seed=3)

    order, results = calls()
    assert order == calls()[0]
    rounds = [tuple(order[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(one) == [*"abcd"] for one in rounds) and len(set(rounds)) > 3
    # The first round warms up.
    assert results == {n: [i + 1 for i, m in enumerate(order) if m == n and i > 3] for n in "abcd"}


def test_the_spread_of_one_repetition_is_that_repetition() -> None:
    assert set(turns.spread([2.0]).values()) == {2.0}
    assert turns.spread([4.0, 1.0, 2.0, 3.0, 9.0]) == {
        "median_s": 3.0,
        "q1_s": 2.0,
        "q3_s": 4.0,
        "least_s": 1.0,
    }


def test_a_loaded_machine_is_refused_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0.0, 0.0))
    monkeypatch.setattr(turns, "busy_share", lambda: 0.25)
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(SystemExit, match=r"\(3.50 in the last minute, 25 %"):
        turns.check_load(force=False)
    assert turns.check_load(force=True).startswith("3.50 in the last minute")
    loads = iter([0.9, 0.1])
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr(turns, "busy_share", lambda: 0.0)
    assert turns.check_load(force=False).startswith("0.10")


def test_a_page_says_where_it_comes_from_and_keeps_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench/loss.py", "--tokens", "1 2"])
    rows = [{"way": "a", "median_s": 1 / 3}, {"way": "b", "bytes": 2**40}]
    made = page.Page("Title", "Of\n{many} lines.\n\nMore.", "| table |", rows, page.origin())
    file = tmp_path / "deep" / "page.md"
    made.publish(file)
    assert "\nOf {many} lines.\n\nMore.\n\n* date: " in file.read_text()
    assert "\n* command: `python scripts/bench/loss.py --tokens '1 2'`\n" in file.read_text()
    with file.open("a") as text:
        text.write("\n## Notes on the first\n\n* by hand\n")
    made.publish(file)
    assert file.read_text() == f"{made}\n## Notes on the first\n\n* by hand\n"
    found = page.read_csv(file.with_suffix(".csv"))
    assert [*found[0]][:4] == ["way", "median_s", "bytes", "date"]
    assert (found[0]["median_s"], found[1]["bytes"]) == ("0.333333", str(2**40))
    assert {"torch", "python", "command", "device", "load", "commit"} <= {*found[1]}


def test_the_ratio_of_whole_steps_is_that_of_the_times_beside_it() -> None:
    def runs(*seconds: float) -> list[dict[str, object]]:
        about = {"tokens_per_second_per_gpu": 1.0, "peak_memory_bytes": 0, "ranks": 2, "steps": 1}
        about |= {"bytes_sent_per_rank_per_step": 0, "losses": [(1, 1.0)]}
        return [{"seconds_per_step": each, **about} for each in seconds]

    base, other = (end_to_end.Case("", name) for name in (end_to_end.BASELINE, "burst"))
    found = {base: runs(1.0, 2.0, 4.0), other: runs(2.0, 4.0, 1.0)}  # round by round 2, 2, 1/4
    assert [row["ratio"] for row in end_to_end.rows(found)] == [1.0, 1.0]


def test_the_page_of_whole_steps_has_the_ratios_of_its_table() -> None:
    table = page.read_csv(page.RESULTS / "cpu_end_to_end.csv")
    (flat,) = (float(row["median_s"]) for row in table if row["case"] == end_to_end.BASELINE)
    text = (page.RESULTS / "cpu_end_to_end.md").read_text()
    for row in table:
        seconds, ratio = float(row["median_s"]), float(row["ratio"])
        assert ratio == pytest.approx(seconds / flat, rel=1e-5)
        (line,) = re.findall(rf"^\| {row['case']} \| {1e3 * seconds:.0f} \| (.*)", text, re.M)
        assert line.split(" | ")[1] == f"{ratio:.3f}"


def listed() -> list[list[str]]:
    command = ["bash", str(BENCH / "all.sh"), "--list"]
    lines = subprocess.check_output(command, text=True).splitlines()
    return [line.strip("| ").split(" | ") for line in lines]


def test_one_command_makes_every_picture_and_table_that_the_docs_show() -> None:
    makes = {name for row in listed() for name in re.findall("`([^`]+)`", row[2])}
    for text in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        links = re.findall(r"\]\(([^)#:]+\.(?:svg|png|md))", text.read_text())
        shown = {os.path.relpath((text.parent / link).resolve(), ROOT) for link in links}
        measured = {name for name in shown if "/results/" in name or not name.endswith(".md")}
        missing = [name for name in measured if name not in makes]
        assert not missing, f"{text.name} shows {missing}: add it to scripts/bench/all.sh"


def test_the_docs_have_the_list() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    command = ["bash", str(BENCH / "all.sh"), "--list"]
    table = subprocess.check_output(command, text=True)
    assert table in text, "docs/benchmarks.md: its table is what scripts/bench/all.sh --list prints"


def all_sh(tmp_path: Path, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BURST_BENCH_DONE": str(tmp_path / "done"), **more}
    command = ["bash", str(BENCH / "all.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)


def test_a_dry_run_prints_commands_and_runs_none(tmp_path: Path) -> None:
    done = all_sh(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "scripts/bench/two_nodes.py --suite" in done.stdout
    assert "scripts/bench/plot.py scripts/bench/results/cpu_loss.csv" in done.stdout
    assert not (tmp_path / "done").exists()


def test_an_interrupted_series_goes_on(tmp_path: Path) -> None:
    """With a Python that notes what it should run, and fails at the first plot."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\necho "$*" >>{log}\ncase "$1$2" in *plot.py*) [ -e {tmp_path}/whole ];; esac\n'
    )
    python.chmod(0o755)
    settings = {"BURST_PYTHON": str(python), "BURST_VENV": str(tmp_path)}
    steps = ("--only", "accuracy", "loss", "tiles")
    assert all_sh(tmp_path, *steps, **settings).returncode == 1
    first = log.read_text().splitlines()
    assert [line.split()[0] for line in first] == [
        f"scripts/bench/{name}.py" for name in ("accuracy", "loss", "plot", "tiles")
    ]
    (tmp_path / "whole").touch()
    assert all_sh(tmp_path, *steps, **settings).returncode == 0
    names = [line.split()[0] for line in log.read_text().splitlines()[len(first) :]]
    assert names == [f"scripts/bench/{name}.py" for name in ("loss", "plot")]
    log.unlink()  # a series that is whole begins anew
    assert all_sh(tmp_path, *steps, **settings).returncode == 0
    assert log.read_text().startswith("scripts/bench/accuracy.py")
    assert all_sh(tmp_path, "--only", "nothing").returncode == 2
