"""Plans of documents are made before they are asked for, and change nothing. (fast tier)"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_burst.tools import trace
from megatron_burst.tools.runlog import read_scalars
from tests.training.launcher import BURST, STEPS, run_module
from tests.training.test_masks import (
    BALANCED,
    CP2,
    DOCUMENTS,
    INTERLEAVED,
    PER_TOKEN,
    PP2,
    RECOMPUTE,
    TP2,
    WINDOW,
)

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 4"
EVALUATION = "--split 50,50,0 --eval-interval 1 --eval-iters 2"
HALF = f"{RECOMPUTE} --recompute-attention-fraction 0.5"

# Ranks, flags, and how many kinds of calls the first micro-batch plans when it asks for them.
CASES = {
    "CP 2": (2, f"{CP2} {PROFILE}", 1),
    "windows, CP 2 x TP 2": (4, f"{CP2} {TP2} {WINDOW}", 2),
    "interleaved PP 2 x CP 2": (4, f"{CP2} {INTERLEAVED}", 1),
    "balanced, CP 2": (2, f"{CP2} {BALANCED}", 1),
    "PP 4": (4, PP2.replace("2", "4"), 1),
    # The first micro-batch of all evaluations is not known before, either.
    "evaluation": (2, f"{CP2} {EVALUATION}", 2),
    # The second pass of the second micro-batch: nobody has asked for one before it is planned.
    "half recomputed": (2, f"{CP2} {HALF}", 3),
}


@pytest.fixture(scope="module")
def counted(
    tmp_path_factory: pytest.TempPathFactory,
    data: tuple[str, ...],
    start: tuple[str, ...],
    short_documents: tuple[str, ...],
) -> Callable[..., tuple[Path, list[tuple[int, ...]]]]:
    """Train on documents; return the folder and what every rank has counted."""

    def run(ranks: int, flags: str, way: str) -> tuple[Path, list[tuple[int, ...]]]:
        directory = tmp_path_factory.mktemp(way)
        steps = ("--train-iters", str(min(6, STEPS[-1])))  # enough for plans to be counted
        common = (*short_documents, *start[len(data) :], *BURST, PER_TOKEN, *steps)
        where = ("--tensorboard-dir", str(directory / "tensorboard"))
        words = (*where, *common, *DOCUMENTS.split(), *flags.split(), way)
        text = run_module("tests.training.count_plans", directory, ranks, *words)
        lines = re.findall(r"rank plans: (\d+) asked, (\d+) ahead, (\d+) compared", text)
        assert len(lines) == ranks
        return directory, [tuple(map(int, line)) for line in lines]

    return run


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != "CP 2")) for case in CASES]
)
def test_nothing_waits_for_plans(counted: Callable[..., tuple[Path, list]], case: str) -> None:
    ranks, flags, kinds = CASES[case]
    directory, found = counted(ranks, flags, "ahead")
    other, expected = counted(ranks, flags, "asked")
    for (asked, ahead, compared), (plans, none, _) in zip(found, expected, strict=True):
        assert asked == kinds and compared == (kinds if "--context" in flags else 0)
        assert ahead >= plans - kinds > kinds and none == 0
    scalars = [read_scalars(each / "tensorboard") for each in (directory, other)]
    for name in ("lm loss", "grad-norm"):
        assert scalars[0][name] == scalars[1][name], "the plans are the same"
    if PROFILE in flags:
        waits = [
            {
                row["rank"]: row["calls"]
                for row in trace.summary(each)["rows"]
                if row["name"] == WAIT
            }
            for each in (directory, other)
        ]
        assert waits[1] == {0: 2, 1: 2}, "two micro-batches, each for its plan"
        assert all(calls <= 2 for calls in waits[0].values()), "at most for the thread"


WAIT = "wait for the plan"
