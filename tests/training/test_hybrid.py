"""HybridModel trains as the GPTModel of the same weights, and alike on any ranks. (fast tier)"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tier import slow_if
from tests.training.launcher import BURST, LAYERS, STEPS, Log, allowed, report_steps, table, train
from tests.training.test_equal_to_one_rank import (
    CP2,
    CP4,
    EXPERTS,
    OVERLAP,
    PER_TOKEN,
    PP2,
    RECOMPUTE,
    TP2,
)

SAME_LAYERS = ("--hybrid-layer-pattern", "*-" * LAYERS)
OF_A_GPT = allowed(1e-6)


def test_a_gpt_goes_on_as_a_hybrid_model(tmp_path: Path, data: tuple[str, ...]) -> None:
    """Its checkpoint is translated by Megatron, the optimizer's state included."""
    checkpoint, last = str(tmp_path / "checkpoint"), STEPS[-1] + 1
    optimizer = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
    flags = (*data, *BURST, PER_TOKEN, *optimizer, "--train-iters", str(last))
    train(tmp_path / "start", 1, *flags, "--exit-interval", "1", "--save", checkpoint)
    expected = train(tmp_path / "gpt", 1, *flags, "--load", checkpoint)
    found = train(tmp_path / "hybrid", 1, *flags, *SAME_LAYERS, "--load", checkpoint)
    steps = range(2, last + 1)
    assert set(found.losses) == set(steps) and len(steps) == len(STEPS)
    report_steps("hybrid after GPT", found, expected, OF_A_GPT, steps=steps)


@pytest.fixture(scope="module")
def starts(
    tmp_path_factory: pytest.TempPathFactory, once: Callable[..., Log], data: tuple[str, ...]
) -> Callable[..., Any]:
    """Flags that start a model, from one checkpoint or the seed, and its run on one rank."""

    @functools.cache
    def start(model: tuple[str, ...], checkpoint: bool) -> tuple[tuple[str, ...], Log]:
        flags = (*data, *BURST, PER_TOKEN, *model)
        if checkpoint:
            saved = str(tmp_path_factory.mktemp("hybrid") / "checkpoint")
            once(1, *flags, "--train-iters", "1", "--save", saved)
            flags += ("--load", saved, "--finetune", "--no-load-optim")
        return flags, once(1, *flags)

    return start


