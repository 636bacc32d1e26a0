"""The recipe for Megatron-Bridge, by Bridge's real provider. (needs a checkout)

MEGATRON_BRIDGE_PATH names a checkout of Megatron-Bridge. Its provider needs omegaconf, PyYAML and
tqdm; without them the test is skipped.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = ("omegaconf", "yaml", "tqdm")
CHECKOUT = os.environ.get("MEGATRON_BRIDGE_PATH", "")
ROOT = Path(__file__).parents[2]


def trained(algorithm: str, ranks: int) -> tuple[str, str, float, float]:
    """The classes of core attention and of logits, the loss and the norm of the gradients."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    rank = Path(__file__).with_name("bridge_rank.py")
    command += [f"--nproc-per-node={ranks}", str(rank), CHECKOUT, algorithm]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "MEGATRON_BURST_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    name, logits, *figures = re.findall(r"^found (\w+) (\w+) (\S+) (\S+)", done.stdout, re.M)[0]
    loss, norm = map(float, figures)
    return name, logits, loss, norm


def test_bridges_provider_trains_alike_with_our_attention_and_loss() -> None:
    if not CHECKOUT:
        pytest.skip("MEGATRON_BRIDGE_PATH names no checkout of Megatron-Bridge")
    for package in NEEDED:
        pytest.importorskip(package)
    theirs = trained("megatron", 1)
    assert theirs[:2] == ("DotProductAttention", "Tensor")
    for ranks in (1, 2):
        *names, loss, norm = trained("burst", ranks)
        assert names == ["BurstCoreAttention", "UnmadeLogits"]
        assert (loss, norm) == pytest.approx(theirs[2:], rel=2e-5)
