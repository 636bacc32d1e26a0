"""Megatron-LM's own scripts train as our entry does, however started. (needs a checkout)

MEGATRON_LM_PATH names a checkout of Megatron-LM, which is copied, never changed, or a branch or
tag, which is cloned: core_v0.19.0, main or dev of August 2026. Every way takes the same steps on
two context-parallel ranks of the CPU, with the checkout's Megatron, and has the very losses and
gradient norms of our own entry.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_burst.tools.runlog import read_scalars
from tests.training.launcher import MODEL, STEPS, Log, environment, largest_difference, report

pytestmark = pytest.mark.timeout(1200)  # a checkout compiles its helpers first

UPSTREAM = "https://github.com/NVIDIA/Megatron-LM"
ROOT = Path(__file__).parents[2]
COMMON = ("--mock-data", "--context-parallel-size", "2", "--calculate-per-token-loss")
BURST = ("--context-parallel-algo", "burst")
MUCH = (
    "--lm-head-loss chunked "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--recompute-attention-fraction 0.5"
).split()
DOCUMENTS = ("--dataloader-inter-document-masking",)
OUR_ENTRY = ("-m", "megatron_burst.pretrain")
PATTERN = ("--hybrid-layer-pattern", "*-*-*-*-")
# The flags of a script's model and its name for `--spec`.
SCRIPTS = {"pretrain_gpt.py": (), "pretrain_hybrid.py": PATTERN}
by_script = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("MEGATRON_LM_PATH")
    if not given:
        pytest.skip("MEGATRON_LM_PATH names no checkout, branch or tag of Megatron-LM")
    copy = tmp_path_factory.mktemp("Megatron-LM")
    if not Path(given).is_dir():
        clone = ["git", "clone", "-q", "--depth", "1", "--branch", given, UPSTREAM, str(copy)]
        subprocess.run(clone, check=True, timeout=560)
        return copy
    fresh = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(given) / "megatron", copy / "megatron", ignore=fresh)
    for script in Path(given).glob("*.py"):
        shutil.copy(script, copy)
    return copy


@pytest.fixture(scope="module")
def is_dev(checkout: Path) -> bool:
    """Dev's pretrain_gpt.py knows no documents, and its local layers no name but all_gather."""
    config = checkout / "megatron" / "core" / "transformer" / "transformer_config.py"
    return "fallback_to_eager_attn only supports all_gather" in config.read_text()


@pytest.fixture(scope="module")
def train(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Log]:
    """Train; equal calls share one run."""
    finished: dict[tuple[str, ...], Log] = {}

    def train_once(*command: str) -> Log:
        if command not in finished:
            finished[command] = logged(checkout, tmp_path_factory.mktemp("run"), *command)
        return finished[command]

    return train_once


def logged(checkout: Path, directory: Path, *command: str) -> Log:
    done = ended(*command, "--tensorboard-dir", str(directory), **variables(checkout))
    assert done.returncode == 0, done.stdout[-6000:]
    scalars = {name: dict(points) for name, points in read_scalars(directory).items()}
    return Log(scalars=scalars, text=done.stdout)


def ended(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*start, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )


def variables(checkout: Path) -> dict[str, str]:
    """Without a launcher of ours the checkout has to come before the wheel by itself.

    The environment is not activated: `python3` and `python3-config` are others, if any.
    """
    paths = (str(checkout), str(ROOT), os.environ.get("PYTHONPATH", ""))
    own = str(Path(sys.executable).parent)
    commands = [place for place in os.environ["PATH"].split(os.pathsep) if place != own]
    return {
        **environment(),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join(commands),
    }


def check_equal(way: str, found: Log, expected: Log) -> None:
    first, last = (expected.losses[step] for step in (1, STEPS[-1]))
    print(f"{way}: losses, {first:.6f} to {last:.6f}, and gradient norms equal to ours")
    assert found.losses == expected.losses and found.grad_norms == expected.grad_norms
    assert last < first


def test_without_a_compiler_every_rank_ends_with_the_reason(checkout: Path) -> None:
    """The first test: nothing is compiled yet."""
    script = ("-m", "megatron_burst.run", str(checkout / "pretrain_gpt.py"))
    setting = {**variables(checkout), "CXX": "no-such-compiler"}
    done = ended(*script, *MODEL, *COMMON, *BURST, **setting)
    assert done.returncode == 1
    (reason,) = re.findall(r"^megatron_burst: rank . failed: (.*)", done.stdout, re.MULTILINE)
    assert "takes make, a C++ compiler and Python's headers (Debian, Ubuntu: apt-get " in reason
    assert "no-such-compiler" in done.stdout
    assert "Connection closed" not in done.stdout


@by_script
def test_by_the_launcher(checkout: Path, train: Callable[..., Log], script: str) -> None:
    flags = (*MODEL, *SCRIPTS[script], *COMMON, *BURST)
    found = train("-m", "megatron_burst.run", str(checkout / script), *flags)
    assert f" in {checkout / 'megatron'}" in found.text
    check_equal(f"megatron_burst.run {script}", found, train(*OUR_ENTRY, *flags))


@pytest.mark.parametrize("layout", ["segmented-zigzag", "balanced"])
def test_by_the_launcher_with_all_that_is_hooked_into_the_model(
    checkout: Path, train: Callable[..., Log], is_dev: bool, layout: str
) -> None:
    script = ("-m", "megatron_burst.run", str(checkout / "pretrain_gpt.py"))
    flags = (*MODEL, *COMMON, *BURST, *MUCH, "--burst-layout", layout)
    if not is_dev:
        flags += DOCUMENTS
    elif layout == "balanced":
        done = ended(*script, *flags, *DOCUMENTS, **variables(checkout))
        assert "this script gives the model no documents" in done.stdout
        return
    found, expected = (train(*way, *flags) for way in (script, OUR_ENTRY))
    for said in ("chunked LM head loss: ", layout):
        assert said in found.text
    check_equal(f"megatron_burst.run, all hooks, {layout}", found, expected)


def test_a_gpt_goes_on_as_a_hybrid_model(
    checkout: Path, train: Callable[..., Log], tmp_path: Path
) -> None:
    half, folder = str(STEPS[-1] // 2), str(tmp_path)
    optimizer = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
    way = ("-m", "megatron_burst.run")
    flags = (*MODEL, *COMMON, *BURST, *optimizer)
    gpt = (*way, str(checkout / "pretrain_gpt.py"), *flags)
    train(*gpt, "--exit-interval", half, "--save", folder)
    expected = train(*gpt, "--load", folder)
    hybrid = (*way, str(checkout / "pretrain_hybrid.py"), *flags, *PATTERN, "--load", folder)
    steps = range(int(half) + 1, STEPS[-1] + 1)
    found = train(*hybrid)
    assert set(found.losses) == set(steps)
    report("hybrid after GPT", largest_difference(found, expected, steps), 1e-6)


def test_a_patched_fork_trains_alike(
    checkout: Path, train: Callable[..., Log], tmp_path: Path
) -> None:
    fork = tmp_path / "fork"
    shutil.copytree(checkout, fork)
    script = str(ROOT / "scripts" / "patch_megatron.sh")
    env = {**variables(fork), "PYTHON": sys.executable}
    done = subprocess.run(
        [script, "--megatron", str(fork)], env=env, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    for name, model in SCRIPTS.items():
        flags = (*MODEL, *model, *COMMON, *BURST)
        found = logged(fork, tmp_path / name, str(fork / name), *flags)
        assert f" in {fork / 'megatron'}" in found.text
        check_equal(f"patch, {name}", found, train(*OUR_ENTRY, *flags))
