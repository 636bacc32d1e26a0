"""A checkpoint resumes at another CP size as if nothing had happened. (fast tier)"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training.launcher import BURST, HALF, STEPS, Log, report_steps, train

HYBRID = ("--hybrid-layer-pattern", "*-*E", "--num-experts", "2", "--disable-bias-linear")
# Buckets of gradients, some of which Megatron pads.
RESHARDABLE = """
    --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --overlap-grad-reduce
    --ddp-bucket-size 9000
""".split()


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("attention", "model", "before", "after"),
    [
        (BURST, RESHARDABLE, 2, [1]),
        slow(BURST, (), 4, [2, 1]),
        slow(BURST, HYBRID, 4, [2, 1]),
        slow((), (), 1, [2]),  # of Megatron's own attention
    ],
)
def test_a_checkpoint_resumes_under_burst_on_other_ranks(
    tmp_path: Path,
    data: tuple[str, ...],
    attention: tuple[str, ...],
    model: Sequence[str],
    before: int,
    after: list[int],
) -> None:
    def run(name: str, ranks: int, *more: str) -> Log:
        flags = (*data, "--calculate-per-token-loss", "--context-parallel-size", str(ranks), *model)
        return train(tmp_path / name, ranks, *flags, *more)

    checkpoint = str(tmp_path / "checkpoint")
    saving = ("--save", checkpoint, "--save-interval", str(HALF))
    loading = (*BURST, "--load", checkpoint, "--ckpt-step", str(HALF))
    uninterrupted = run("uninterrupted", before, *attention, *saving)
    for ranks in after:
        resumed = run(f"cp{ranks}", ranks, *loading)
        assert sorted(resumed.losses) == list(STEPS[HALF:])
        name = f"CP {before} -> burst CP {ranks}"
        report_steps(name, resumed, uninterrupted, steps=STEPS[HALF:])
