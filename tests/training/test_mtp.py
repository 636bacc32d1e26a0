"""MTP's losses, gradient norms and acceptance rates equal those of one rank. (fast tier)

The end of a document is masked, so that masks are uneven over ranks; they cannot be where Megatron
takes the mean of the ranks' means, of the main loss.
"""

from collections.abc import Callable

import pytest

from megatron_burst.tools.runlog import read_scalars
from tests.tier import slow_if
from tests.training.launcher import BURST, allowed, report, train

type Figures = dict[str, dict[int, float]]

MASKED = "--calculate-per-token-loss --eod-mask-loss"
GPT = f"--mtp-num-layers 2 {MASKED}"
MEANS = "--mtp-num-layers 1"
HYBRID = f"--hybrid-layer-pattern *-*-/*-/*- {MASKED}"
STAGES = f"--hybrid-layer-pattern *-|*-/*- {MASKED} --pipeline-model-parallel-size 2"
CHUNKED = "--lm-head-loss chunked --lm-head-chunk-size 100"
CP2, CP4 = (f"--context-parallel-size {ranks}" for ranks in (2, 4))
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

# Ranks and flags, of a run and of what it has to equal.
CASES = {
    "hybrid, CP 2, chunked": ((2, f"{HYBRID} {CP2} {CHUNKED}"), (1, HYBRID)),
    "hybrid, CP 4": ((4, f"{HYBRID} {CP4}"), (1, HYBRID)),
    "hybrid, CP 2 x TP 2": ((4, f"{HYBRID} {CP2} {TP2} {CHUNKED}"), (2, f"{HYBRID} {TP2}")),
    "hybrid, CP 2 x PP 2": ((4, f"{STAGES} {CP2} {CHUNKED}"), (2, STAGES)),
    "GPT, CP 2": ((2, f"{GPT} {CP2}"), (1, GPT)),
    "GPT, CP 4, chunked": ((4, f"{GPT} {CP4} {CHUNKED}"), (1, GPT)),
    "GPT, CP 2, means": ((2, f"{MEANS} {CP2}"), (1, MEANS)),
    "GPT, CP 2, means, chunked": ((2, f"{MEANS} {CP2} {CHUNKED}"), (1, MEANS)),
    "GPT, CP 2, recompute": ((2, f"{GPT} {CP2} {RECOMPUTE} {CHUNKED}"), (1, GPT)),
    "GPT, CP 2 x PP 2": ((4, f"{GPT} {CP2} {PP2} {CHUNKED}"), (2, f"{GPT} {PP2}")),
    "GPT, CP 2 x DP 2": ((4, f"{GPT} {CP2} {OVERLAP} {CHUNKED}"), (1, GPT)),
}


@pytest.fixture(scope="module")
def figures(
    tmp_path_factory: pytest.TempPathFactory, short_documents: tuple[str, ...]
) -> Callable[..., Figures]:
    """Train; equal calls share one run."""
    finished: dict[tuple[int, str], Figures] = {}

    def run(ranks: int, flags: str) -> Figures:
        if (ranks, flags) not in finished:
            directory = tmp_path_factory.mktemp("mtp")
            train(directory, ranks, *short_documents, *BURST, *flags.split())
            found = read_scalars(directory / "tensorboard").items()
            finished[ranks, flags] = {name: dict(points) for name, points in found}
        return finished[ranks, flags]

    return run


@pytest.mark.parametrize("case", slow_if([*CASES][1:], CASES))
def test_training_equals_one_context_parallel_rank(
    figures: Callable[..., Figures], case: str
) -> None:
    found, expected = (figures(*run) for run in CASES[case])
    heads = [name for name in expected if name.startswith("mtp_") and name.endswith(" loss")]
    assert heads
    for name in ("lm loss", "grad-norm", *heads):
        wanted = expected[name]
        assert found[name].keys() == wanted.keys() and len(wanted) > 1
        difference = max(abs(found[name][step] / wanted[step] - 1) for step in wanted)
        report(f"{case}, {name}", difference, allowed(1e-4))
    for head in heads:  # in percent; one token of some 500 may fall the other way
        rates = (run[head.replace(" loss", "_acceptance_rate")] for run in (found, expected))
        assert next(rates) == pytest.approx(next(rates), abs=0.5)
