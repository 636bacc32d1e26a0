"""Models that a script builds by itself have what flags ask for, or no step is taken. (fast)"""

from pathlib import Path

import pytest

from megatron_burst.tools.runlog import read_scalars
from tests.training.launcher import BURST, outcome, run_module, train

SCRIPT = "tests.training.own_provider"
ALL = (
    "--mock-data --calculate-per-token-loss --context-parallel-size 2 --mtp-num-layers 1 "
    "--dataloader-inter-document-masking --burst-layout balanced --lm-head-loss chunked "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--recompute-attention-fraction 0.5 --untie-embeddings-and-output-weights"
).split()


def test_a_model_provider_has_all_that_is_asked_for(tmp_path: Path) -> None:
    flags = (*BURST, *ALL)
    expected = train(tmp_path / "ours", 2, *flags)
    directory = tmp_path / "theirs" / "tensorboard"
    text = run_module(SCRIPT, tmp_path / "theirs", 2, *flags, "--tensorboard-dir", str(directory))
    scalars = read_scalars(directory)
    assert dict(scalars["lm loss"]) == expected.losses
    assert dict(scalars["grad-norm"]) == expected.grad_norms
    for said in ("burst attention: burst on 2 ranks (balanced", "chunked LM head loss: "):
        assert said in text


@pytest.mark.parametrize(
    ("build", "flags", "reason"),
    [
        (
            "config",
            (*BURST, "--lm-head-loss", "chunked"),
            "--context-parallel-algo burst and --lm-head-loss chunked: the model was built, and "
            "nothing of ours is in it: build a GPTModel or HybridModel by ",
        ),
        ("bert", BURST, "the BertModel that was built has DotProductAttention for its attention"),
        ("bert", ("--lm-head-loss", "chunked"), "needs a GPTModel or HybridModel, not a BertModel"),
    ],
)
def test_no_step_is_taken_without_what_is_asked_for(
    tmp_path: Path, build: str, flags: tuple[str, ...], reason: str
) -> None:
    words = ("--mock-data", "--build", build, *flags)
    status, text = outcome(SCRIPT, tmp_path, 1, *words)
    assert status == "1" and reason in text and "iteration        1/" not in text


def test_without_our_parts_a_script_builds_what_it_wants(tmp_path: Path) -> None:
    """Our entry, or a check of files, is no wish for another model."""
    words = ("--mock-data", "--build", "gpt", "--burst-check-files", "on")
    text = run_module(SCRIPT, tmp_path, 1, *words)
    assert "iteration        1/" in text and "burst attention" not in text
