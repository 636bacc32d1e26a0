"""Series of runs, the check of nodes and collected results, with stand-ins. (fast tier)"""

import csv
import json
import signal
import time
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_burst.tools import hardware
from megatron_burst.tools.compare import collect
from tests.scripts.stand_ins import Machine, place


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return place(tmp_path)


# ---- series

SERIES = ("multi_exp.sh", "--output", "series", "--methods", "burst double-ring")


def started(machine: Machine) -> list[str]:
    """The runs whose torchrun was started, by the name of their directory; the list is emptied."""
    log = machine.folder / "started"
    names = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


@pytest.fixture
def counted(machine: Machine) -> Machine:
    """A launcher that writes down what it starts, and fails or hangs where it is told to."""
    path = machine.folder / "bin/launcher"
    path.write_text(
        """#!/usr/bin/env bash
while (($#)); do
    case $1 in --output) output=$2 ;; --fail-in) fail=$2 ;; --hang-in) hang=$2 ;; esac
    shift
done
name=${output##*/}
mkdir -p "$output"
echo "$name" >>"$STAND_INS/started"
echo "$0" >"$output/command.txt"
if [[ $name == "${hang:-}" ]]; then trap 'kill $!; exit 143' TERM; sleep 600 & wait; fi
status=0; if [[ $name == "${fail:-}" ]]; then status=5; fi
echo $status >"$output/status"; exit $status
"""
    )
    path.chmod(0o755)
    return machine


def launcher(machine: Machine) -> tuple[str, str]:
    return "--launcher", str(machine.folder / "bin/launcher")


def test_every_combination_runs_once(counted: Machine) -> None:
    more = ("--sizes", "toy*", "--ablations", "- kv-backward")
    done = counted.run(*SERIES, *more, *launcher(counted), COLLECT="1")
    names = [
        f"{size}.{method}{ablation}"
        for size in ("toy", "toy_long")
        for method in ("burst", "double-ring")
        for ablation in ("", ".kv-backward")
    ]
    assert started(counted) == names
    assert "8 run(s) in" in done.stdout
    assert len((counted.folder / "series/results.csv").read_text().splitlines()) == 9
    again = counted.run(*SERIES, *more, *launcher(counted))
    assert not started(counted)
    assert again.stdout.count(": finished") == 8


def test_flags_come_in_order_and_reach_the_launcher(machine: Machine) -> None:
    machine.run(
        "multi_exp.sh",
        "--sizes",
        "toy",
        "--methods",
        "mine",
        "--ablations",
        "kv-backward",
        "--define",
        "mine=--context-parallel-algo ring",
        "--title",
        "a b",
    )
    given = machine.arguments()
    assert given[given.index("--num-layers") :] == [
        *("--num-layers", "2", "--data-path", "a b", "--context-parallel-algo", "ring"),
        *("--burst-backward", "kv", "--title", "a b"),
    ]
    assert "from here" in machine.text("runs/series/toy.mine.kv-backward/log.txt")


def test_megatrons_own_attention_has_the_dropouts_of_ours(machine: Machine) -> None:
    machine.run("multi_exp.sh", "--methods", "megatron", "--hidden-dropout", "0.1")
    given = machine.arguments()
    assert given[given.index("--context-parallel-algo") + 1 :] == [
        *("megatron", "--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--hidden-dropout", "0.1"),
    ]


def test_a_run_that_fails_stops_no_other_and_is_tried_again(counted: Machine) -> None:
    fail = ("--fail-in", "burst")
    done = counted.run(*SERIES, *launcher(counted), *fail, expect=1)
    assert started(counted) == ["burst", "double-ring"]
    assert "1 run(s) failed" in done.stderr
    listed = counted.run(*SERIES, "--list").stdout.splitlines()
    assert listed == ["burst: failed with status 5", "double-ring: finished"]
    counted.run(*SERIES, *launcher(counted))
    assert started(counted) == ["burst"]


