"""The setup finds a Python that serves, and makes or keeps an environment. (fast tier)"""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    *("bash", "cat", "cksum", "cut", "dirname", "flock", "grep", "id", "mkdir", "rm", "sleep"),
    *("realpath", "uname"),
)
GOOD = f'exec "{sys.executable}" "$@"'
SHIM = 'echo "pyenv: $0: command not found" >&2; exit 127'


def as_version(*version: int) -> str:
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    return f'shift; exec "{sys.executable}" -c "{code}" "$@"'


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with the ordinary tools on PATH and no Python: HOME/ and bin/."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "HOME").mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found:
            (tmp_path / "bin" / name).symlink_to(found)
    account = f"user:x:1000:1000::{tmp_path / 'account'}:/bin/sh"
    executable(tmp_path / "bin" / "getent", f'echo "{account}"')
    return tmp_path


def shell(machine: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(machine / "bin"), "HOME": str(machine / "HOME"), **variables}
    return subprocess.run(
        [str(machine / "bin" / "bash"), "-c", f'source "{ROOT}/scripts/setup.sh"; {command}'],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_quickstart_refuses_a_step_count_that_is_none(tmp_path: Path) -> None:
    env = {**os.environ, "BURST_VENV": str(tmp_path / "venv")}
    command = [str(ROOT / "scripts" / "quickstart.sh"), "--steps", "many"]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 2
    assert "--steps many is not a positive number" in result.stderr


PASSED_OVER = {
    "bin/python3.12": SHIM,
    "bin/python3.13": as_version(3, 14, 0),
    "bin/python3": as_version(3, 11, 2),
}


@pytest.mark.parametrize(
    ("python", "others", "variables"),
    [
        ("bin/python3.12", {}, {}),
        ("HOME/.pyenv/versions/3.12.1/bin/python3", PASSED_OVER, {}),
        ("elsewhere/versions/3.13.0/bin/python3", {}, {"PYENV_ROOT": "{}/elsewhere"}),
        ("account/.pyenv/versions/3.12.9/bin/python3", {}, {"HOME": ""}),
        (
            "pyenv/versions/3.12.2/bin/python3",
            {"pyenv/shims/python3": SHIM, **PASSED_OVER},
            {"PATH": "{0}/pyenv/shims:{0}/bin"},
        ),
        ("mine", {"bin/python3.12": GOOD}, {"PYTHON": "{}/mine"}),
    ],
)
def test_a_python_that_serves_is_found(
    machine: Path, python: str, others: dict[str, str], variables: dict[str, str]
) -> None:
    for name, body in {**others, python: GOOD}.items():
        executable(machine / name, body)
    given = {name: value.format(machine) for name, value in variables.items()}
    result = shell(machine, 'find_python; echo "$found_python"', **given)
    assert result.stdout.strip() == str(machine / python), result.stderr


def test_paths_are_whole_by_a_link_and_in_another_folder(machine: Path) -> None:
    link = machine / "bin" / "setup.sh"
    link.symlink_to(ROOT / "scripts" / "setup.sh")
    line = f'source {link}; echo "$burst_root $burst_python"'
    result = shell(machine, line, BURST_VENV="venv")
    assert result.stdout == f"{ROOT} {Path.cwd()}/venv/bin/python\n"


def test_uv_is_asked_last(machine: Path) -> None:
    executable(machine / "bin" / "uv", 'echo "uv $*"')
    place = machine / "venv"
    result = shell(machine, "make_environment", BURST_VENV=str(place))
    assert (result.returncode, result.stderr) == (0, f"uv venv --python >=3.12,<3.14 {place}\n")


def test_without_a_python_setup_says_what_was_tried_and_what_to_install(machine: Path) -> None:
    executable(machine / "bin" / "python3.12", SHIM)
    executable(machine / "bin" / "python3", as_version(3, 9, 1))
    result = shell(machine, "burst_setup", BURST_VENV=str(machine / "venv"))
    assert result.returncode != 0
    assert "bin/python3.12 is no Python 3.12 or 3.13 with venv, it says: pyenv: " in result.stderr
    assert "bin/python3 is no Python 3.12 or 3.13 with venv, it says: 3.9.1" in result.stderr
    assert "apt-get install python3.12-venv" in result.stderr
    assert not (machine / "venv").exists()
    old = executable(machine / "old", as_version(3, 10, 1))  # asked for, it is the only one tried
    result = shell(machine, "find_python", PYTHON=str(old))
    assert f"{old} is no Python 3.12 or 3.13 with venv, it says: 3.10.1" in result.stderr


def test_a_directory_that_is_no_environment_is_left_alone(machine: Path) -> None:
    place = machine / "venv"
    place.mkdir()
    (place / "precious").touch()
    result = shell(machine, "burst_setup", BURST_VENV=str(place))
    assert result.returncode != 0
    assert "is no virtual environment that works" in result.stderr
    assert (place / "precious").exists()


def test_a_finished_environment_is_updated_in_place_and_a_half_made_one_is_not(
    machine: Path,
) -> None:
    place = machine / "venv"
    executable(place / "bin" / "python", GOOD)
    (place / "pyvenv.cfg").touch()
    stub = f'case "$2" in venv) echo made ;; pip) ;; *torch*) exit 1 ;; *) {GOOD} ;; esac'
    executable(machine / "bin" / "python3.12", stub)
    for content, made in (("an older key", False), ("", True)):
        (place / ".megatron-burst-ready").write_text(content)
        result = shell(machine, "make_environment || true", BURST_VENV=str(place))
        assert (result.stdout == "made\n") == made, result.stderr
        assert (place / "pyvenv.cfg").exists() != made


def test_what_is_ready_is_left_and_another_python_is_refused(machine: Path) -> None:
    place, log = machine / "venv", machine / "log"
    executable(place / "bin" / "python", GOOD)
    (place / "pyvenv.cfg").touch()
    ready = f"install_package() {{ echo again >>{log}; }}; burst_setup && burst_setup"
    result = shell(machine, ready, BURST_VENV=str(place))
    assert result.returncode == 0 and result.stderr.count("is ready (Python 3.1") == 2
    assert log.read_text() == "again\n"
    old = executable(machine / "old", "echo Python 3.12.0")
    result = shell(machine, ready, BURST_VENV=str(place), PYTHON=str(old))
    assert result.returncode != 0 and f"has another Python than {old}" in result.stderr


def test_a_second_setup_waits_for_the_first_and_finds_it_ready(machine: Path) -> None:
    place, log = machine / "venv", machine / "log"
    make = f"""
        make_environment() {{ echo made >>{log}
            until [[ -e {machine}/go ]]; do sleep 0.05; done; }}
        install_package() {{ mkdir -p {place}/bin; echo exit >{place}/bin/python
            /bin/chmod +x {place}/bin/python; }}
        burst_setup"""
    with ThreadPoolExecutor(2) as both:
        first = both.submit(shell, machine, make, BURST_VENV=str(place))
        while not log.exists():
            time.sleep(0.02)
        second = both.submit(shell, machine, make, BURST_VENV=str(place))
        time.sleep(0.5)
        (machine / "go").touch()
        assert first.result().returncode == second.result().returncode == 0, second.result()
    assert log.read_text() == "made\n"
    said = rf"^setup: process \d+ on \S+, since 2\d.* makes {place}; this one waits\n"
    assert re.match(said, second.result().stderr)


@pytest.mark.parametrize("inherits", [False, True])
def test_uv_installs_unless_the_environment_inherits_packages(
    machine: Path, inherits: bool
) -> None:
    place = machine / "venv"
    executable(place / "bin" / "python", f'case $2 in pip) echo "pip $*" ;; *) {GOOD} ;; esac')
    told = str(inherits).lower()
    (place / "pyvenv.cfg").write_text(f"include-system-site-packages = {told}\n")
    executable(machine / "bin" / "uv", 'echo "uv $*"')
    mirror = {"PIP_INDEX_URL": "https://mirror/simple"}
    said = shell(machine, "install_package", BURST_VENV=str(place), **mirror).stderr
    if inherits:
        assert "pip -m pip install" in said and "uv pip" not in said
    else:
        assert f"uv pip install --python {place}/bin/python --index-url https://mirror/" in said
    assert "[train,test]" in said and "torch==" in (place / "constraints.txt").read_text()
