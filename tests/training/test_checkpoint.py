"""A checkpoint resumes at another CP size as if nothing had happened. (fast tier)"""

from pathlib import Path

import pytest

from tests.training.launcher import BURST, HALF, STEPS, allowed, largest_difference, report, train

HYBRID = ("--hybrid-layer-pattern", "*-*E", "--num-experts", "2", "--disable-bias-linear")


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ((), 2, [1]),
        pytest.param((), 4, [2, 1], marks=pytest.mark.slow),
        pytest.param(HYBRID, 4, [2, 1], marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_resumes_on_fewer_ranks(
    tmp_path: Path, data: tuple[str, ...], model: tuple[str, ...], before: int, after: list[int]
) -> None:
    flags = (*data, *BURST, "--calculate-per-token-loss", *model)
    checkpoint = str(tmp_path / "checkpoint")
    saving = ("--save", checkpoint, "--save-interval", str(HALF))
    many = ("--context-parallel-size", str(before), *saving)
    uninterrupted = train(tmp_path / "uninterrupted", before, *flags, *many)
    for ranks in after:
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
        report(f"burst CP {before} -> CP {ranks}", difference, allowed(1e-4))


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