DENSE = "*-*---"
MLA = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --rope-type rope --no-rope-fusion"
)
MAMBA = "--mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 4 --mamba-num-heads 8"
GDN = (
    "--swiglu --linear-key-head-dim 16 --linear-value-head-dim 8 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8"
)
SEGMENTED = "--burst-layout segmented-zigzag"
BLOCKS = (
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2 "
    "--recompute-attention-fraction 0.5"
)
STATES = f"{MAMBA} {GDN} --dataloader-inter-document-masking"
UNDIVIDED = STATES.replace("heads 8", "heads 6").replace("heads 4", "heads 3")
UNDIVIDED = UNDIVIDED.replace("groups 4", "groups 2")
CONTIGUOUS = "--burst-layout contiguous"
# The pattern without stages, further flags of the model, its stages, ranks and their flags.
CASES: dict[str, tuple[str, str, str, int, str]] = table(f"""\
CP 2, experts; *E*-; {EXPERTS}; ; 2; {CP2}
PP 2 x CP 2, a stage without attention, fraction 0.5; {DENSE}; ; *-*-|--; 4; {CP2} {PP2} {RECOMPUTE}
TP 2 x CP 2, sequence parallel, norms of queries and keys; {DENSE}; --qk-layernorm; ; 4; \
{CP2} {TP2} --sequence-parallel
DP 2 x CP 2, distributed optimizer, overlap; {DENSE}; ; ; 4; {CP2} {OVERLAP}
CP 4, query backward; {DENSE}; ; ; 4; {CP4} --burst-backward query
CP 2, MLA; +-+-; {MLA}; ; 2; {CP2}
CP 2, latents; +-+-/+-; {MLA} --q-lora-rank 24 --qk-layernorm; ; 2; {CP2} --burst-mla latent
PP 2 x CP 2, latents; +-+-; {MLA}; +-|+-; 4; {CP2} {PP2} --burst-mla latent
DP 2 x CP 2, distributed optimizer, overlap, latents; +-+-; {MLA}; ; 4; \
{CP2} --use-distributed-optimizer --overlap-grad-reduce --burst-mla latent
CP 2, segmented zigzag, documents; {DENSE}; --dataloader-inter-document-masking; ; 2; \
{CP2} {SEGMENTED}
CP 2, selective recompute; {DENSE}; ; ; 2; \
{CP2} --recompute-granularity selective --recompute-attention-fraction 0.5
CP 2, Mamba and GDN; M*G-; {MAMBA} {GDN}; ; 2; {CP2}
CP 2, all in zigzag, Mamba and GDN; M*G-; {MAMBA} {GDN}; ; 2; {CP2} --burst-layout zigzag
PP 2 x CP 2, Mamba and GDN, fraction 0.5; M*G-; {MAMBA} {GDN}; M*|G-; 4; {CP2} {PP2} {RECOMPUTE}
PP 2 x CP 2, virtual stages, fraction 0.5; M*G-; {MAMBA} {GDN}; M|*|G|-; 4; {CP2} {PP2} {RECOMPUTE}
PP 2 x CP 2, virtual stages, MTP; *-*-/*-/*-; ; |*-|*-|/*-/*-; 4; {CP2} {PP2}
DP 2 x CP 2, distributed optimizer, overlap, Mamba, GDN and experts; M*GE; \
{MAMBA} {GDN} {EXPERTS}; ; 4; {CP2} {OVERLAP}
CP 4, Mamba, GDN and experts; M*GE; {MAMBA} {GDN} {EXPERTS}; ; 4; {CP4}
TP 2 x CP 2, sequence parallel, Mamba; M*-M*-; {MAMBA}; ; 4; {CP2} {TP2} --sequence-parallel
TP 2 x CP 2, sequence parallel, GDN and experts; G*EG*E; {EXPERTS} {GDN}; ; 4; \
{CP2} {TP2} --sequence-parallel
CP 2, segmented zigzag, Mamba; M*-; {MAMBA}; ; 2; {CP2} {SEGMENTED}
CP 4, segmented zigzag, Mamba, GDN, recompute; MG*-; {MAMBA} {GDN}; ; 4; \
{CP4} {SEGMENTED} {RECOMPUTE}
TP 2 x CP 2, sequence parallel, segmented zigzag, border of experts; G*EG; {EXPERTS} {GDN}; ; 4; \
{CP2} {TP2} --sequence-parallel {SEGMENTED}
PP 2 x CP 2, segmented zigzag, border between stages, fraction 0.5; M*G-; {MAMBA} {GDN}; M|*G-; 4; \
{CP2} {PP2} {SEGMENTED} {RECOMPUTE}
PP 2 x CP 2, segmented zigzag, borders inside stages, MLPs in chunks; M*-M; {MAMBA}; M*-|M; 4; \
{CP2} {PP2} {SEGMENTED} {BLOCKS} --mlp-chunks 2
CP 2, segmented zigzag, Mamba, MTP; M*-/G*M/G*M; {MAMBA} {GDN}; ; 2; {CP2} {SEGMENTED}
CP 2, documents, Mamba and GDN; M*G-; {STATES}; ; 2; {CP2}
CP 4, segmented zigzag, documents, Mamba and GDN; MG*-; {STATES}; ; 4; {CP4} {SEGMENTED}
TP 2 x CP 2, sequence parallel, balanced, documents; M*G-; {STATES}; ; 4; \
{CP2} {TP2} --sequence-parallel --burst-layout balanced
PP 2 x CP 2, balanced, documents, fraction 0.5; M*G-; {STATES}; M*G|-; 4; \
{CP2} {PP2} {RECOMPUTE} --burst-layout balanced
CP 2, documents, MTP; M*G-/M*-; {STATES}; ; 2; {CP2}
CP 2, contiguous, documents, Mamba and GDN; M*G-; {STATES}; ; 2; {CP2} {CONTIGUOUS}
CP 4, contiguous, Mamba, GDN and experts; M*GE; {MAMBA} {GDN} {EXPERTS}; ; 4; {CP4} {CONTIGUOUS}
CP 4, contiguous, documents, heads that do not divide; M*G-; {UNDIVIDED}; ; 4; {CP4} {CONTIGUOUS}
TP 2 x CP 2, sequence parallel, contiguous, documents, Mamba and GDN; M*G-; {STATES}; ; 4; \
{CP2} {TP2} --sequence-parallel {CONTIGUOUS}
PP 2 x CP 2, contiguous, documents, Mamba and GDN, fraction 0.5; M*G-; {STATES}; M*|G-; 4; \
{CP2} {PP2} {RECOMPUTE} {CONTIGUOUS}
CP 2, contiguous, documents, MTP; M*G-/*-; {STATES}; ; 2; {CP2} {CONTIGUOUS}
CP 2, Mamba by its other path; M*-; {MAMBA} --disable-mamba-mem-eff-path; ; 2; {CP2}
""")
FAST = {"PP 2 x CP 2, a stage without attention, fraction 0.5", "CP 2, documents, Mamba and GDN"}


@pytest.mark.parametrize("case", slow_if(CASES.keys() - FAST, CASES))
def test_losses_and_gradient_norms_equal_those_of_one_rank(
    tmp_path: Path, starts: Callable[..., Any], case: str
) -> None:
    pattern, model, stages, ranks, flags = CASES[case]
    alike = "model-parallel" not in flags  # then the seed makes the same weights on all ranks
    start, expected = starts(("--hybrid-layer-pattern", pattern, *model.split()), not alike)
    more = ["--hybrid-layer-pattern", stages] if stages else []
    if "fraction" in case:
        more += ["--recompute-attention-fraction", "0.5", "--burst-check", "reference"]
    if "MTP" in case:
        more += ["--save", str(tmp_path / "checkpoint")]
    found = train(tmp_path, ranks, *start, *flags.split(), *more)
    report_steps(case, found, expected)
    check_the_choice(found.text, pattern, f"{model} {flags}")
    assert "burst check" in found.text or "--burst-check" not in more


def check_the_choice(text: str, pattern: str, flags: str) -> None:
    """States are passed where they must be, or where the log says that they are fewer bytes."""
    passed = "states are passed, scanned by plain torch; " in text
    if {*"MG"}.isdisjoint(pattern) or "--burst-layout zigzag" in flags:
        assert not passed
    elif "inter-document" in flags or "--burst-layout" in flags:
        assert passed
    else:
        counted = re.findall(r"(Mamba|Delta)[^\n]*?([\d.e-]+) MiB in an all-to-all", text)
        sizes = {name[0].replace("D", "G"): float(size) for name, size in counted}
        sent = sum(sizes.get(kind, 0) for kind in pattern)
        said = re.search(r"([\d.e-]+) MiB by an all-to-all.* auto takes the (former|latter)", text)
        assert said is not None
        assert "pipeline" in flags or float(said[1]) == pytest.approx(sent, rel=0.01)
        assert passed == (said[2] == "former")
