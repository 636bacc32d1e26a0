"""Every known silent error is found where it is, and not in a clean command line. (fast tier)"""

import argparse
import re
import shlex
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

from megatron_burst.tools import hardware
from megatron_burst.tools.doctor import checks, memory
from megatron_burst.tools.doctor.launch_line import OUR_ENTRY, LaunchLine, Target
from megatron_burst.tools.doctor.parsing import Parsed
from megatron_burst.tools.doctor.report import Finding, Level
from megatron_burst.tools.flags import DOCUMENTS, arguments
from megatron_burst.tools.plan.configs import Configs

megatron_arguments = pytest.importorskip("megatron.training.arguments")
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: E402

from megatron_burst.plugin.arguments import (  # noqa: E402
    add_burst_arguments,
    set_default_dropouts,
)
from megatron_burst.plugin.settings import burst_config_from_args  # noqa: E402

ROOT = Path(__file__).parents[3]
CLEAN = """
    --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 65536
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
    --global-batch-size 8 --train-iters 10 --eval-interval 10 --bf16 --mock-data
    --context-parallel-size 8 --calculate-per-token-loss --no-create-attention-mask-in-dataloader
"""
OURS = "--context-parallel-algo burst"
LEARNED = "--position-embedding-type learned_absolute"
CHUNKS = "--mlp-chunks-for-training 4"
CLUSTER = Target(2, 8, (9, 0))
HERE = Target(2, 8)
W, E, X, N = Level.WARNING, Level.ERROR, Level.WRONG, Level.NOTE


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    return add_burst_arguments(megatron_arguments.add_megatron_arguments(made))


def parsed(parser: argparse.ArgumentParser, words: list[str]) -> Parsed:
    args = parser.parse_args(words)
    set_default_dropouts(args)
    return Parsed(args, burst_config_from_args(args))


def look(
    parser: argparse.ArgumentParser, flags: str, attached: bool = True, drop: str = ""
) -> dict[str, Level]:
    words = shlex.split(CLEAN.replace(drop, "") + flags)
    line = LaunchLine(OUR_ENTRY if attached else "pretrain_gpt.py", tuple(words), attached)
    target = HERE if "--load" in flags else CLUSTER
    found = checks.findings(line, target, parsed(parser, words))
    return {finding.check: finding.level for finding in found}


def test_a_clean_command_line_has_no_findings(parser: argparse.ArgumentParser) -> None:
    assert look(parser, OURS) == look(parser, OURS, drop="--hidden-dropout 0") == {}
    assert look(parser, "") == {}, "of Megatron's own attention"
    assert look(parser, f"{OURS} {DOCUMENTS} --eod-mask-loss") == {}


OF_THE_JOB = {
    "ranks",
    "no-script",
    "validation",
    "checkpoint-args",
    "not-here",
    "slow-links",
    "stalls-unseen",
}
CASES = [
    ("mean-of-means", W, OURS, "--calculate-per-token-loss"),
    ("mean-of-means", X, f"{OURS} --eod-mask-loss", "--calculate-per-token-loss"),
    ("repeated-dropout", W, f"{OURS} --hidden-dropout 0.1", ""),
    ("repeated-dropout", W, "", "--hidden-dropout 0"),
    ("sink-norm", X, "--softmax-type learnable --tensor-model-parallel-size 2", ""),
    ("joined-documents", N, f"{OURS} --data-path x", "--mock-data"),
    ("joined-documents", W, f"{OURS} --data-path x --eod-mask-loss", "--mock-data"),
    ("idle-positions", X, f"{OURS} --reset-position-ids", ""),
    ("idle-positions", X, f"{OURS} --reset-position-ids {LEARNED}", ""),
    ("idle-positions", N, f"{OURS} --reset-position-ids {DOCUMENTS}", ""),
    ("idle-positions", E, f"{OURS} --reset-position-ids --sft", ""),
    ("stock-documents", X, DOCUMENTS, ""),
    ("stock-documents", E, f"{DOCUMENTS} --transformer-impl local", ""),
    ("blocks-of-samples", W, f"{OURS} {DOCUMENTS} --burst-block-mask blocks.npy", ""),
    ("dense-mask", W, "", "--no-create-attention-mask-in-dataloader"),
    ("idle-mask", X, "--reset-attention-mask --transformer-impl transformer_engine", ""),
    ("idle-window", X, f"{OURS} --window-attn-skip-freq 4", ""),
    ("window-width", N, f"{OURS} --window-size 511,0", ""),
    ("te-features", E, "--window-size 511,0", ""),
    ("te-features", E, "--softmax-type off-by-one", ""),
    ("te-features", E, f"{DOCUMENTS} --cp-comm-type all_gather", ""),
    ("megatrons-chunks", W, f"--recompute-granularity full {CHUNKS}", ""),
    ("megatrons-chunks", None, CHUNKS, ""),
    ("divisibility", E, "--group-query-attention --num-query-groups 5", ""),
    ("divisibility", E, "--group-query-attention --num-query-groups 4 --cp-comm-type a2a", ""),
    ("divisibility", None, "--group-query-attention --num-query-groups 8 --cp-comm-type a2a", ""),
    ("divisibility", E, "--sequence-parallel --tensor-model-parallel-size 5", ""),
    ("divisibility", E, "--num-experts 32 --expert-model-parallel-size 32", ""),
    ("divisibility", None, "--num-experts 16 --expert-model-parallel-size 16", ""),
    ("no-length", E, OURS, "--train-iters 10"),
    ("no-length", E, OURS, "--eval-interval 10"),
    ("lost-checkpoint", W, f"{OURS} --load nowhere", ""),
]


@pytest.mark.parametrize(("name", "level", "flags", "drop"), CASES)
def test_each_is_found(
    parser: argparse.ArgumentParser, name: str, level: Level | None, flags: str, drop: str
) -> None:
    assert look(parser, f" {flags}", drop=drop).get(name) == level


def test_a_script_without_us_and_a_spec_that_is_not_there(parser: argparse.ArgumentParser) -> None:
    assert look(parser, OURS, attached=False)["not-attached"] == E
    assert look(parser, "--cp-comm-type burst", attached=False)["not-attached"] == E
    for other in ("no_such_module spec", "no_such_module.inside spec"):
        assert look(parser, f"--spec {other}", attached=False)["lost-spec"] == X
    assert "lost-spec" not in look(parser, "--spec json loads", attached=False)


def test_a_script_that_is_not_there(parser: argparse.ArgumentParser) -> None:
    line, args = LaunchLine("no/pretrain_gpt.py", ()), parsed(parser, shlex.split(CLEAN))
    assert "no-script" in {f.check for f in checks.findings(line, HERE, args)}
    assert "no-script" not in {f.check for f in checks.findings(line, CLUSTER, args)}, "not here"


def write(prefix: Path, lengths: list[int], last: list[int]) -> Path:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length, token in zip(lengths, last, strict=True):
        tokens = numpy.full(length, token, numpy.uint16)
        builder.add_document(tokens, [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_documents_without_end_tokens(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [3, 5, 8], [256, 256, 7])
    flags = f"{OURS} {DOCUMENTS} --data-path {prefix}"
    assert look(parser, f"{flags} --eod-mask-loss", drop="--mock-data").get("no-end-tokens") == X
    assert "no-end-tokens" not in look(parser, flags, drop="--mock-data"), "masks need none"
    prefix = write(tmp_path / "data", [3, 5, 8], [256] * 3)
    assert "no-end-tokens" not in look(parser, f"{flags} --eod-mask-loss", drop="--mock-data")


def test_every_check_has_a_case_and_stands_in_the_documentation() -> None:
    source = "".join(Path(module.__file__).read_text() for module in (checks, memory))
    names = set(re.findall(r'Finding\("([\w-]+)"', source)) - OF_THE_JOB
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert len(set(rows)) == len(rows) and set(rows) == names
    others = {"memory", "timeout", "not-attached", "lost-spec", "no-end-tokens"}
    assert names - {case[0] for case in CASES} == others


def test_variables_that_harm() -> None:
    bad = {"NCCL_P2P_DISABLE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "HOME": "x"}
    assert [f.check for f in checks.variable_findings(bad)] == ["slow-links", "stalls-unseen"]
    assert not [*checks.variable_findings({"NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "INFO"})]
    assert list(hardware.settings(bad)) == ["NCCL_P2P_DISABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"]


def memory_of(
    model: str, *, minutes: int = 10, cluster: str | None = "h100", **more: object
) -> list[Finding]:
    """Of a model on 64 GPUs, with 128k tokens over 8 context-parallel ranks, and more flags."""
    configs, args = Configs.read(), argparse.Namespace(distributed_timeout_minutes=minutes)
    flags = configs.flags_of("_long") | configs.model(model)
    flags |= {"seq-length": 131072, "context-parallel-size": 8}
    flags |= {name.replace("_", "-"): value for name, value in more.items()}
    return [*memory.findings(args, arguments(flags), Target(8, 8, (9, 0)), cluster)]


def test_a_first_step_that_outlasts_the_time_limit() -> None:
    """128 sequences of 128k tokens, of which each takes 5 seconds of 64 H100."""
    found = partial(memory_of, "70b", tensor_model_parallel_size=8, sequence_parallel=True)
    (one,) = found(global_batch_size=128)
    assert one.check == "timeout" and one.remedy.startswith("--distributed-timeout-minutes")
    assert not found(global_batch_size=128, minutes=int(one.remedy.split()[1]))
    assert not found(), "then one: these GPUs are one data-parallel rank"


def test_memory_of_documents_and_of_megatrons_own_attention_is_judged() -> None:
    """An 8B model without recompute, for which no saving is enough, and full recompute is."""
    found = partial(memory_of, "llama3_8b", global_batch_size=64)
    for more in (
        {},
        {"dataloader_inter_document_masking": True},
        {"context_parallel_algo": "megatron", "cp_comm_type": "a2a"},
        {"context_parallel_algo": "burst"},
    ):
        assert not found(**more)
        (one,) = found(**more, recompute_granularity=False)
        assert one.level is Level.WARNING and one.remedy.startswith("--recompute-granularity full")
        assert "that may be counted on h100" in one.text and "nor with" not in one.text
        assert ("one document" in one.text) == ("dataloader_inter_document_masking" in more)
    fused = {"lm_head_loss": False, "lm_head_memory_mb": False, "cross_entropy_loss_fusion": True}
    (one,) = found(**fused, seq_length=2**19)
    assert one.remedy.startswith("--lm-head-loss chunked")
    assert one.remedy.endswith(", without --cross-entropy-loss-fusion")
    (one,) = found(seq_length=2**25, max_position_embeddings=2**25)
    assert one.text.endswith(", nor with all savings") and one.remedy.startswith("more GPUs, or")


def test_the_gpus_here_are_those_of_their_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GB200")
    (one,) = memory_of("llama3_8b", seq_length=2**25, global_batch_size=64, cluster=None)
    assert "that may be counted on gb200" in one.text
