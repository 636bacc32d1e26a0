"""Steps of --sft, each padded conversation in a zigzag of its own, equal one rank. (fast tier)"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.launcher import BURST, Log, report_steps, run_module, table
from tests.training.test_masks import (
    CP2,
    CP4,
    INTERLEAVED,
    MLA,
    PER_TOKEN,
    PP2,
    RECOMPUTE,
    STATES,
    TP2,
)

# Flags of the model, ranks and their flags.
CASES = table(f"""\
CP 2; ; 2; {CP2}
CP 4; ; 4; {CP4}
TP 2 x CP 2; ; 4; {TP2} {CP2}
PP 2; ; 2; {PP2}
CP 2 x interleaved PP 2, recompute; ; 4; {CP2} {INTERLEAVED} {RECOMPUTE} \
--recompute-attention-fraction 0.5
CP 2, chunked loss, query ring; ; 2; {CP2} --lm-head-loss chunked --burst-backward query
CP 2, latents; {MLA} rope; 2; {CP2}
CP 2, M and G; {STATES}; 2; {CP2}
CP 4, M and G; {STATES}; 4; {CP4}
CP 2, MTP; --mtp-num-layers 1; 2; {CP2}
CP 2, MTP, chunked loss; --mtp-num-layers 1; 2; {CP2} --lm-head-loss chunked
""")


@pytest.fixture(scope="module")
def conversations(
    once: Callable[..., Log], data: tuple[str, ...], start: tuple[str, ...]
) -> Callable[..., Log]:
    """Train on conversations from the common start; equal calls share one run."""
    flags = ("--sft", "--data-path", "conversations", *BURST, PER_TOKEN)

    def run(ranks: int, more: str) -> Log:
        is_another = any(flags in more for flags in (MLA, STATES, "mtp"))  # model
        own = () if is_another else start[len(data) :]
        module = "tests.training.conversations"
        return once(ranks, *own, *flags, *more.split(), module=module)

    return run


@pytest.mark.parametrize(
    "case", ["CP 2", *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][1:])]
)
def test_steps_of_sft_equal_one_rank(conversations: Callable[..., Log], case: str) -> None:
    model, ranks, flags = CASES[case]
    one, found = conversations(1, model), conversations(ranks, f"{model} {flags}")
    report_steps(f"sft, {case}", found, one)


@pytest.mark.slow
def test_sft_evaluated_and_verified(conversations: Callable[..., Log]) -> None:
    evaluated = "--split 50,50,0 --eval-iters 2 --eval-interval 2"
    one, found = (conversations(ranks, f"{evaluated} {cp}") for ranks, cp in ((1, ""), (2, CP2)))
    report_steps("sft, evaluation", found, one)
    losses, expected = (
        [
            float(loss)
            for loss in re.findall(r"validation loss at .*?lm loss value: (\S+)", run.text)
        ]
        for run in (found, one)
    )
    assert losses and losses == pytest.approx(expected, rel=1e-5)
    verified = conversations(2, f"{evaluated} {CP2} --burst-check reference")
    assert verified.losses == found.losses


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_documents_that_the_caller_packs_and_splits(tmp_path: Path, ranks: int) -> None:
    """As verl and NeMo-RL do: padded ones, without hooks; logits in the caller's order."""
    flags = ("--mock-data", "--context-parallel-size", str(ranks))
    text = run_module("tests.training.logits_of_documents", tmp_path, ranks, *flags)
    words = [line.split() for line in text.splitlines() if line.startswith("apart ")]
    found = {f"{model} {what}": float(apart) for _, model, what, apart in words}
    print(found)
    assert len(found) == 8
    assert all(found.pop(f"{model} again") == 0.0 for model in ("gqa", "latent"))
    assert max(found.values()) < 1e-5


def test_micro_batches_over_groups_of_their_own(tmp_path: Path) -> None:
    """Megatron's of 4, 2 and 1 of the ranks; positions are those of the micro-batch's group."""
    flags = "--mock-data --context-parallel-size 2 --hybrid-context-parallel"
    flags += " --calculate-per-token-loss"
    text = run_module("tests.training.logits_of_groups", tmp_path, 4, *flags.split())
    words = [line.split() for line in text.splitlines() if line.startswith("apart ")]
    found = {f"{model} {what}": float(apart) for _, model, what, apart in words}
    print(found)
    assert len(found) == 4 and max(found.values()) < 1e-5
