"""Patches for forks of Megatron-LM: applied, proved, taken out, refused. (fast tier)

On a small tree that has what the patches look at, over the installed Megatron; the real checkouts
are run by tests/upstream.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tier import slow_if

ROOT = Path(__file__).parents[2]
SCRIPT = """\
# above
import torch

from gpt_builders import gpt_builder

from megatron_burst.pretrain import _train
_train()
"""
SCRIPTS = {
    "pretrain_gpt.py": SCRIPT,
    "pretrain_hybrid.py": SCRIPT.replace("gpt_builder", "hybrid_builder"),
}
TRAINS = """#!/bin/sh
echo "burst attention: burst on 1 ranks; chunked LM head loss: 64 tokens a chunk; lm loss: 5.5"
"""
TRAINS_ANOTHER = "#!/bin/sh\necho 'lm loss: 5.5'\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tree = tmp_path / "Megatron-LM"
    (tree / "megatron" / "core").mkdir(parents=True)
    text = "\n\nMAJOR = 0\nMINOR = 19\nPATCH = 1\nPRE_RELEASE = ''\n"
    (tree / "megatron" / "core" / "package_info.py").write_text(text)
    for name, text in SCRIPTS.items():
        (tree / name).write_text(text)
    (tree / "gpt_builders.py").write_text("gpt_builder = None\n")
    (tree / "hybrid_builders.py").write_text("hybrid_builder = None\n")
    return tree


def fake_python(tree: Path, text: str) -> str:
    file = tree.parent / "python"
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


def patch(
    tree: Path, *flags: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": python, "MEGATRON_BURST_CPU": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    command = [str(ROOT / "scripts" / "patch_megatron.sh"), "--megatron", str(tree), *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def code(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize("is_real", slow_if({True}, [True, False]))  # a step of this Megatron
def test_the_patched_scripts_train_ours_and_the_reverse_is_the_original(
    checkout: Path, is_real: bool
) -> None:
    done = patch(checkout, python=sys.executable if is_real else fake_python(checkout, TRAINS))
    assert done.returncode == 0, done.stderr
    shown = "proved: pretrain_gpt.py pretrain_hybrid.py train one step with the plug-in's attention"
    assert shown in done.stdout
    for name, text in SCRIPTS.items():
        assert set(code((checkout / name).read_text())) - set(code(text)) == {
            "import megatron_burst.launch",
            "megatron_burst.launch.start()  # before Megatron is imported",
        }
    done = patch(checkout, "--reverse")
    assert done.returncode == 0 and "taken out" in done.stdout
    assert {name: (checkout / name).read_text() for name in SCRIPTS} == SCRIPTS


def test_twice_is_once(checkout: Path) -> None:
    python = os.path.relpath(fake_python(checkout, TRAINS))
    assert patch(checkout, python=python).returncode == 0
    patched = (checkout / "pretrain_gpt.py").read_text()
    done = patch(checkout, python=python)
    assert done.returncode == 0 and "already applied" in done.stdout
    assert (checkout / "pretrain_gpt.py").read_text() == patched
    for taken_out in ("taken out", "nothing to take out"):
        assert taken_out in patch(checkout, "--reverse").stdout


def test_a_check_changes_nothing(checkout: Path) -> None:
    python = fake_python(checkout, TRAINS)
    done = patch(checkout, "--check", python=python)
    assert done.returncode == 1 and "not applied; it can be" in done.stdout
    assert (checkout / "pretrain_gpt.py").read_text() == SCRIPT
    patch(checkout, python=python)
    assert patch(checkout, "--check", python=python).returncode == 0
    done = patch(checkout, "--check", python=fake_python(checkout, TRAINS_ANOTHER))
    assert done.returncode == 2
    assert "did not train a model of ours: its log lacks 'burst attention" in done.stderr


def test_what_cannot_be_proved_is_taken_out_again(checkout: Path) -> None:
    done = patch(checkout, python=fake_python(checkout, TRAINS_ANOTHER))
    assert done.returncode == 2
    assert "lm loss: 5.5" in done.stderr and "the patch was taken out again" in done.stderr
    assert (checkout / "pretrain_gpt.py").read_text() == SCRIPT


def test_an_edited_fork_is_patched_where_the_place_is_still_there(checkout: Path) -> None:
    (checkout / "pretrain_gpt.py").write_text("# ours\n" * 40 + SCRIPT + "# more\n")
    assert patch(checkout, python=fake_python(checkout, TRAINS)).returncode == 0


def test_a_checkout_inside_of_a_repository_is_patched(checkout: Path) -> None:
    subprocess.run(["git", "init", "-q", str(checkout.parent)], check=True)
    assert patch(checkout, python=fake_python(checkout, TRAINS)).returncode == 0
    assert "megatron_burst" in (checkout / "pretrain_gpt.py").read_text()


def test_a_script_without_the_place_is_refused_with_the_lines(checkout: Path) -> None:
    (checkout / "pretrain_gpt.py").write_text("import torch\n")
    done = patch(checkout)
    assert done.returncode == 2
    assert "launch.patch" in done.stderr and "by hand" in done.stderr
    assert "patch does not apply" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--check", "--reverse"), "exclude each other"),
        (("--verify",), "unknown argument --verify"),
        (("--megatron",), "--megatron needs a directory"),
        (("--megatron", "/"), "/ is no checkout of Megatron-LM: it lacks megatron/core"),
    ],
)
def test_wrong_command_lines_are_refused(
    checkout: Path, flags: tuple[str, ...], message: str
) -> None:
    done = patch(checkout, *flags)
    assert done.returncode == 2 and message in done.stderr
