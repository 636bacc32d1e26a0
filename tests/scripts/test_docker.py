"""The image's steps are one script, and it keeps what is installed.

With stand-ins (fast), and as a whole with a real pip, compiler and Megatron (slow).
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.plugin.test_dataset_helpers import MAKEFILE
from tests.scripts.test_patch_megatron import SCRIPTS

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
    *dataset_helpers*) PYTHONPATH={root} exec {python} "$@" ;;
esac
if [[ $(cat) == *"distributions()"* ]]; then sort -u -t= -k1,1 packages "$2"; fi
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
    python.write_text(PYTHON.format(folder=tmp_path, root=ROOT, python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "packages").write_text("numpy==2.0\ntorch==2.13.0a0+x.nv26.6\n")
    return tmp_path


def install(
    machine: Path, *arguments: str, source: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(source / "docker" / "install.sh"), *arguments],
        cwd=machine,
        env={**os.environ, "PYTHON": str(machine / "python"), **variables},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_what_is_installed_is_held_and_the_rest_is_pinned(machine: Path) -> None:
    ended = install(machine, "--no-index")
    assert ended.returncode == 0, ended.stderr
    held = (machine / "constraints").read_text().splitlines()
    assert set((machine / "packages").read_text().splitlines()) <= set(held)
    assert "einops==0.8.2" in held, "of [train], which the image may lack"
    assert [line for line in held if line.startswith("numpy==")] == ["numpy==2.0"]
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


def checkout(folder: Path, compiler: str) -> Path:
    """Add what the steps read of a checkout of Megatron-LM and the package lacks."""
    datasets = folder / "megatron" / "core" / "datasets"
    datasets.mkdir(parents=True, exist_ok=True)
    (datasets / "helpers.cpp").touch()
    (datasets / "Makefile").write_text(MAKEFILE.replace("noting-c++", compiler))
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
        (folder / f"{name[9:-3]}_builders.py").write_text(f"{name[9:-3]}_builder = None\n")
    return folder


def test_the_helpers_of_a_checkout_are_compiled_or_it_fails(machine: Path) -> None:
    """The next step, the patch, refuses these checkouts: they have no version."""
    megatron = checkout(machine / "megatron lm", "cp $< $@ #")
    ended = install(machine, "--megatron", str(megatron))
    assert "lacks megatron/core/package_info.py" in ended.stderr, ended.stderr
    assert list(megatron.rglob("helpers_cpp*.so"))
    megatron = checkout(machine / "another", "false")
    ended = install(machine, "--megatron", str(megatron))
    assert ended.returncode == 1
    assert "helpers.cpp does not compile for Python 3." in ended.stderr
    assert ended.stderr.endswith(f"install: the data-set helpers of {megatron} do not compile\n")


# ---- every step but those that need docker, a real pip and compiler among them


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file into the image."""
    sent, parts = True, path.split("/")
    above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!")
        anywhere = pattern.startswith("**/")
        places = parts if anywhere else [a for a in above if a.count("/") == pattern.count("/")]
        if any(fnmatch(place, pattern.removeprefix("**/")) for place in places):
            sent = line.startswith("!")
    return sent


def test_settings_of_a_site_and_caches_stay_out_of_the_image() -> None:
    for path in ("scripts/env.sh", ".git/config", ".ruff_cache/x", "megatron_burst/__pycache__/x"):
        assert not is_sent(path), path
    for path in ("scripts/env.example.sh", "scripts/constraints.txt", "configs/runs.toml"):
        assert is_sent(path), path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_script_on_a_python_with_torch(tmp_path: Path) -> None:
    """What the image gets of the repository, a fresh environment, the installed Megatron."""
    source, megatron = tmp_path / "source", tmp_path / "megatron-lm"
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for path in filter(is_sent, listed):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path, follow_symlinks=False)
    venv.create(tmp_path / "environment", with_pip=True, symlinks=True)
    (tmp_path / "python").symlink_to("environment/bin/python")
    (packages,) = tmp_path.glob("environment/lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others))
    (installed,) = {found for path in others if (found := Path(path) / "megatron").exists()}
    left_out = shutil.ignore_patterns("__pycache__", "helpers_cpp*.so")
    shutil.copytree(installed, megatron / "megatron", ignore=left_out)
    checkout(megatron, "$(CXX) -shared -std=c++17 -fPIC")

    options = ("--no-index", "--no-build-isolation", "--disable-pip-version-check")
    python = str(tmp_path / "environment/bin/python")
    given = {"PYTHON": python, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    ended = install(source, *options, "--megatron", str(megatron), source=source, **given)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    assert "Successfully installed megatron-burst-0.1.0" in ended.stdout
    assert "train one step with the plug-in's attention and loss" in ended.stdout
    code = "from megatron.core.datasets import helpers_cpp; print(helpers_cpp.__file__)"
    given["PYTHONPATH"] = str(megatron)
    done = subprocess.run(
        [python, "-c", code], env=os.environ | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(megatron))
    assert list(packages.glob("megatron_burst/tools"))


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say() -> None:
    ended = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