def test_an_interrupted_series_goes_on_where_it_stopped(counted: Machine) -> None:
    job = counted.start(*SERIES, *launcher(counted), "--hang-in", "double-ring")
    deadline = time.monotonic() + 100
    while "double-ring" not in counted.text("started") and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=100)
    assert job.returncode == 130
    assert "stopped in double-ring" in out
    started(counted)
    counted.run(*SERIES, *launcher(counted))
    assert started(counted) == ["double-ring"]


def test_a_run_in_slurms_queue_is_left_there(counted: Machine) -> None:
    directory = counted.folder / "series/burst"
    queue = f"(null)\n{directory}"  # the comments of two jobs
    listed = counted.run(*SERIES, "--list", QUEUE_STATE=queue).stdout.splitlines()
    assert listed == ["burst: in the queue", "double-ring: to do"]
    directory.mkdir(parents=True)
    (directory / "status").write_text("143\n")  # of a start before Slurm put it back
    assert counted.run(*SERIES, "--list", QUEUE_STATE=queue).stdout.splitlines() == listed


def test_a_pattern_that_names_no_run_is_an_error(counted: Machine) -> None:
    done = counted.run(*SERIES, "--sizes", "toy nosuch-*", "--list", expect=2)
    assert "no run of configs/ matches nosuch-*" in done.stderr
    assert "burst: to do" in counted.run(*SERIES, "--list", QUEUE_STATE="").stdout


def test_a_dry_run_prints_every_command_and_makes_nothing(machine: Machine) -> None:
    done = machine.run(*SERIES, "--dry-run", "--title", "a b")
    assert done.stdout.count("torch.distributed.run") == 2
    assert "--burst-topology double --title 'a b'" in done.stdout.splitlines()[1]
    assert not (machine.folder / "series").exists()


def test_an_unknown_method_is_refused_with_those_there_are(machine: Machine) -> None:
    done = machine.run("multi_exp.sh", "--methods", "burts", expect=2)
    assert "no method or ablation burts" in done.stderr and "double-ring" in done.stderr


# ---- nodes

LINKS = "GPU0\t X \tNV18\nGPU1\tNV18\t X \n"


def gpu(memory: int = 4, busy: int = 0, errors: int = 0) -> str:
    """What nvidia-smi says of one."""
    fields = "NVIDIA X, 81559 MiB, 570.1, 700 W, 1980 MHz, 9.0, 5, 16, Disabled"
    return f"{fields}, {memory} MiB, {busy} %, {errors}\n"


FREE = gpu() * 2 + LINKS


def check(machine: Machine, *arguments: str, expect: int, **variables: str) -> dict[str, str]:
    """The line of every node, without its name."""
    done = machine.run("check_nodes.sh", *arguments, expect=expect, **variables)
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[1:]}


def gpus(machine: Machine, **hosts: str) -> None:
    for host, text in hosts.items():
        (machine.folder / f"gpus-{host}").write_text(text)


def test_nodes_are_free_busy_or_unhealthy_for_a_reason(machine: Machine) -> None:
    gpus(
        machine,
        good=gpu(9) * 2 + LINKS,  # as texts 9 is above 500, 40000 and 100 are below
        used=gpu() + gpu(40000) + LINKS,
        computing=gpu() + gpu(busy=100) + LINKS,
        broken=gpu() + gpu(errors=2) + LINKS,
        smaller=gpu() + LINKS,
        unlinked=gpu() * 2 + LINKS.replace("NV18", "SYS"),
    )
    hosts = "good used computing broken smaller unlinked faulty dead"
    found = check(machine, "--nodes", hosts, expect=1)
    reasons = {
        "good": "free",
        "used": "busy 40000 MiB in use",
        "computing": "busy a GPU is at work, 100 %",
        "broken": "unhealthy 2 uncorrected ECC errors",
        "smaller": "unhealthy GPUs: 1 x NVIDIA X, most nodes have 2 x NVIDIA X",
        "unlinked": "unhealthy links between GPUs: not those of most nodes",
        "faulty": "unhealthy GPUs: none, most nodes have 2 x NVIDIA X",
        "dead": "unhealthy no answer: ssh: connect to host dead: No route to host",
    }
    for host, reason in reasons.items():
        state, _, why = reason.partition(" ")
        assert found[host].startswith(state) and why in found[host], found[host]
    assert " ".join(found["good"].split()) == "free 2 x NVIDIA X 9 MiB"
    assert found["dead"].split()[1:3] == ["-", "-"]


