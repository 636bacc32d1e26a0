"""A checkpoint resumes at another CP size as if nothing had happened. (fast tier)"""

from pathlib import Path

import pytest

from tests.training.launcher import BURST, HALF, STEPS, allowed, largest_difference, report, train


def test_a_checkpoint_of_four_ranks_resumes_on_two_and_on_one(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    flags = (*data, *BURST, "--calculate-per-token-loss")
    checkpoint = str(tmp_path / "checkpoint")
    cp4 = ("--context-parallel-size", "4", "--save", checkpoint, "--save-interval", str(HALF))
    uninterrupted = train(tmp_path / "cp4", 4, *flags, *cp4)
    for ranks in (2, 1):
        resumed = train(
            tmp_path / f"cp{ranks}",
            ranks,
            *flags,
            *(
                "--context-parallel-size",
                str(ranks),
                "--load",
                checkpoint,
                "--ckpt-step",
                str(HALF),
            ),
        )
        assert sorted(resumed.losses) == list(STEPS[HALF:])
        difference = largest_difference(resumed, uninterrupted, STEPS[HALF:])
        report(f"burst CP 4 -> CP {ranks}", difference, allowed(1e-4))


@pytest.mark.slow
def test_a_checkpoint_of_megatrons_own_attention_resumes_under_burst(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    flags = (*data, "--calculate-per-token-loss")
    stock = train(tmp_path / "stock", 1, *flags, "--save", checkpoint, "--save-interval", str(HALF))
    resume = ("--context-parallel-size", "2", "--load", checkpoint, "--ckpt-step", str(HALF))
    burst = train(tmp_path / "burst", 2, *flags, *BURST, *resume)
    report(
        "stock CP 1 -> burst CP 2", largest_difference(burst, stock, STEPS[HALF:]), allowed(1e-4)
    )
