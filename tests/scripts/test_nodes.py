"""The check of nodes, and comparisons of several runs, with stand-ins. (fast tier)"""

from pathlib import Path

import pytest

from tests.scripts.stand_ins import Machine, place


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return place(tmp_path)


# ---- several runs


def test_every_run_is_compared_with_the_options_that_were_given(machine: Machine) -> None:
    options = ("--runs", "toy*", "--output", "a b", "--variants", "burst,ring *")
    flags = ("--", "--title", "it's", "*")
    done = machine.run("multi_exp.sh", *options, *flags)
    assert done.stdout == "-- toy\n-- toy_long\n"
    compared = [line.split("|") for line in machine.text("compared").splitlines()]
    assert compared == [
        ["--run", name, "--output", f"a b/{name}", "--variants", "burst,ring *", *flags]
        for name in ("toy", "toy_long")
    ]


def test_one_that_fails_does_not_stop_the_others(machine: Machine) -> None:
    done = machine.run("multi_exp.sh", "--runs", "toy*", "--", "--fail-in", "toy", expect=1)
    assert "multi_exp: failed: toy; the same command tries again" in done.stderr
    assert len(machine.text("compared").splitlines()) == 2
    assert "no run of configs/ matches nosuch" in (
        machine.run("multi_exp.sh", "--runs", "nosuch", expect=1).stderr
    )


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
        chatty=FREE,
    )
    hosts = "good used computing broken smaller unlinked chatty faulty dead only_chatty"
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
        "chatty": "free",
        "only_chatty": "unhealthy no answer: welcome to only_chatty",
    }
    for host, reason in reasons.items():
        state, _, why = reason.partition(" ")
        assert found[host].startswith(state) and why in found[host], found[host]
    assert " ".join(found["good"].split()) == "free 2 x NVIDIA X 9 MiB"
    assert found["dead"].split()[1:3] == ["-", "-"]


SHAPES = (
    '"text"',
    "[1]",
    "[" * 9999,
    '{"gpus": {"name": "X"}, "links": [], "network": []}',
    '{"gpus": [{"nome": "X"}], "links": [], "network": []}',
    '{"gpus": [{"name": "X", "memory.used": 7}], "links": [], "network": []}',
    '{"gpus": [], "links": [1], "network": []}',
    '{"gpus": [], "links": [], "network": [{"rate": "1"}]}',
    "\033[2J\a \udce9",
)


def test_a_node_may_answer_anything(machine: Machine) -> None:
    """It is unhealthy, the others are judged as ever, and a terminal obeys nothing of it."""
    (machine.folder / "said").mkdir()
    fit = '{"gpus": [], "links": [], "network": []}'
    for number, text in enumerate((*SHAPES, fit)):
        file = machine.folder / "said" / f"n{number}.json"
        file.write_text(text, errors="surrogateescape")
    nodes = " ".join(f"n{number}" for number in range(len(SHAPES) + 1))
    found = check(machine, "--nodes", nodes, "--answers", "said", expect=1)
    states = [line.split()[0] for line in found.values()]
    assert states == [*["unhealthy"] * len(SHAPES), "free"]
    assert not any({"\033", "\a"} & {*line} for line in found.values()), found
    assert "no devices: [1]" in found["n1"] and "no answer: ?[2J?" in found[f"n{len(SHAPES) - 1}"]


def test_the_free_nodes_are_a_list_for_the_launcher(machine: Machine) -> None:
    gpus(machine, a=FREE, b=gpu(70000) + gpu() + LINKS, c=FREE)
    listed = machine.run("check_nodes.sh", "--list", "--nodes", "a b c")
    assert listed.stdout == "a c\n"
    machine.run("check_nodes.sh", "--list", "--nodes", "b", expect=1)
