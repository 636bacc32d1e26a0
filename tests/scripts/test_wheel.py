"""What pip installs is whole: the files (fast), every tool without the repository (slow)."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_burst.tools.command import VERBS

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
TINY = (
    "--seq-length 64 --max-position-embeddings 64 --hidden-size 32 --hybrid-layer-pattern *- "
    "--train-iters 4"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left behind; links in it stay links."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("megatron_burst", "configs", "scripts"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=left_out)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, timeout=250)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_module_and_configuration(wheel: Path) -> None:
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("megatron_burst/")}
    here = ROOT / "megatron_burst"
    modules = {f"megatron_burst/{path.relative_to(here)}" for path in here.rglob("*.py")}
    configurations = {f"megatron_burst/configs/{p.name}" for p in (ROOT / "configs").iterdir()}
    templates = {f"megatron_burst/{p.relative_to(here)}" for p in here.glob("tools/templates/*")}
    assert len(templates) > 2, "pages are made of them"
    others = configurations | templates | {"megatron_burst/tools/launch/launch.slurm"}
    assert inside == modules | others


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run a tool of the installed wheel, far from the repository, and return what it prints.

    The environment is fresh; packages other than ours it takes from this Python's. Of these a
    `.pth` file in turn, as that of an editable installation, is not read.
    """
    folder, away = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("away")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=250)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"MEGATRON_BURST_CPU": "1", "OMP_NUM_THREADS": "1"}

    def tool(*words: str) -> str:
        command = [str(python), *words]
        done = subprocess.run(
            command, cwd=away, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    where = tool("-c", "import megatron_burst; print(megatron_burst.__file__)")
    assert where.startswith(str(packages))
    return tool


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 -m"
# An example of each verb, small, in an order in which they find what they read.
EXAMPLES = {
    "doctor": "megatron-core",
    "corpus --output corpus": "documents",
    "plan --list": "14b_1m_32gpu_a800",
    "plan --run 14b_1m_32gpu_a800 --top 3": "torchrun --nnodes 4",
    "launch local --dry-run --ranks-per-node 2 --x 1": "--nproc-per-node 2",
    "launch slurm --dry-run --nodes 2 --x 1": "srun --nodes=2",
    f"compare --toy --ranks 2 --variants burst --output compared -- {TINY}": "burst",
    "gpu-check --device cpu --stage 1 6": "report: ",
    "trace compared/runs/burst/torch_profile": "exposed",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_verb_runs_without_the_repository(run: Callable[..., str]) -> None:
    for example, printed in EXAMPLES.items():
        assert printed in run("-m", "megatron_burst", *example.split()), example
    found = run(*TORCHRUN.split(), "megatron_burst", "verify", "--tokens-per-rank", "32")
    assert "all is right" in found


def test_no_verb_is_left_out() -> None:
    assert {example.split()[0] for example in EXAMPLES} | {"verify"} == set(VERBS)
