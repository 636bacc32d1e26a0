"""Steps with the chunked LM head loss equal steps with Megatron's own. (fast tier)"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tier import slow_if
from tests.training.launcher import (
    BURST,
    HALF,
    Log,
    allowed,
    largest_difference,
    report,
    table,
    train,
)

TOLERANCE = allowed(1e-5)
PER_TOKEN = "--calculate-per-token-loss"
CHUNKED = ("--lm-head-loss", "chunked")
IN_CHUNKS = (*CHUNKED, "--lm-head-chunk-size", "100")  # of 256 tokens
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CP2, TP2 = "--context-parallel-size 2", "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"

CASES = table(f"""\
alone; 1; 
TP 2, sequence parallel; 2; {TP2} --sequence-parallel
TP 2 x PP 2, sequence parallel; 4; {TP2} {PP2} --sequence-parallel
DP 2, distributed optimizer, overlap; 2; {OVERLAP}
accumulation over 4 micro-batches; 1; --global-batch-size 8
TP 2; 2; {TP2}
CP 2 x TP 2, sequence parallel; 4; {CP2} {TP2} --sequence-parallel
CP 2 x PP 2; 4; {CP2} {PP2}
TP 2 x interleaved PP 2; 4; {PP2} --num-layers-per-virtual-pipeline-stage 1 {TP2}
CP 2 x DP 2, overlap; 4; {CP2} {OVERLAP}
""")
SLOW = CASES.keys() - {"TP 2, sequence parallel"}


def losses_differ(found: Log, expected: Log) -> float:
    return max(abs(found.losses[step] / expected.losses[step] - 1) for step in expected.losses)


def check(case: str, found: Log, expected: Log) -> None:
    """Losses are to agree; gradient norms show more of the roundings of earlier steps."""
    assert found.losses.keys() == expected.losses.keys()
    report(case, losses_differ(found, expected), TOLERANCE)
    difference = largest_difference(found, expected, list(expected.losses))
    report(f"{case}, with gradient norms", difference, 10 * TOLERANCE)


@pytest.mark.parametrize("case", slow_if(SLOW, CASES))
def test_losses_and_gradient_norms_equal_megatrons(runs: Callable[..., Log], case: str) -> None:
    ranks, flags = CASES[case]
    expected = runs(ranks, PER_TOKEN, *flags.split())
    found = runs(ranks, PER_TOKEN, *flags.split(), *IN_CHUNKS)
    said = r"chunked LM head loss: 100 tokens a chunk, .*, logits made once, "
    assert re.search(said, found.text)
    check(case, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("per_token", [(PER_TOKEN,), ()], ids=["per token", "mean of means"])
def test_masked_losses_equal_megatrons(
    once: Callable[..., Log], short_documents: tuple[str, ...], per_token: tuple[str, ...]
) -> None:
    """Half of the tokens of some samples are masked; Megatron averages by its own rules."""
    flags = (*short_documents, *BURST, "--eod-mask-loss", "--train-iters", "5", *per_token)
    expected, found = once(1, *flags), once(1, *flags, *IN_CHUNKS)
    check("masked", found, expected)


def test_weights_of_their_own_that_arrive_late(tmp_path: Path, data: tuple[str, ...]) -> None:
    """Untied, and gathered while forward runs, by hooks of the output layer.

    Buckets of 4000 elements, so that the output layer's is not the first's. It also evaluates.
    """
    flags = (*data, *BURST, PER_TOKEN, "--untie-embeddings-and-output-weights", *OVERLAP.split())
    flags += ("--ddp-bucket-size", "4000", "--split", "90,10,0", "--eval-iters", "1")
    flags += ("--eval-interval", str(HALF))
    expected = train(tmp_path / "megatron", 2, *flags)
    found = train(tmp_path / "chunked", 2, *flags, *IN_CHUNKS)
    check("untied, overlap", found, expected)
    evaluated = [_validation_losses(log) for log in (found, expected)]
    assert len(evaluated[0]) == len(found.losses) // HALF + 1  # every HALF steps, and at the end
    assert evaluated[0] == pytest.approx(evaluated[1], rel=TOLERANCE)


def _validation_losses(log: Log) -> list[float]:
    lines = [line for line in log.text.splitlines() if "validation loss at iteration" in line]
    return [float(line.split("lm loss value:")[1].split()[0]) for line in lines]


@pytest.mark.slow
def test_beside_megatrons_own_attention_losses_are_the_same(
    tmp_path: Path, start: tuple[str, ...]
) -> None:
    """--lm-head-loss needs no other flag of ours."""
    expected = train(tmp_path / "megatron", 1, *start, PER_TOKEN)
    found = train(tmp_path / "chunked", 1, *start, PER_TOKEN, *CHUNKED)
    check("Megatron's attention", found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["--hybrid-layer-pattern *-*-", "--use-mup --mup-base-hidden-size 16"]
)
def test_other_models_equal_megatrons(
    once: Callable[..., Log], data: tuple[str, ...], model: str
) -> None:
    flags = (*data, *BURST, PER_TOKEN, *model.split(), "--train-iters", "5")
    check(model, once(1, *flags, *IN_CHUNKS), once(1, *flags))


@pytest.mark.slow
def test_bfloat16_equals_megatrons_loss_within_bfloat16(runs: Callable[..., Log]) -> None:
    """Half a unit in the last place of a bfloat16, as between numbers of ranks."""
    difference = losses_differ(
        runs(1, PER_TOKEN, "--bf16", *IN_CHUNKS), runs(1, PER_TOKEN, "--bf16")
    )
    report("bfloat16", difference, 2**-8)
