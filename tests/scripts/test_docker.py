"""The image's steps are one script, and it keeps what is installed. (fast tier)"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# A Python whose packages are the lines of a file; pip does what the file `pip` says.
PYTHON = """#!/bin/bash
cd {folder}
case "$*" in
    *"import torch"*) grep torch packages; exit ;;
    "-m pip"*)
        printf '%s\\n' "$@" >arguments
        while (($#)); do if [[ $1 == --constraint ]]; then cp "$2" constraints; fi; shift; done
        if [[ -e pip ]]; then source ./pip; fi
        exit ;;
    "-m megatron_burst doctor"*) exit "$(cat doctor 2>/dev/null || echo 0)" ;;
esac
if [[ $(cat) == *"distributions()"* ]]; then cat packages; fi
"""


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)", DOCKERFILE, re.MULTILINE)


def test_the_only_step_is_the_script_and_the_user_is_not_root() -> None:
    (step,) = instructions("RUN")
    assert "/opt/megatron_burst/docker/install.sh --megatron /opt/megatron-lm" in step
    assert instructions("USER") == ["${USER_ID}"] and "USER_ID=1000" in instructions("ARG")


def test_no_registry_is_named_and_nothing_is_fetched() -> None:
    assert instructions("FROM") == ["scratch AS megatron-lm", "${BASE_IMAGE}"]
    assert "BASE_IMAGE" in instructions("ARG"), "without a default"
    assert not re.search(r"[a-z]\.(io|com|net|ai)\b|git clone|curl|wget", DOCKERFILE)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    python = tmp_path / "python"
    python.write_text(PYTHON.format(folder=tmp_path))
    python.chmod(0o755)
    (tmp_path / "packages").write_text("numpy==2.0\ntorch==2.13.0a0+x.nv26.6\n")
    return tmp_path


def install(machine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "docker" / "install.sh"), *arguments],
        env={**os.environ, "PYTHON": str(machine / "python")},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_what_is_installed_is_held(machine: Path) -> None:
    ended = install(machine, "--no-index")
    assert ended.returncode == 0, ended.stderr
    assert (machine / "constraints").read_text() == (machine / "packages").read_text()
    arguments = (machine / "arguments").read_text().splitlines()
    assert {f"{ROOT}[train]", "megatron-core==0.19.2", "--no-index"} <= set(arguments)


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        ("sed -i s/2.13.0a0/2.12.0/ packages", "replaced or removed:\ntorch==2.13.0a0+x.nv26.6"),
        ("sed -i /numpy/d packages", "replaced or removed:\nnumpy==2.0"),
        ("exit 1", ""),
    ],
)
def test_it_fails_if_pip_replaced_something_or_failed(
    machine: Path, pip: str, message: str
) -> None:
    (machine / "pip").write_text(pip)
    ended = install(machine)
    assert ended.returncode == 1 and message in ended.stderr


def test_it_fails_without_torch_without_a_checkout_and_on_a_bad_verdict(machine: Path) -> None:
    assert "no checkout of Megatron-LM" in install(machine, "--megatron", str(machine)).stderr
    (machine / "doctor").write_text("1")
    assert install(machine).returncode == 1
    (machine / "packages").write_text("numpy==2.0\n")
    ended = install(machine)
    assert ended.returncode == 1 and "cannot import torch" in ended.stderr


@pytest.mark.parametrize(
    ("linter", "file"), [("hadolint", "Dockerfile"), ("shellcheck", "docker/install.sh")]
)
def test_linters_have_nothing_to_say(linter: str, file: str) -> None:
    if shutil.which(linter) is None:
        pytest.skip(f"{linter} is not installed")
    ended = subprocess.run([linter, str(ROOT / file)], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout
