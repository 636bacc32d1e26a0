"""The doctor's verdict is what the command line does, here and for a cluster. (fast tier)"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_burst.cpu_platform import platform as cpu_platform
from megatron_burst.kernels import KERNELS, Request
from megatron_burst.tools.doctor import machine, parsing
from megatron_burst.tools.doctor.attention import served
from megatron_burst.tools.doctor.command import main
from megatron_burst.tools.doctor.launch_line import OUR_ENTRY, LaunchLine, Target
from megatron_burst.tools.doctor.machine import parts
from tests.plugin.test_compat import fake_megatron, forget_megatron
from tests.processes import python
from tests.tools.conftest import Printed
from tests.training.launcher import MODEL

ROOT = Path(__file__).parents[3]
BURST = "--context-parallel-algo burst --calculate-per-token-loss --mock-data --bf16".split()
CLUSTER = ["--gpus-per-node", "8", "--nodes", "2", "--json"]
CP16 = ["--context-parallel-size", "16", "--global-batch-size", "4"]
LINE = [*MODEL, *BURST, *CP16]
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 8 -m megatron_burst.pretrain_gpt".split()

type Judged = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def judged(megatron: None, capsys: pytest.CaptureFixture[str]) -> Judged:
    """The status and the report of a command line, on a cluster of two nodes."""

    def of(*words: str) -> tuple[int, dict[str, Any]]:
        status = main([*CLUSTER, "--", *words])
        return status, json.loads(capsys.readouterr().out)

    return of


def of_level(report: dict[str, Any], level: str) -> list[str]:
    return [f["check"] for f in report["findings"] if f["level"] == level]


def texts(report: dict[str, Any], **which: str) -> list[str]:
    """Of the findings of a check, or a level."""
    return [f["text"] for f in report["findings"] if which.items() <= f.items()]


@pytest.mark.parametrize("pattern", ["", "--hybrid-layer-pattern *-*E --num-experts 4"])
def test_a_command_line_that_runs_on_a_cluster(judged: Judged, pattern: str) -> None:
    status, report = judged(*TORCHRUN, *LINE, *pattern.split())
    assert (status, report["verdict"]) == (0, "ok"), report["findings"]
    assert not of_level(report, "error") and not of_level(report, "wrong")
    assert "2 x 8 ranks, GPUs of compute capability 9.0" in report["target"]
    assert report["shape"] == "torch.bfloat16 on cuda, 4 query and 4 kv heads of 16 a rank"
    (taken,) = (kernel["kernel"] for kernel in report["kernels"] if kernel["is_taken"])
    assert taken == "cudnn"


def test_a_length_by_the_flag_of_encoders(judged: Judged) -> None:
    line = [word.replace("--seq-length", "--encoder-seq-length") for word in LINE]
    status, report = judged(*TORCHRUN, *line)
    assert status == 0 and report["kernels"], report["findings"]


def test_the_data_of_a_cluster_need_not_be_here(judged: Judged) -> None:
    burst = [flag for flag in BURST if flag != "--mock-data"]
    data = ["--data-path", "/not/here/corpus"]
    status, report = judged(*TORCHRUN, *MODEL, *burst, *CP16, *data)
    assert status == 0 and report["verdict"] == "ok", report["findings"]
    _, report = judged(*TORCHRUN, *MODEL, *burst, *CP16)
    assert any("no data is given" in text for text in texts(report))


def test_a_cluster_may_have_the_transformer_engine_that_is_not_here(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or is, and cannot be imported without a GPU."""
    monkeypatch.setattr("megatron.core.transformer.transformer_block.HAVE_TE", False)
    (tmp_path / "transformer_engine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    experts = ["--num-experts", "4", "--moe-permute-fusion"]
    words = ["python", "pretrain_gpt.py", *MODEL, *BURST[2:], *CP16, *experts]
    status, report = judged(*words)
    assert status == 0 and of_level(report, "note") == ["not-here"], report["findings"]
    _, report = judged(*words, "--reset-position-ids")
    assert "idle-positions" in of_level(report, "wrong"), "what comes later is found, too"
    _, report = judged(*words, "--multi-latent-attention", "--rope-type", "rope")
    assert any("only works with YARN" in text for text in texts(report, level="error"))


def test_a_model_that_a_checkpoint_describes(judged: Judged, tmp_path: Path) -> None:
    model = "--num-layers --hidden-size --num-attention-heads".split()
    others = [f for i, f in enumerate(LINE) if not {f, *LINE[max(i - 1, 0) : i]} & {*model}]
    words = [*others, "--use-checkpoint-args", "--load", str(tmp_path)]
    status, report = judged(*words)
    assert status == 0 and "checkpoint-args" in of_level(report, "note"), report["findings"]
    status, report = judged(*words, "--no-such-flag", "3")  # it is parsed all the same
    assert status == 1 and "validation" in of_level(report, "error")
    status, report = judged(*LINE, "--use-checkpoint-args", "--load", str(tmp_path))
    assert status == 0 and "checkpoint-args" not in of_level(report, "note"), report["findings"]
    assert report["shape"] == "torch.bfloat16 on cuda, 4 query and 4 kv heads of 16 a rank"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--no-such-flag 3", "unrecognized arguments: --no-such-flag 3"),
        ("--context-parallel-size 0", "size must be positive and finite, got 0"),
        ("--window-size 4,4", "window_size = (4, 4)"),
        ("--yaml-cfg=x.yaml", "the doctor does not read --yaml-cfg"),
        ("--hybrid-layer-pattern *-/D-", "D in the pattern *-/D-: DeepSeek"),
    ],
)
def test_one_that_does_not(judged: Judged, flags: str, text: str) -> None:
    status, report = judged(*LINE, *flags.split())
    assert (status, report["verdict"]) == (1, "the command line will not run")
    found = texts(report, check="validation", level="error")
    assert any(text in line for line in found), report["findings"]


