"""MTP's losses, gradient norms and acceptance rates equal those of one rank. (fast tier)

The end of a document is masked, so that masks are uneven over ranks; they cannot be where Megatron
takes the mean of the ranks' means, of the main loss.
"""

from collections.abc import Callable

import pytest

from tests.tier import slow_if
from tests.training.launcher import BURST, Log, allowed, report, table
from tests.training.test_equal_to_one_rank import OVERLAP
from tests.training.test_masks import BALANCED, CP2, PP2, RECOMPUTE, SEGMENTED, TP2

type Figures = dict[str, dict[int, float]]

MASKED = "--calculate-per-token-loss --eod-mask-loss"
GPT = f"--mtp-num-layers 2 {MASKED}"
MEANS = "--mtp-num-layers 1"
HYBRID = f"--hybrid-layer-pattern *-*-/*-/*- {MASKED}"
STAGES = f"--hybrid-layer-pattern *-|*-/*- {MASKED} --pipeline-model-parallel-size 2"
LINEAR = (
    f"--hybrid-layer-pattern M*-/G*M- {MASKED} --swiglu --mamba-state-dim 16 --mamba-head-dim 16 "
    "--mamba-num-groups 4 --mamba-num-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 8 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8"
)
DOCUMENTS = "--dataloader-inter-document-masking"
CHECK = "--burst-check reference"
CHUNKED = "--lm-head-loss chunked --lm-head-chunk-size 100"

# Ranks and flags, of a run and of what it has to equal.
CASES = {
    f"{name}, CP {ranks}{', chunked' if loss else ''}": (
        *(ranks, f"{model} --context-parallel-size {ranks} {loss}"),
        *(1, model),
    )
    for name, model, ranks, loss in (
        ("hybrid", HYBRID, 2, CHUNKED),
        ("hybrid", HYBRID, 4, ""),
        ("GPT", GPT, 2, ""),
        ("GPT", GPT, 4, CHUNKED),
    )
}
CASES |= table(f"""\
hybrid, CP 2 x TP 2; 4; {HYBRID} {CP2} {TP2} {CHUNKED}; 2; {HYBRID} {TP2}
hybrid, CP 2 x PP 2; 4; {STAGES} {CP2} {CHUNKED}; 2; {STAGES}
GPT, CP 2, means, chunked; 2; {MEANS} {CP2} {CHUNKED}; 1; {MEANS}
GPT, CP 2, recompute; 2; {GPT} {CP2} {RECOMPUTE} {CHUNKED}; 1; {GPT}
GPT, CP 2 x PP 2, virtual stages; 4; {GPT} {CP2} {PP2} --num-layers-per-virtual-pipeline-stage 1 \
{CHUNKED}; 2; {GPT} {PP2} --num-layers-per-virtual-pipeline-stage 1
hybrid of Mamba and GDN, CP 2, chunked; 2; {LINEAR} {CP2} {CHUNKED}; 1; {LINEAR}
hybrid, CP 2, fraction 0.5; 2; {HYBRID} {CP2} {RECOMPUTE} --recompute-attention-fraction 0.5 \
{CHECK}; 1; {HYBRID}
GPT, CP 2, documents; 2; {GPT} {DOCUMENTS} {CP2} {CHUNKED}; 1; {GPT} {DOCUMENTS}
GPT, CP 4, documents, balanced; 4; {GPT} {DOCUMENTS} --context-parallel-size 4 {BALANCED}; 1; \
{GPT} {DOCUMENTS}
hybrid, CP 2 x TP 2, documents, balanced, verified; 4; {HYBRID} {DOCUMENTS} {CP2} {TP2} \
{BALANCED} {CHUNKED} {CHECK}; 2; {HYBRID} {DOCUMENTS} {TP2}
GPT, CP 2 x PP 2, documents, balanced; 4; {GPT} {DOCUMENTS} {CP2} {PP2} {BALANCED}; 2; {GPT} \
{DOCUMENTS} {PP2}
hybrid, CP 2, segmented; 2; {HYBRID} {CP2} {SEGMENTED} {CHUNKED}; 1; {HYBRID}
GPT, CP 2 x DP 2; 4; {GPT} {CP2} {OVERLAP} {CHUNKED}; 1; {GPT}
""")


@pytest.fixture(scope="module")
def figures(once: Callable[..., Log], short_documents: tuple[str, ...]) -> Callable[..., Figures]:
    """Train; equal calls share one run."""
    return lambda ranks, flags: once(ranks, *short_documents, *BURST, *flags.split()).scalars


@pytest.mark.parametrize("case", slow_if([*CASES][1:], CASES))
def test_training_equals_one_context_parallel_rank(
    figures: Callable[..., Figures], case: str
) -> None:
    ranks, flags, *one = CASES[case]
    found, expected = figures(ranks, flags), figures(*one)
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


@pytest.mark.slow
def test_bfloat16_equals_one_rank_within_bfloat16(figures: Callable[..., Figures]) -> None:
    """Half a unit in the last place of a bfloat16, as without MTP."""
    found = figures(2, f"{GPT} --bf16 {CP2} {CHUNKED}")
    expected = figures(1, f"{GPT} --bf16")
    for name in ("lm loss", "mtp_1 loss", "mtp_2 loss"):
        wanted = expected[name]
        difference = max(abs(found[name][step] / wanted[step] - 1) for step in wanted)
        report(f"bfloat16, {name}", difference, 2**-8)
