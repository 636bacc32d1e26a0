"""A checkpoint resumes at another CP size as if nothing had happened. (fast tier)"""

from pathlib import Path

from tests.training.launcher import BURST, largest_difference, train


def test_a_checkpoint_of_four_ranks_resumes_on_two_and_on_one(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    flags = (*data, *BURST, "--calculate-per-token-loss")
    checkpoint = str(tmp_path / "checkpoint")
    cp4 = ("--context-parallel-size", "4", "--save", checkpoint, "--save-interval", "10")
    uninterrupted = train(tmp_path / "cp4", 4, *flags, *cp4)
    for ranks in (2, 1):
        resumed = train(
            tmp_path / f"cp{ranks}",
            ranks,
            *flags,
            *("--context-parallel-size", str(ranks), "--load", checkpoint, "--ckpt-step", "10"),
        )
        assert sorted(resumed.losses) == list(range(11, 21))
        assert largest_difference(resumed, uninterrupted, range(11, 21)) < 1e-4
