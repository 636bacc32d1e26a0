"""The check of nodes, and comparisons of several runs, with stand-ins. (fast tier)"""

import shutil
import signal

import pytest

from tests.scripts.stand_ins import SCRIPTS, Machine, gone, wait_for

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
    for name, said in (
        ("nosuch", "no model, cluster or run matches nosuch"),
        ("llama3_8b", "multi_exp: no run matches llama3_8b"),  # a model
    ):
        assert said in machine.run("multi_exp.sh", "--runs", name, expect=1).stderr


def test_without_an_environment_of_its_own_a_series_takes_python3(machine: Machine) -> None:
    scripts = machine.folder / "repository" / "scripts"
    scripts.mkdir(parents=True)
    machine.put("python3", 'exec "$STAND_INS/bin/python-of-training" "$@"')
    copied = shutil.copy(SCRIPTS / "multi_exp.sh", scripts)
    machine.run(copied, "--runs", "toy", BURST_PYTHON="")
    assert machine.text("compared").startswith("--run|toy|")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_a_series_ends_what_it_compares(machine: Machine, number: int) -> None:
    """Ctrl-C goes to all of its processes, a batch system's SIGTERM to the script alone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    job = machine.start("multi_exp.sh", "--runs", "toy*", "--", "--hang")
    pid = int(wait_for(lambda: machine.text("hanging").strip()))
    job.send_signal(number)
    job.communicate(timeout=20)
    assert job.returncode == 143 and gone(pid)
    assert len(machine.text("compared").splitlines()) == 1


# ---- nodes


def gpu(memory: int = 4, busy: int = 0, errors: int = 0) -> str:
    """What nvidia-smi says of one."""
    return f"NVIDIA X, {memory}, {busy}, {errors or '[N/A]'}\n"


def gpus(machine: Machine, **hosts: str) -> None:
    for host, text in hosts.items():
        (machine.folder / f"gpus-{host}").write_text(text)


def test_nodes_are_free_busy_or_unhealthy_for_a_reason(machine: Machine) -> None:
    """Whatever a node answers; a terminal obeys nothing of it."""
    gpus(
        machine,
        good=gpu(9) * 2,  # as texts 9 is above 500, 40000 and 100 are below
        used=gpu() + gpu(40000),
        computing=gpu() + gpu(busy=100),
        broken=gpu() + gpu(errors=2),
        smaller=gpu(),
        lost="NVIDIA X, [GPU is lost], [GPU is lost], [GPU is lost]\n" + gpu(),
        chatty=gpu() * 2,
        strange="\033[2J\a, nothing",
    )
    hosts = "good used computing broken smaller lost chatty strange faulty dead only_chatty"
    done = machine.run("check_nodes.sh", "--nodes", hosts, expect=1)
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[1:]}
    reasons = {
        "good": "free",
        "used": "busy 40000 MiB in use",
        "computing": "busy a GPU is at work, 100 %",
        "broken": "unhealthy 2 uncorrected ECC errors",
        "smaller": "unhealthy GPUs: 1 x NVIDIA X, most nodes have 2 x NVIDIA X",
        "lost": "unhealthy a GPU says [GPU is lost]",
        "strange": "unhealthy no answer: ?[2J?, nothing",
        "faulty": "unhealthy no answer: no devices were found",
        "dead": "unhealthy no answer: ssh: connect to host dead: No route to host",
        "chatty": "free",
        "only_chatty": "unhealthy no answer: welcome to only_chatty",
    }
    for host, reason in reasons.items():
        state, _, why = reason.partition(" ")
        assert found[host].startswith(state) and why in found[host], found[host]
    assert " ".join(found["good"].split()) == "free 2 x NVIDIA X 9 MiB"
    assert found["dead"].split()[1:3] == ["-", "-"]


def test_the_free_nodes_are_a_list_for_the_launcher(machine: Machine) -> None:
    gpus(machine, a=gpu() * 2, b=gpu(70000) + gpu(), c=gpu() * 2)
    listed = machine.run("check_nodes.sh", "--list", "--nodes", "a b c")
    assert listed.stdout == "a c\n"
    machine.run("check_nodes.sh", "--list", "--nodes", "b", expect=1)
