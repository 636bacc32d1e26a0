"""The verb compare: what is compared, why something is not, resuming, MFU, the page. (fast tier)

One toy of real trainings in the slow tier.
"""

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from megatron_burst.tools import command as tool
from megatron_burst.tools import pages
from megatron_burst.tools.arguments.compare import parser
from megatron_burst.tools.compare import command as compare
from megatron_burst.tools.compare import page, running
from megatron_burst.tools.compare.results import Result, differences, measure
from megatron_burst.tools.compare.variants import Job, Variant, choose, variants
from megatron_burst.tools.flags import DOCUMENTS, Heads
from megatron_burst.tools.launch.processes import Signals
from megatron_burst.tools.runlog import read_scalars
from megatron_burst.transport import lock
from tests.tools.conftest import Printed
from tests.training.launcher import run_job

FLAGS = ("--seq-length", "64", "--num-attention-heads", "4", "--global-batch-size", "2")
COMPARABLE = compare._COMPARABLE
REFERENCE = variants(Job(ranks=4, context=4))[0]


def heads(number: int) -> Heads:
    return Heads(number, number, 8, 8)


def why_not(job: Job) -> dict[str, str]:
    return {variant.name: variant.why_not for variant in variants(job)}


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_BURST_CPU", "1")  # a machine's GPUs may be too few
    monkeypatch.setattr(compare, "Signals", lambda: None)  # those of the tests stay


# What is compared


def test_on_two_nodes_of_two_all_of_ours_can_run() -> None:
    found = why_not(
        Job(ranks=4, context=4, heads=heads(4), ranks_per_node=2, without_megatrons="TE")
    )
    assert {name for name, reason in found.items() if not reason} == {
        *("CP=1 megatron", "CP=1 burst", "burst", "ring flat", "ring double", "allgather"),
        *("burst kv flat", "burst kv double", "burst query flat", "burst query double"),
        *("ulysses", "burst heads 2", "ring heads 2"),
    }
    assert {reason for reason in found.values() if reason} == {"TE"}
    assert len([name for name in found if name.startswith("megatron ")]) == 4 * 2


@pytest.mark.parametrize(
    ("job", "name", "reason"),
    [
        (Job(ranks=4, context=4), "ring double", "all context-parallel ranks are on one node"),
        (Job(ranks=4, context=4, ranks_per_node=1), "ring double", "holds one"),
        (Job(ranks=6, context=6, ranks_per_node=4), "burst kv double", "unequal numbers"),
        (Job(ranks=4, context=4, heads=heads(6)), "ulysses", "6 query and 6 kv heads of a rank"),
        (Job(ranks=4, context=4, heads=heads(6)), "megatron a2a flash", "do not divide by 4"),
        (Job(ranks=8, tensor=2, context=4, heads=heads(4)), "ulysses", "2 query and 2 kv heads"),
        (Job(ranks=6, context=6, ranks_per_node=4), "burst heads 4", "the nodes hold 4, 2"),
    ],
)
def test_what_cannot_run_says_why(job: Job, name: str, reason: str) -> None:
    assert reason in why_not(job)[name]


def test_documents_are_told_apart_by_each_in_its_way() -> None:
    def found(**more: Any) -> dict[str, Variant]:
        job = Job(ranks=4, context=4, has_documents=True, **more)
        return {variant.name: variant for variant in variants(job)}

    on_gpus, here = found(), found(without_megatrons="no GPU")
    assert DOCUMENTS in on_gpus["CP=1 megatron"].flags
    assert "--reset-attention-mask" in here["CP=1 megatron"].flags
    assert {name for name, v in here.items() if DOCUMENTS not in v.flags} == {"CP=1 megatron"}
    for name in (name for name in here if name.startswith("megatron ")):
        assert "MC#6156" in on_gpus[name].why_not, "not even where TransformerEngine is"
    assert not on_gpus["CP=1 megatron"].why_not + here["CP=1 megatron"].why_not
    assert on_gpus["burst balanced"].flags[-2:] == ("--burst-layout", "balanced")
    assert "burst balanced" not in why_not(Job(ranks=4, context=4))
    windows = found(without_megatrons="no GPU", has_windows=True)
    assert "windows" in windows["CP=1 megatron"].why_not and not windows["burst"].why_not


def test_megatrons_hierarchy_is_that_of_the_nodes() -> None:
    def sizes(job: Job) -> tuple[str, ...]:
        (found,) = [v for v in variants(job) if v.name == "megatron a2a+p2p fused"]
        assert found.flags[-3] == "--hierarchical-context-parallel-sizes"
        return found.flags[-2:]

    assert sizes(Job(ranks=16, context=16, ranks_per_node=8)) == ("8", "2")
    assert sizes(Job(ranks=8, context=8)) == ("4", "2"), "on one node half of it"
    ranks = {v.name: v.ranks for v in variants(Job(ranks=8, tensor=2, context=4))}
    assert ranks["CP=1 megatron"] == ranks["CP=1 burst"] == 2 and ranks["burst"] == 8


def test_patterns_choose_and_the_rest_is_listed() -> None:
    every = variants(Job(ranks=4, context=4))
    chosen = {v.name: v.why_not for v in choose(every, ["burst", "CP=1*"])}
    assert [name for name, reason in chosen.items() if not reason] == [
        "CP=1 megatron",
        "CP=1 burst",
        "burst",
    ]
    assert chosen["allgather"] == "left out by --variants"
    with pytest.raises(ValueError, match="'brust' matches none of 'CP=1 megatron'"):
        choose(every, ["brust"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4", "--", "--cp-comm-type", "p2p"], "--cp-comm-type: the comparison sets it"),
        (["--ranks", "4", "--", "--save=x"], "--save: the comparison sets it"),
        (["--ranks", "4", "--", "--yaml-cfg=x.yaml"], "--yaml-cfg is not read here"),
        (["--ranks", "6", "--", "--context-parallel-size", "4"], "6 ranks do not divide"),
        (["--ranks", "4", "--variants", "nothing"], "matches none"),
        (["--ranks", "4", "--", "--burst-bakward", "kv"], "the nearest is --burst-backward"),
        (["--ranks", "4", "--", "--train-iters", "3"], "--train-iters 3: steps 2 and 3 are"),
        (["--toy", "--run", "toy"], "--toy and --run have a model each"),
        (["--ranks", "4", "--input", "text"], "--input is text for --toy"),
        (["--toy", "--tolerance", "-1"], "--tolerance -1.0 is negative"),
        (["--ranks", "4", "--gpt", "--", *FLAGS], "--gpt is for the model of --toy or --run"),
        (["--ranks", "4", "--variants", "megatron p2p*", "--", *FLAGS], "no variant can run here"),
        (["--run", "toy", "--", "--num-layers", "4"], "a HybridModel has --hybrid-layer-pattern"),
    ],
)
def test_wrong_input_is_refused(
    printed: Printed, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in printed(["compare", "--output", str(tmp_path), *arguments], 1)


def test_a_named_run_brings_its_flags_and_ranks(tmp_path: Path, printed: Printed) -> None:
    words = f"compare --run toy --variants burst --output {tmp_path} --dry-run"
    shown = printed(f"{words} -- --train-iters 5")
    (command,) = (line for line in shown.splitlines() if "pretrain" in line)
    assert "--nproc-per-node 4 " in command and "--seq-length 2048 " in command
    assert "--hybrid-layer-pattern '*-*-'" in command and "--num-layers" not in command
    assert command.count("--context-parallel-algo") == 1 and "--train-iters 5 " in command


def test_a_dry_run_of_the_toy_writes_nothing(tmp_path: Path, printed: Printed) -> None:
    words = f"compare --toy --input {__file__} --output {tmp_path}/out --dry-run"
    assert f"--data-path {tmp_path}/out/corpus/" in printed(words)
    assert not list(tmp_path.iterdir())


def test_flags_of_documents_are_those_of_the_variants(tmp_path: Path, printed: Printed) -> None:
    words = f"compare --ranks 4 --variants CP=1*,burst --output {tmp_path} --dry-run --".split()
    dense = "--no-create-attention-mask-in-dataloader"
    said = printed([*words, *FLAGS, DOCUMENTS, dense]).splitlines()
    megatrons, *ours = (line for line in said if "pretrain" in line)
    assert DOCUMENTS not in megatrons and dense not in megatrons, "it needs the dense mask"
    assert [line.count(DOCUMENTS) for line in ours] == [1, 1]


# Running, with trainings that only write what trainings write


def pretend(directory: Path, factor: float, steps: int = 12) -> None:
    with SummaryWriter(str(directory)) as writer:
        for name, value in {
            **{"seq_length": 64, "global_batch_size": 2, "hidden_size": 8, "ffn_hidden_size": 32},
            **{"kv_channels": 2, "num_layers": 2, "padded_vocab_size": 64},
            **{"num_attention_heads": 4, "world_size": 4},
        }.items():
            writer.add_text(name, str(value), 0)
        for step in range(1, steps + 1):
            writer.add_scalar("lm loss", factor * (1 + 5 / step), step)
            writer.add_scalar("iteration-time", 9.0 if step <= 5 else 0.5, step)
        writer.add_scalar("burst/peak-memory-bytes", 3 * 2**30, 12)
        writer.add_scalar("burst/bytes-sent-per-rank", 5 * 2**20, 12)
        writer.add_scalar("burst/documents", 7.25, 12)
        writer.add_scalar("burst/imbalance", 1.5, 12)


class Trainings:
    """Stands in for the start of a training; keeps what was started."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stop_at: str | None = None
        self.off_by: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.steps = 12

    def __call__(self, command: Sequence[str], log: Path, signals: None) -> int:
        name = log.parent.name
        if name == self.stop_at:
            raise KeyboardInterrupt
        self.started.append(name)
        if name in self.refused:
            log.write_text(self.refused[name])
            return 1
        pretend(log.parent / "tensorboard", self.off_by.get(name, 1.0), self.steps)
        return 0


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    monkeypatch.setattr(running, "_train", found := Trainings())
    return found


def run(output: Path, *more: str) -> int:
    options = ["--ranks", "4", "--gpus-per-node", "2", "--output", str(output), *more]
    return compare.main([*options, "--variants", "CP=1*,burst,ring flat", "--", *FLAGS])


def test_a_comparison_goes_on_where_it_stopped(
    trainings: Trainings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainings.stop_at = "ring-flat"
    assert run(tmp_path) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert trainings.started == ["cp-1-megatron", "cp-1-burst", "burst"]
    trainings.stop_at = None
    assert run(tmp_path) == 0
    assert trainings.started[3:] == ["ring-flat"]
    assert "[3/4] burst (finished before): loss 1.4167, 0.500 s a step" in capsys.readouterr().out
    burst, reference = variants(Job(ranks=4, context=4, ranks_per_node=2))[10], REFERENCE
    flags = [*COMPARABLE, *FLAGS]
    same, other = (
        running.Series(directory=tmp_path, flags=flags, ranks=4, traced=traced)
        for traced in (True, False)
    )
    assert [series.is_finished(burst) for series in (same, other)] == [True, False]
    mark = same.folder(burst) / running._MARK
    whole = mark.read_text()
    mark.write_text(whole[:20])  # its writing was ended
    assert not same.is_finished(burst)
    mark.write_text(whole)
    assert other.is_finished(reference), "Megatron's own is not traced: its command is the same"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # which a scheduler sets, of each start another
    monkeypatch.setenv("BURST_MARK", "1")  # and a launcher of ours
    assert same.is_finished(burst)
    with monkeypatch.context() as patch:
        patch.setenv("MEGATRON_BURST_TRITON", "0")
        assert not same.is_finished(burst), "what another setting makes is not known"
    monkeypatch.setattr(running, "_code", lambda: "another commit's")
    assert not same.is_finished(burst)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_launcher_may_start_megatrons_own_where_there_are_gpus(
    is_there: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compare, "gpus", lambda: 0)
    monkeypatch.setattr(compare, "find_spec", lambda _: is_there)
    for launcher, reason in ((), "and that a GPU"), (("--launcher", "srun x"), "is not installed"):
        assert run(tmp_path, "--dry-run", *launcher) == 0
        said = capsys.readouterr().out
        assert (reason in said) == (not launcher or not is_there)
        assert ("and that a GPU" in said) == (not launcher)


def test_two_comparisons_do_not_share_an_output(trainings: Trainings, tmp_path: Path) -> None:
    words = ["--toy", "--variants", "burst", "--output", str(tmp_path), "--input"]
    assert compare.main([*words, __file__]) == 0
    corpora = {file: file.read_bytes() for file in tmp_path.rglob("corpus.*")}
    with (
        lock.held(tmp_path, say=print),
        pytest.raises(ValueError, match="is in use by a process on"),
    ):
        compare.main([*words, str(compare.__file__)])
    assert trainings.started == ["burst"]
    assert all(file.read_bytes() == text for file, text in corpora.items()), "the first one's"


def test_what_is_shown_of_a_training_is_the_step_that_it_is_at(tmp_path: Path) -> None:
    shown = running.Watched("burst", tmp_path / "log.txt")
    assert shown.__rich__() == f"burst, to be watched in {tmp_path}/log.txt"
    lines = [f" iteration {step:8d}/      80 | elapsed" for step in (1, 2)]
    (tmp_path / "log.txt").write_text("x" * 10**5 + "\n".join(lines))
    assert shown.__rich__() == f"burst: step 2 of 80, log: {tmp_path}/log.txt"
    console = Console(force_terminal=True, width=200)
    with console.capture() as drawn, console.status(shown):  # type: ignore[arg-type]
        pass
    assert "burst: step 2 of 80" in drawn.get()


def test_a_sigterm_ends_the_training_with_us(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(99)",
    ]
    log = tmp_path / "log.txt"

    def end_us() -> None:
        while not (log.is_file() and log.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_us).start()
    with pytest.raises(KeyboardInterrupt):
        running._train(command, log, Signals())
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_the_report_has_every_variant(
    trainings: Trainings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainings.off_by = {"burst": 1 + 2e-5}
    assert run(tmp_path, "--peak-tflops", "0.001", "--json") == 0
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content == json.loads(capsys.readouterr().out), "all that is printed"
    rows = {row["name"]: row for row in content["results"]}
    assert len(rows) == len(variants(Job(ranks=4, context=4)))
    assert content["reference"] == "CP=1 megatron"
    assert content["apart"]["burst"]["relative"] == pytest.approx(2e-5, rel=1e-2)
    assert content["apart"]["ring flat"]["relative"] == 0 and content["faults"] == []
    burst = rows["burst"]
    assert (burst["seconds_per_step"], burst["tokens_per_second_per_gpu"]) == (0.5, 64.0)
    assert burst["peak_memory_bytes"] == 3 * 2**30
    assert burst["bytes_sent_per_rank_per_step"] == 5 * 2**20
    layer = 2 * 8 * (4 * 8) + 2 * 2 * 8 * 32 + 4 * 4 * 2 * 32.5
    assert burst["mfu"] == pytest.approx(3 * 128 * (2 * layer + 2 * 8 * 64) / (0.5 * 4 * 1e9))
    assert rows["ulysses"]["status"] == "cannot run" and rows["ulysses"]["reason"]
    text = (tmp_path / "compare.md").read_text()
    assert all(f"| {name} |" in text for name in rows)
    assert "agree with those of CP=1 megatron within 2.0e-05" in text
    assert "A micro-batch has 7.2 documents in the mean." in text
    assert "| burst | 2.0e-05 | 1.4167 | 500 to 500 | 500 | 64 |" in text
    assert "all losses of the first 12 steps agree" in text, "there are no more"
    assert "| peak GiB | sent MiB | max/mean |\n" in text, "not what no row has"
    assert "| 3.00 | 5.0 | 1.500 |\n" in text


def test_no_cell_parts_a_page_and_no_value_of_it_is_missing() -> None:
    assert pages._row(["a|b", "c\nd", 3]) == "| a/b | c d | 3 |"
    with pytest.raises(UndefinedError, match="'device' is undefined"):
        pages.page("gpu_check", results=[], failed=[], machine={"time": 1})


def test_losses_that_differ_and_runs_that_fail_are_faults(
    trainings: Trainings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainings.off_by = {"burst": 1.001}
    trainings.refused = {
        "ring-flat": "noise\nmegatron_burst: cannot run this:\n  because of that\nTraceback\n"
    }
    assert run(tmp_path) == 1
    shown = capsys.readouterr().err
    assert "burst differs from CP=1 megatron by 1.0e-03 at step" in shown
    assert "ring flat failed: cannot run this: because of that" in shown
    assert "cannot run this: because of that" in (tmp_path / "compare.md").read_text()
    assert run(tmp_path, "--tolerance", "0.01") == 1, "the failed one is tried again"
    assert trainings.started.count("ring-flat") == 2


@pytest.mark.parametrize(
    ("factor", "steps", "faults"), [(1.0, 20, 0), (0.1, 20, 4), (math.nan, 20, 7), (0.1, 19, 0)]
)
def test_a_toy_whose_losses_agree_but_do_not_fall_is_a_fault(
    factor: float,
    steps: int,
    faults: int,
    trainings: Trainings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "make_toy", lambda *_, **__: [*FLAGS])
    trainings.steps = steps
    trainings.off_by = dict.fromkeys(("cp-1-megatron", "cp-1-burst", "burst", "ring-flat"), factor)
    assert run(tmp_path, "--toy") == bool(faults)
    found = json.loads((tmp_path / "compare.json").read_text())["faults"]
    assert len(found) == faults
    if factor == 0.1 and faults:
        assert found[0].startswith(
            "CP=1 megatron has not learned: its loss is 0.125 after 20 steps, 0.600 at first"
        )
    assert run(tmp_path / "own") == (math.isnan(factor)), "another training need not learn"


def test_the_dry_run_and_the_report_say_what_was_dropped(
    trainings: Trainings, tmp_path: Path, printed: Printed
) -> None:
    names = "CP=1 megatron,burst,ulysses"
    words = ["compare", "--run", "toy", "--output", str(tmp_path), "--variants", names]
    given = ["--", "--burst-memory-mb", "64", "--burst-grad-dtype", "model"]
    shown = printed([*words, "--dry-run", *given])
    title = "# CP=1 megatron, without --burst-memory-mb, --burst-grad-dtype\n"
    assert title in shown and "# burst\n" in shown and "# burst heads 2\n" in shown
    assert "CP=1 megatron, without --burst-memory-mb, --burst-" in printed([*words, *given])
    rows = json.loads((tmp_path / "compare.json").read_text())["results"]
    dropped = {row["name"]: row["dropped"] for row in rows if row["dropped"]}
    assert dropped.keys() == {"CP=1 megatron", "ulysses"}
    page = (tmp_path / "compare.md").read_text()
    assert "| CP=1 megatron | --burst-memory-mb --burst-grad-dtype |" in page
    assert "| burst |" not in page.partition("## Without flags")[2]


def test_ranks_that_have_no_gpu_are_refused_before_any_starts(
    trainings: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setattr(compare, "gpus", lambda: 2)
    words = ["compare", "--run", "toy", "--output", str(tmp_path), "--variants"]
    said = printed([*words, "CP=1 burst,burst"], 1)
    assert "burst starts 4 ranks here, and this machine has 2 GPUs" in said
    assert not trainings.started
    assert tool.main([*words, "CP=1 burst,burst", "--launcher", "srun x"]) == 0
    assert tool.main([*words, "CP=1 burst"]) == 0 and trainings.started == ["cp-1-burst", "burst"]


def test_figures_of_runs_without_them_are_none(tmp_path: Path) -> None:
    pretend(tmp_path / "tensorboard", 1.0)
    result = measure("x", tmp_path, None)
    assert (result.mfu, result.exposed, result.ranks) == (None, None, 4)
    (tmp_path / "torch_profile").mkdir()
    call = {"cat": "user_annotation", "name": "burst: forward", "ts": 0, "dur": 9, "tid": 1}
    file = tmp_path / "torch_profile" / "rank-0.json"
    file.write_text(json.dumps({"traceEvents": [call]}))
    alone = measure("x", tmp_path, None)
    assert alone.exposed is not None and alone.exposed["hidden"] is None, "nothing is sent"
    assert [*page._cells(alone, None)][-1] == "-"
    assert differences([result], "x", 20) == {}


@pytest.mark.parametrize(("batches", "tokens"), [([2, 2], 64.0), ([1, 1], 32.0), ([1, 2], None)])
def test_tokens_are_counted_of_the_batches_that_were(
    batches: list[int], tokens: float | None, tmp_path: Path
) -> None:
    pretend(tmp_path / "tensorboard", 1.0)
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for step, size in enumerate(batches, start=1):  # as --rampup-batch-size makes them
            writer.add_scalar("batch-size", size, step)
    result = measure("x", tmp_path, 1e-3)
    assert result.tokens_per_second_per_gpu == tokens
    assert (result.mfu is None) == (tokens is None)


# Losses and the logs they are read from


def ran(name: str, losses: Sequence[float], first_step: int = 1) -> Result:
    return Result(
        name=name, status="ran", steps=len(losses), losses=list(enumerate(losses, first_step))
    )


@pytest.mark.parametrize("bad", [1.01, math.nan, math.inf])
def test_one_differing_step_is_found_and_named(bad: float) -> None:
    losses = [5.0 - 0.1 * step for step in range(30)]
    other = [*losses[:7], losses[7] * bad, *losses[8:]]
    found = differences([ran("a", losses), ran("b", other)], "a", 20)["b"]
    assert found.step == 8 and not found.relative <= 1e-4
    assert differences([ran("a", losses), ran("b", other)], "a", 7)["b"].relative == 0
    both = [ran("a", losses), ran("b", other[:7])]  # which ended by a limit of its time
    made = dict[str, Any](command="", flags=(), machine={}, judged_steps=20, tolerance=1e-4)
    (text,) = page.Comparison(results=both, **made).verdict
    assert text.startswith("all losses of the first 7 steps agree with those of a within 0.0e+00")
    with pytest.raises(ValueError, match="'b' logged none of the first 20 steps of 'a'"):
        differences([ran("a", losses), ran("b", losses, 21)], "a", 20)


def test_scalars_are_read_whole_and_of_a_step_written_twice_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # as Megatron sets it when it is imported
    for first_step, count, value in ((1, 1200, 1.0), (2, 2, 3.5)):
        with SummaryWriter(str(tmp_path / "events")) as writer:
            for step in range(first_step, first_step + count):
                writer.add_scalar("lm loss", value, step)
    found = read_scalars(tmp_path / "events")["lm loss"]
    assert not caplog.records
    assert len(found) == 1200, "more than TensorBoard samples"
    assert found[:4] == [(1, 1.0), (2, 3.5), (3, 3.5), (4, 1.0)]
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="no TensorBoard events"):
            read_scalars(path)


# Real trainings


def train(command: Sequence[str], log: Path, signals: Signals) -> int:
    """Its ranks are forked from a process that has imported Megatron, as in tests/training."""
    ranks = int(command[command.index("--nproc-per-node") + 1])
    start = command.index("megatron_burst.pretrain") + 1
    module, words = command[start - 1], command[start:]
    return int(run_job(module, log.parent, ranks, words, logs_arguments=True)[0] != "0")


type OfToy = Callable[..., dict[str, Any]]


@pytest.fixture
def of_toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: Printed) -> OfToy:
    """Compares trainings of the toy, and returns the rows of what ran."""
    monkeypatch.setattr(running, "_train", train)

    def compared(*words: str) -> dict[str, Any]:
        told = ["compare", "--toy", "--json", "--output", str(tmp_path), *words]
        content = json.loads(printed(told))
        assert not content["faults"] and content["reference"] == "CP=1 megatron"
        assert all(row["reason"] for row in content["results"] if row["status"] != "ran")
        return {row["name"]: row for row in content["results"] if row["status"] == "ran"}

    return compared


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_toy_trains_every_variant_that_can_run(of_toy: OfToy) -> None:
    """By torchrun one of them is trained in tests/scripts/test_wheel.py."""
    rows = of_toy()
    assert len(rows) == 13
    for name, row in rows.items():
        assert row["peak_memory_bytes"] > 0 and row["seconds_per_step"] > 0
        if name != "CP=1 megatron":
            sent, exposed = row["bytes_sent_per_rank_per_step"], row["exposed"]
            assert exposed["bytes_sent"] == pytest.approx(sent, rel=0.2)
            assert exposed["share"] < 1 and (exposed["hidden"] is None) == (sent == 0)
            assert 0 <= (exposed["hidden"] or 0) <= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_toy_of_documents_has_the_losses_of_megatrons_dense_mask(of_toy: OfToy) -> None:
    rows = of_toy("--ranks", "2", "--variants", "CP=1*,burst", "--", DOCUMENTS)
    assert len(rows) == 3
    assert rows["burst"]["documents"] == rows["CP=1 burst"]["documents"] > 4
    assert rows["burst"]["imbalance"] > rows["CP=1 burst"]["imbalance"] == 1


@pytest.mark.parametrize(
    ("options", "flags", "expected"),
    [("", "", 1e-4), ("", "--bf16", 1e-2), ("--tolerance 0", "--bf16", 0.0)],
)
def test_a_tolerance_that_is_given_counts_and_0_asks_for_equal_losses(
    options: str, flags: str, expected: float, tmp_path: Path
) -> None:
    words = f"--ranks 2 --output {tmp_path} {options} -- --num-attention-heads 4 {flags}"
    args = parser().parse_args(words.split())
    compare._fill(args)
    assert args.tolerance == expected