EVERY_PART = {
    "--attention-dropout 0.1": "attention_dropout = 0.1: ",
    "--burst-head-parallel-size 3": "size 3 does not divide --context-parallel-size 5",
    "--context-parallel-size 5": "16 ranks do not divide over",
    "--seq-length 120": "divisible by 2 x 5 ranks = 10, got 128 tokens",
    "--lm-head-loss chunked --cross-entropy-loss-fusion": "cross_entropy_loss_fusion = True: ",
    "--mlp-chunks 2 --mlp-chunks-for-training 3": "mlp_chunks_for_training = 3: ",
    "--hidden-size 66": "hidden",  # Megatron's, behind its check of the number of ranks
    "--reset-position-ids": "nothing reads position ids",  # a silent error
}


def test_all_that_is_wrong_is_told_at_once(judged: Judged) -> None:
    flags = shlex.split(" ".join(EVERY_PART))
    status, report = judged(*LINE, *flags, "--seq-length", "128")
    found = texts(report, level="error") + texts(report, level="wrong")
    for flag, text in EVERY_PART.items():
        assert sum(text in each for each in found) == 1, flag
    assert status == 1 and not any("total_model_size" in text for text in found)


def test_an_older_gpu_needs_one_connection(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert judged(*LINE)[0] == 1
    command = ["CUDA_DEVICE_MAX_CONNECTIONS=1", "python", "-m", "megatron_burst.pretrain_gpt"]
    assert judged(*command, *LINE)[0] == 0
    for newer, status in (("--compute-capability 10.0", 0), ("--cluster b200", 0)):
        assert main([*CLUSTER, *newer.split(), "--", *LINE]) == status
    older = "--cluster b200 --compute-capability 9.0".split()
    assert main([*CLUSTER, *older, "--", *LINE]) == 1, "it counts before the name"


@pytest.mark.parametrize("name", ["HuggingFace", "GPT2BPE", "Null"])
def test_a_tokenizer_brings_its_vocabulary(judged: Judged, name: str) -> None:
    """A training reads it before the model is configured; NullTokenizer has none to read."""
    where = MODEL.index("--tokenizer-type")
    model = [*MODEL[:where], *MODEL[where + 6 :], "--tokenizer-type", f"{name}Tokenizer"]
    status, report = judged(*model, "--tokenizer-model", "/not/here", *BURST, *CP16)
    assert status == (name == "Null"), report["findings"]


@pytest.mark.parametrize("wrong", ["--burst-head-parallel-size 0", "--attention-backend fused"])
def test_what_is_refused_is_said_once(judged: Judged, wrong: str) -> None:
    _, report = judged(*LINE, *wrong.split())
    assert sum(wrong.split()[0] in text for text in texts(report)) == 1


def test_a_script_may_know_flags_of_its_own(judged: Judged) -> None:
    _, report = judged("python", "mine.py", *MODEL, *BURST[2:], *CP16, "--mine", "3")
    (text,) = texts(report, level="error")
    assert text == (
        "unrecognized arguments: --mine 3; if mine.py adds them to Megatron's parser, leave them "
        "out here"
    )


def test_strict_counts_what_is_silently_wrong(
    megatron: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--", *LINE, "--reset-position-ids"]
    assert main([*CLUSTER[:-1], *words]) == 0
    assert capsys.readouterr().out.endswith("\n\nok\n")
    assert main([*CLUSTER[:-1], "--strict", *words]) == 1
    said = capsys.readouterr().out
    assert "not as it was meant" in said and "idle-positions" in said


def test_torchrun_and_options_that_contradict(judged: Judged) -> None:
    torchrun = "torchrun --nproc-per-node 4 -m megatron_burst.pretrain_gpt".split()
    status, report = judged(*torchrun, *LINE)
    (text,) = texts(report, check="ranks")
    assert status == 1 and text.startswith("torchrun starts 1 x 4 ranks, the options say: for the")


@pytest.mark.slow
def test_on_this_machine_it_is_the_cpu_platform_that_judges() -> None:
    doctor = ["-m", "megatron_burst", "doctor", "--json", "--"]
    torchrun = ["torchrun", "--nproc-per-node", "2", "-m", "megatron_burst.pretrain_gpt"]
    words = [*MODEL, *BURST, "--context-parallel-size", "2", "--use-sharp"]
    ended = python(*doctor, *torchrun, *words, MEGATRON_BURST_CPU="1")
    report = json.loads(ended.stdout)
    assert ended.returncode == 1 and ended.stderr == ""
    assert report["target"] == "on this machine (cpu): 1 x 2 ranks"
    (error,) = texts(report, level="error")
    assert error.startswith("this cannot run on a CPU:") and "use_sharp = True" in error


def test_cpus_of_several_nodes_have_to_be_asked_for(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_platform, "cpu_platform_active", lambda: True)
    monkeypatch.delenv(cpu_platform.REQUEST, raising=False)
    line, target = LaunchLine(OUR_ENTRY, ("--no-such-flag",)), Target(2, 2)
    for environment, found in (
        ({}, "has no CUDA device"),
        ({cpu_platform.REQUEST: "1"}, "no-such"),
    ):
        (stopped,) = parsing.parse(replace(line, environment=environment), target).stops
        assert found in stopped


def test_without_a_command_it_says_what_is_here(printed: Printed) -> None:
    said = printed(["doctor", "--shape", "16,2,128", "--dtype", "float32"])
    for title in ("Installed", "Hardware", "Environment", "Kernels for torch.float32"):
        assert f"{title}" in said


WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None
from megatron_burst.tools.command import main
for words in ([], ["--shape", "16,2,128"]):
    print("status", main(["doctor", *words]))
"""


def test_an_environment_without_megatron_is_not_ok() -> None:
    """Attention alone needs none, so what serves a shape is answered all the same."""
    ran = python("-c", WITHOUT_MEGATRON)
    bare, shape, _ = ran.stdout.split("status ")
    assert "error    megatron: megatron-core is not installed: pip install 'megatron-core==" in bare
    assert bare.endswith("\n\nno training runs here\n") and shape.startswith("1\n")
    assert shape.endswith("\n\nok\n") and ran.stdout.endswith("status 0\n"), ran.stderr


@pytest.mark.parametrize("shape", ["16,2", "16,2,128,128,128", "16,two,128", "16,0,128"])
def test_a_shape_that_is_none_is_refused(printed: Printed, shape: str) -> None:
    assert "error: argument --shape: " in printed(["doctor", "--shape", shape], 2)


@pytest.mark.parametrize("flag", ["--compute-capability 8.0", "--cluster a100"])
def test_gpus_that_are_named_are_those_judged(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    main([*flag.split(), "--shape", "16,2,128", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["target"].endswith("GPUs of compute capability 8.0")
    assert " on cuda, " in report["shape"]


def test_a_shape_that_nothing_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus-per-node", "1", "--shape", "16,2,300"]) == 1
    assert "head size 300 is not a multiple of 8" in capsys.readouterr().out


def test_a_checkout_beside_the_script_is_the_megatron_that_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_megatron(tmp_path, 12)
    (tmp_path / "pretrain_gpt.py").write_text("import megatron_burst\n")
    forget_megatron(monkeypatch)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("megatron_burst.cpu_platform.platform.cpu_platform_wanted", lambda: False)
    assert main(["--", f"{tmp_path}/pretrain_gpt.py"]) == 1
    assert f"megatron-core 0.12.3 in {tmp_path}/megatron is not one that" in capsys.readouterr().out


def test_a_kernel_that_is_asked_for_is_the_one_judged(judged: Judged) -> None:
    for kernel, status in (("reference", 0), ("cpu", 1)):
        found, report = judged(*LINE, "--burst-kernel", kernel)
        assert found == status
        taken = [k["kernel"] for k in report["kernels"] if k["is_taken"]]
        assert taken == ([kernel] if status == 0 else [])
        said = texts(report, check="kernel")
        assert bool(said) == bool(status) and (report["verdict"] == "ok") != bool(said)
    assert said == ["--burst-kernel cpu cannot serve this attention: the tensors are on cuda"]


def test_the_parts_are_those_of_this_environment() -> None:
    versions = {part.name: part.version for part in parts()}
    assert versions["torch"] == torch.__version__
    assert {"megatron-core", "transformer-engine", "apex", "NCCL", "flash-attn"} <= set(versions)


def test_a_version_of_nccl_that_nobody_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    unread = "what our messages rely on was read in 2.27 to 2.30 alone"
    for version in ((2, 26, 5), (2, 27, 3), (2, 30, 7), (2, 31), (3, 28)):
        monkeypatch.setattr(machine, "loaded", lambda version=version: version)
        (nccl,) = (part for part in parts() if part.name == "NCCL")
        assert nccl.version == ".".join(map(str, version))
        is_read = version in ((2, 27, 3), (2, 30, 7))
        assert nccl.use == ("messages between GPUs" if is_read else unread)


def test_kernels_answer_for_gpus_that_are_not_here() -> None:
    request = Request(torch.device("cuda"), torch.bfloat16, 8, 2, 128, 128)
    for capability, older in (((7, 0), True), ((9, 0), False)):
        with Target(1, 1, capability).pretended():
            found = {s.kernel: s for s in served(request)}
            assert torch.cuda.get_device_name(0), "which Megatron's main asks for when imported"
        assert list(found) == list(KERNELS)
        assert any("older than 8.0" in r for r in found["aten_flash"].reasons) == older
