"""Steps with windows, documents and block masks, in every layout, equal one rank. (fast tier)

The loss mask hides some tokens of the documents, so that a loss in the wrong place counts.
"""

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from tests.training.launcher import (
    BURST,
    STEPS,
    Log,
    allowed,
    largest_difference,
    report_steps,
    run_module,
    table,
    train,
)

PER_TOKEN = "--calculate-per-token-loss"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
MLA = (
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm --rope-type"
)
PP2 = "--pipeline-model-parallel-size 2"
SEGMENTED = "--burst-layout segmented-zigzag"
BALANCED = "--burst-layout balanced"
WINDOW = "--window-size 15,0 --window-attn-skip-freq 2"
DOCUMENTS = "--dataloader-inter-document-masking --eod-mask-loss"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STATES = (
    "--burst-layout contiguous --hybrid-layer-pattern M*G- --mamba-state-dim 16 --swiglu "
    "--mamba-head-dim 16 --mamba-num-groups 2 --mamba-num-heads 6 --linear-key-head-dim 16 "
    "--linear-value-head-dim 8 --linear-num-key-heads 3 --linear-num-value-heads 6"
)
INTERLEAVED = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def block_mask(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Half of 16 x 16 blocks; every block sees itself."""
    table = numpy.random.default_rng(0).random((16, 16)) < 0.5
    file = tmp_path_factory.mktemp("mask") / "blocks.npy"
    numpy.save(file, table | numpy.eye(16, dtype=bool))
    return f"--burst-block-mask {file}"


@pytest.fixture(scope="module")
def packed_runs(
    once: Callable[..., Log],
    data: tuple[str, ...],
    start: tuple[str, ...],
    short_documents: tuple[str, ...],
) -> Callable[..., Log]:
    """Train on many short documents from the common start; equal calls share one run."""
    common = (*short_documents, *start[len(data) :], *BURST, PER_TOKEN)
    module = "tests.training.no_rows_move"  # in no layout: batches are cut by it
    return lambda ranks, flags: once(ranks, *common, *flags.split(), module=module)


def differs(found: Log, other: Log) -> bool:
    """Whether they differ by far more than what is allowed where they are to be equal."""
    return largest_difference(found, other, STEPS) > 100 * allowed(1e-4)


@slow
def test_windows_on_alternate_layers(
    tmp_path: Path, runs: Callable[..., Log], start: tuple[str, ...]
) -> None:
    """Also equal to Megatron's own attention, which has windows on one rank."""
    stock = train(tmp_path, 1, *start, PER_TOKEN, *WINDOW.split())
    one = runs(1, PER_TOKEN, *WINDOW.split())
    two = runs(2, PER_TOKEN, *WINDOW.split(), *CP2.split())
    report_steps("window, Megatron's", one, stock)
    report_steps("window, CP 2", two, one)
    assert differs(one, runs(1, PER_TOKEN)), "the window has no effect"


DOCUMENT_CASES = {"CP 2, balanced": (2, f"{CP2} {BALANCED}")}
MORE_DOCUMENT_CASES = table(f"""\
CP 2; 2; {CP2}
CP 2 x TP 2, segmented; 4; {CP2} {TP2} {SEGMENTED}
PP 4; 4; {PP2.replace("2", "4")}
CP 2 x interleaved PP 2, full recompute, segmented; 4; {CP2} {INTERLEAVED} {RECOMPUTE} {SEGMENTED}
CP 2, chunked loss, segmented; 2; {CP2} {SEGMENTED} --lm-head-loss chunked
CP 4 on two nodes, balanced; 4; {CP4} --burst-ranks-per-node 2 {BALANCED}
TP 2 x CP 2, balanced; 4; {CP2} {TP2} {BALANCED}
CP 2 x interleaved PP 2, fraction 0.5, balanced; 4; \
{CP2} {INTERLEAVED} {RECOMPUTE} --recompute-attention-fraction 0.5 {BALANCED}
CP 4 on two nodes, heads over 2, balanced; 4; \
{CP4} --burst-ranks-per-node 2 --burst-head-parallel-size 2 {BALANCED}
CP 2, chunked loss, balanced; 2; {CP2} {BALANCED} --lm-head-loss chunked
""")


@pytest.mark.parametrize(
    "case", [*DOCUMENT_CASES, *(pytest.param(case, marks=slow) for case in MORE_DOCUMENT_CASES)]
)
def test_steps_on_documents_equal_one_rank(packed_runs: Callable[..., Log], case: str) -> None:
    ranks, flags = (DOCUMENT_CASES | MORE_DOCUMENT_CASES)[case]
    one, found = packed_runs(1, DOCUMENTS), packed_runs(ranks, f"{DOCUMENTS} {flags}")
    report_steps(f"documents, {case}", found, one)
    assert ("tokens in documents are balanced over" in found.text) == ("balanced" in case)


def test_an_iteration_is_skipped(packed_runs: Callable[..., Log]) -> None:
    """Megatron cuts its batches, too, as if each document were in a zigzag of its own."""
    flags = f"{DOCUMENTS} --train-iters 2 --iterations-to-skip 1"
    found, one = packed_runs(2, f"{flags} {CP2}"), packed_runs(1, flags)
    assert found.losses.keys() == {2}
    report_steps("an iteration is skipped", found, one, steps=range(2, 3))


@slow
def test_documents_have_an_effect(packed_runs: Callable[..., Log]) -> None:
    assert differs(packed_runs(1, DOCUMENTS), packed_runs(1, "--eod-mask-loss"))


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --lr 1e-4 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1"
)
LEARNED = "--position-embedding-type learned_absolute"