def test_the_free_nodes_are_a_list_for_the_launcher(machine: Machine) -> None:
    gpus(machine, a=FREE, b=gpu(70000) + gpu() + LINKS, c=FREE)
    listed = machine.run("check_nodes.sh", "--list", "--nodes", "a b c")
    assert listed.stdout == "a c\n"
    machine.run("check_nodes.sh", "--list", "--nodes", "b", expect=1)


# ---- results


def write_run(directory: Path, **arguments: object) -> None:
    """What a launcher leaves; with arguments also what TensorBoard has of nine steps."""
    directory.mkdir(parents=True)
    (directory / "command.txt").write_text("scripts/launch_local.sh --x\n")
    (directory / "status").write_text("0\n")
    node = hardware.describe("toy", ["python"])
    changes = {"host": "n1", "versions": {"torch": "2.11"}, "gpus": [], "links": []}
    (directory / "node-0.json").write_text(json.dumps(node | changes))
    if arguments:
        with SummaryWriter(str(directory / "tensorboard")) as writer:
            for name, value in arguments.items():
                writer.add_text(name, str(value), 0)
            for step in range(1, 10):
                writer.add_scalar("lm loss", 6 - step / 8, step)
                writer.add_scalar("iteration-time", 1 + step / 8, step)
            writer.add_scalar("burst/peak-memory-bytes", 2.0**30, 9)


def test_figures_are_those_of_compare(tmp_path: Path) -> None:
    sizes = {"seq_length": 128, "global_batch_size": 4, "world_size": 4, "num_experts": 8}
    write_run(tmp_path / "a/burst", **sizes, context_parallel_algo="burst")
    assert collect.write([tmp_path / "a"], tmp_path / "out/results") == 0
    (row,) = json.loads((tmp_path / "out/results.json").read_text())
    expected = {
        "name": "burst", "status": "0", "steps": 9, "first_loss": 5.875, "last_loss": 4.875,
        "seconds_per_step": 1.625, "tokens_per_second_per_gpu": 512 / 1.625 / 4,
        "peak_memory_bytes": 2.0**30, "context_parallel_algo": "burst", "world_size": "4",
        "torch": "2.11", "hosts": "n1", "nodes": 1, "run": "toy",
        "command": "scripts/launch_local.sh --x",
    }  # fmt: skip
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    with (tmp_path / "out/results.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert line["seconds_per_step"] == "1.625" and line["hosts"] == "n1"


def test_a_run_without_a_step_is_a_row_too(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "a/status").unlink()
    assert collect.write([tmp_path], None) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert (row["status"], row["steps"]) == ("unfinished", 0)


def test_a_directory_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run"):
        collect.write([tmp_path], None)


def test_a_node_is_described(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(machine, here="NVIDIA X, 81559 MiB, 570.1, 700.00 W, 1980 MHz\n" * 2)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    node = hardware.describe("toy", ["a", "b"])
    assert [gpu["name"] for gpu in node["gpus"]] == ["NVIDIA X"] * 2
    assert collect.device(node) == "2 x NVIDIA X"
    assert "torch" in node["versions"] and node["command"] == ["a", "b"]
    assert node["settings"]["BURST_RANKS_PER_NODE"] == "2"
