"""--burst-check reference in trainings: right ones change nothing, wrong ones stop. (fast tier)

tests/plugin/test_verify.py has more faults, in layers alone.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.launcher import BURST, LAYERS, Log, run_module, train
from tests.training.test_masks import CP2, CP4, MLA, PP2, RECOMPUTE, SEGMENTED, TP2, WINDOW

MOCK = (*BURST, "--mock-data", "--train-iters", "2", "--burst-check", "reference")
INTERLEAVED = f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8"
DOCUMENTS = "--dataloader-inter-document-masking"
GQA = "--group-query-attention --num-query-groups 2"
SINKS = "--softmax-type learnable"


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


BOTH = "position ids and rotary angles"
CASES = [  # ranks, flags, stages, what of positions is looked at
    (2, f"{CP2} {WINDOW} {GQA} {SINKS} {RECOMPUTE} --bf16", 1, BOTH),
    slow(1, "", 1, BOTH),
    slow(2, f"{CP2} {DOCUMENTS} {SEGMENTED}", 1, BOTH),
    slow(4, f"{CP2} {PP2} {DOCUMENTS} --burst-layout balanced {RECOMPUTE}", 2, BOTH),
    slow(2, f"{CP2} {DOCUMENTS} {MLA} rope", 1, BOTH),
    slow(2, f"{CP2} {MLA} yarn", 1, BOTH),
    slow(4, f"{CP2} {TP2} {MLA} rope --sequence-parallel --burst-mla latent", 1, BOTH),
    slow(2, f"{CP2} --position-embedding-type learned_absolute", 1, "position ids"),
    slow(2, f"{CP2} --reset-position-ids", 1, "rotary angles"),
    slow(4, f"{CP4} --burst-head-parallel-size 2 {SINKS}", 1, BOTH),
    slow(4, f"{CP2} {TP2} {GQA}", 1, BOTH),
    slow(4, f"{CP2} {PP2} {RECOMPUTE}", 2, BOTH),
    slow(4, f"{CP2} {INTERLEAVED} {RECOMPUTE}", 2, BOTH),
    slow(4, f"{CP2} --use-distributed-optimizer --overlap-grad-reduce", 1, BOTH),
    slow(2, f"{CP2} {RECOMPUTE} {SEGMENTED} --recompute-attention-fraction 0.5", 1, BOTH),
    slow(2, f"{CP2} --bf16 --burst-backward query --burst-grad-dtype model", 1, BOTH),
]


@pytest.mark.parametrize(("ranks", "flags", "stages", "positions"), CASES)
def test_a_right_training_passes(
    tmp_path: Path, ranks: int, flags: str, stages: int, positions: str
) -> None:
    log = train(tmp_path, ranks, *MOCK, "--calculate-per-token-loss", *flags.split())
    assert list(log.losses) == [1, 2]
    assert log.text.count("the first micro-batch equals the unsharded reference") == stages
    assert f"({positions} too)" in log.text
    rows = re.findall(r"^ *(\d+)  +\d\.\de-\d\d <.*", log.text, re.MULTILINE)
    assert sorted(rows) == [str(n) for n in range(1, LAYERS + 1)], "every layer has its row"


@pytest.mark.slow
def test_it_changes_no_loss(
    tmp_path: Path, runs: Callable[..., Log], start: tuple[str, ...]
) -> None:
    flags = ("--calculate-per-token-loss", *CP2.split())
    log = train(tmp_path, 2, *start, *BURST, *flags, "--burst-check", "reference")
    plain = runs(2, *flags)
    assert (log.losses, log.grad_norms) == (plain.losses, plain.grad_norms)


FAULTS = {
    "swapped batch": r"position ids on rank 1 \(context-parallel rank 1\) are not those of its "
    r"tokens: 64 of 64 are wrong, of tokens 32 to 95",
    "lost gradient": r"layer \d, d[qkv] on rank \d: error .* is allowed, .*first tokens \d+ to",
}


@pytest.mark.parametrize("fault", ["swapped batch", slow("lost gradient")])
def test_a_wrong_training_stops_in_the_first_step(tmp_path: Path, fault: str) -> None:
    module = "tests.training.verify_with_fault"
    text = run_module(module, tmp_path, 2, *MOCK, *CP2.split(), fault)
    assert text.count("stopped:") == 2, "both ranks"
    assert (
        text.count("--burst-check reference: attention over the context-parallel ranks is not") >= 2
    )
    assert re.search(FAULTS[fault], text)
    assert "DIFFERS from the unsharded reference" in text
    assert "iteration        1/" not in text