@slow
@pytest.mark.parametrize(
    ("model", "layout"), [(EXPERTS, ""), (EXPERTS, BALANCED), (LEARNED, SEGMENTED)]
)
def test_other_models_equal_one_rank(
    tmp_path: Path, short_documents: tuple[str, ...], model: str, layout: str
) -> None:
    """Experts with a loss of their own; positions that are learned."""
    common = (*short_documents, *BURST, PER_TOKEN, *DOCUMENTS.split(), *model.split())
    one = train(tmp_path / "1", 1, *common)
    two = train(tmp_path / "2", 2, *common, *CP2.split(), *layout.split())
    report_steps(f"{model} {layout}", two, one)


@slow
def test_steps_under_a_block_mask_equal_one_rank(runs: Callable[..., Log], block_mask: str) -> None:
    one = runs(1, PER_TOKEN, *block_mask.split())
    two = runs(2, PER_TOKEN, *block_mask.split(), *CP2.split())
    report_steps("block mask", two, one)
    assert differs(one, runs(1, PER_TOKEN)), "the block mask has no effect"


@slow
@pytest.mark.parametrize(
    ("masks", "ranks", "flags"),
    [
        ("--eod-mask-loss", 2, f"{CP2} {SEGMENTED}"),
        (f"--eod-mask-loss {WINDOW} BLOCKS", 2, f"{CP2} {SEGMENTED}"),
        (f"{DOCUMENTS} {WINDOW} BLOCKS", 4, f"{CP2} {PP2} {SEGMENTED}"),
    ],
)
def test_segmented_zigzag_and_everything_at_once(
    packed_runs: Callable[..., Log], block_mask: str, masks: str, ranks: int, flags: str
) -> None:
    masks = masks.replace("BLOCKS", block_mask)
    one, found = packed_runs(1, masks), packed_runs(ranks, f"{masks} {flags}")
    report_steps(f"{masks} {flags}", found, one)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, f"{CP2} {SEGMENTED}"),
        pytest.param(1, "", marks=slow),
        pytest.param(2, f"{CP2} {BALANCED}", marks=slow),
        pytest.param(2, CP2, marks=slow),
        pytest.param(4, CP4, marks=slow),
        pytest.param(2, f"{CP2} {MLA} rope", marks=slow),
        pytest.param(2, f"{CP2} {SEGMENTED} {MLA} yarn", marks=slow),
        pytest.param(4, f"{CP2} {TP2} {SEGMENTED} {MLA} rope", marks=slow),
        pytest.param(4, f"{CP2} {TP2} {BALANCED} {MLA} rope", marks=slow),
        pytest.param(2, f"{CP2} {SEGMENTED} --position-embedding-type yarn", marks=slow),
        (2, f"{CP2} {STATES}"),
        pytest.param(4, f"{CP4} {STATES}", marks=slow),
    ],
)
def test_documents_do_not_see_each_other_axolotl_3608(
    tmp_path: Path, ranks: int, flags: str
) -> None:
    """Losses of a document are those that it has alone, whatever its neighbours hold.

    Documents of one token, and half of a chunk, do not make gradients huge, as padded ones did in
    TransformerEngine#2186.
    """
    common = (*BURST, "--mock-data", "--dataloader-inter-document-masking", *flags.split())
    text = run_module("tests.training.losses_of_documents", tmp_path, ranks, *common)
    words = (line.split() for line in text.splitlines())
    found = {name: float(value) for name, value in (w for w in words if len(w) == 2) if _is(name)}
    print(found)
    assert found["leak"] == 0.0
    assert found["effect"] > 1e-4
    assert found["alone"] < 1e-5
    assert found["together"] > 1e-6
    assert found["gradient"] < 100
    assert found["logits"] < 1e-5


def _is(name: str) -> bool:
    return name in ("leak", "effect", "alone", "together", "gradient", "logits")
