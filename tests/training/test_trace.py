"""Megatron's own profiler flags show attention's ranges. (fast tier)"""

from pathlib import Path

from megatron_burst.tools import trace
from tests.training.launcher import BURST, train

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4"


def test_two_training_steps_are_profiled(tmp_path: Path, data: tuple[str, ...]) -> None:
    train(
        tmp_path,
        2,
        *data,
        *BURST,
        *("--context-parallel-size", "2", "--calculate-per-token-loss", "--train-iters", "4"),
        *("--hybrid-layer-pattern", "*-*-", *PROFILE.split()),
    )
    content = trace.summary(tmp_path)  # Megatron writes to torch_profile in it
    assert (content["ranks"], content["steps"]) == ([0, 1], 2)
    calls = {row["name"]: row["calls"] for row in content["rows"] if row["rank"] == 1}
    # 2 layers of attention, 2 micro-batches of 2 samples, 2 steps.
    assert calls == {"forward": 8, "backward": 8, trace.ATTENTION: 16}
