"""The benchmarks on sizes that say nothing but run, and their pages. (fast tier)"""

import csv
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accuracy
import all as all_steps
import attention
import harness
import host_time
import loss
import nccl_alone
import paced
import pytest
import torch
from algorithms import Place, Sizes, runs_here, share_of_heads

from megatron_burst import BurstConfig
from megatron_burst.attention import context as contexts
from megatron_burst.kernels import KERNELS, KernelInput
from megatron_burst.plans.visibility.band import Band
from megatron_burst.tools.one_rank import OneRank, context_of
from megatron_burst.transport.comm import Communicator, Posted
from megatron_burst.transport.lowered import Batch

ROOT = Path(__file__).parents[2]
RECORDS = {  # not measured again
    f"scripts/bench/results/{name}.md"
    for name in "cpu_loss_once cpu_gradient_return cpu_end_to_end cpu_tiles h200_first_run "
    "h200_gpu_check h200_loss h200_nccl h200_recompute".split()
}

type Rows = list[dict[str, str]]
type Run = Callable[..., tuple[str, Rows]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a benchmark; returns its page and the rows of its CSV."""

    def of(script: Any, command: str, *more: str) -> tuple[str, Rows]:
        page = tmp_path / "page.md"
        arguments = [script.__name__, *command.split(), *more, "--force", "--output", str(page)]
        monkeypatch.setattr(sys, "argv", arguments)
        script.main()
        with page.with_suffix(".csv").open() as file:
            return page.read_text(), list(csv.DictReader(file))

    return of


def test_errors_are_those_of_bfloat16(run: Run) -> None:
    command = "--tokens 64 --heads 4:2 --ranks 1 2 --nodes 2 --seeds 1 --backward kv query"
    command += " --grad-dtype float32 model"
    page, rows = run(accuracy, command)
    assert len(rows) == 2 * 4 * 4 and page.count("| 4:2 |") == 4 * 4
    assert all(1e-4 < float(row["error"]) < 2e-2 for row in rows)
    assert {row["ratio"] for row in rows if row["ranks"] == "1"} == {"1"}


def test_host_time_is_told_in_additions(run: Run) -> None:
    command = "--ranks 2 --backward query --repetitions 1"
    page, rows = run(host_time, command)
    assert len(rows) == 1 and page.count("| query | 2 |") == 1
    assert all(float(rows[0][way]) > 1 for way in ("forward", "backward"))


def test_the_oracle_is_attention_in_float64() -> None:
    inputs = Sizes(16, 4, 2, 8).draw("cpu", torch.float64)
    q, k, v, dout = (x.transpose(1, 2).requires_grad_() for x in inputs)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = out, *torch.autograd.grad(out, (q, k, v), dout)
    found = accuracy.oracle(inputs)
    assert max(accuracy.errors(found, [x.transpose(1, 2) for x in expected])) < 1e-12


def test_the_loss_takes_no_more_than_its_limit(run: Run, tmp_path: Path) -> None:
    command = "--shapes 32x512x16 --repetitions 1 --tokens 1024 2048 --hidden 64 --memory-mb 8"
    command += " --vocabularies 1024"
    _, rows = run(loss, command)
    assert [row["way"] for row in rows[:4]] == ["Liger's algorithm", "once", "twice", "all logits"]
    assert all(float(row["median_s"]) > 0 for row in rows[:4])
    counted = {(row["way"], row["tokens"]): int(row["bytes"]) for row in rows[4:]}
    assert 1.9 < counted["all logits", "2048"] / counted["all logits", "1024"] < 2.1
    assert max(n for (way, _), n in counted.items() if way != "all logits") <= 8 * harness.MIB
    plot = pytest.importorskip("plot", reason="pictures need matplotlib", exc_type=ImportError)
    plot.draw(tmp_path / "page.csv", tmp_path / "figure.svg")
    figure = (tmp_path / "figure.svg").read_text()
    assert "chunked, 8 MiB" in figure and "Vocabulary 1k" in figure
    assert "python scripts/bench/loss.py --shapes 32x512x16" in figure


def test_ways_of_the_loss_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "within", lambda *_: SimpleNamespace(tokens=20))  # of chunks
    args, shape = SimpleNamespace(device="cpu", dtype="float32"), loss.Shape(50, 40, 8)
    found = {}
    for name, way in loss.ways(args, shape).items():
        inputs = loss.draw_inputs("cpu", torch.float32, *shape)
        made = way(*inputs)
        (made / 3).backward()
        found[name] = made.detach(), inputs[0].grad, inputs[1].grad
    for results in found.values():
        torch.testing.assert_close(results, found["all logits"])


def test_more_is_stored_the_less_is_recomputed(run: Run) -> None:
    pytest.importorskip("megatron.core")
    import recompute

    command = "--layers 2 --tokens 256 --hidden 32 --repetitions 1"
    page, rows = run(recompute, command)
    stored = [int(row["stored_bytes"]) for row in rows]
    assert stored == sorted(stored, reverse=True) and len(set(stored)) == len(stored) == 6
    # Of each of two layers an output of 32 numbers and a log-sum-exp of two heads, 4 bytes a token.
    assert stored[1] - stored[-1] == 2 * 256 * (32 + 2) * 4
    assert "| ρ = 0.25 |" in page


def test_mlps_in_chunks_are_timed_whole_and_cut(run: Run) -> None:
    pytest.importorskip("megatron.core")
    import mlp_chunks

    command = "--tokens 64 --hidden 16 --chunks 2 --repetitions 1"
    page, rows = run(mlp_chunks, command)
    assert [(row["held"], row["chunks"]) for row in rows] == [
        (held, chunks) for held in ("one layer", "two layers") for chunks in ("0", "2")
    ]
    assert "| one layer |" in page


@pytest.mark.slow
def test_memory_of_trainings_and_a_limit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    import memory

    monkeypatch.setattr(memory, "SAVINGS", {"none": "", "all": memory.SAVINGS.popitem()[1]})
    # The logits and the wide MLP of so many tokens need more than the limit.
    command = "--tokens 4096 --hidden 32 --limited-tokens 16384 --limit 1800 --steps 1 --runs"
    runs = str(tmp_path / "runs")
    page, rows = run(memory, command, runs)
    whole, cut, none, everything = rows
    assert int(whole["counted"]) > int(cut["counted"]) > 0
    assert (none["fits"], everything["fits"]) == ("False", "True")
    assert "| none | does not fit | 0 |" in page
    again, _ = run(memory, command, runs)  # of what is kept
    assert "| all | fits | 1 |" in again


def test_memory_keeps_rows_of_the_same_sizes_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import memory

    trained: list[int] = []
    shown: list[int] = []

    def train(flags: str, tokens: int, *_: object, limit: int = 0) -> memory.Training:
        trained.append(tokens)
        return memory.Training(False, 10, [], f"counted peak: {tokens}")

    def measure(commit: str, tokens: int) -> int:
        """Run it; return how many trainings that took."""
        words = ["memory.py", "--runs", str(tmp_path), "--tokens", str(tokens)]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(memory, "origin", lambda: {"commit": commit})
        trained.clear()
        memory.main()
        return len(trained)

    monkeypatch.setattr(memory, "train", train)
    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(memory, "_chunks", lambda _: "")
    monkeypatch.setattr(memory, "publish", lambda *given, **_: shown.append(given[3][0]["counted"]))
    every = 2 * len(memory.MLPS) + len(memory.SAVINGS)
    asked = [("a", 64), ("a", 64), ("a", 32), ("b", 32)]
    assert [measure(*each) for each in asked] == [every, 0, every, every]
    assert shown == [64, 64, 32, 32]


def test_attention_has_a_row_for_every_case(run: Run) -> None:
    sizes = "--places 1x2 --tokens 32 --head-dim 8 --heads 4:4 4:1 --repetitions 1"
    names = ["ring flat", "ulysses", "burst kv flat", "burst auto"]
    command = f"{sizes} --masks documents:8 causal blocks --algorithms"
    page, rows = run(attention, command, *names)
    assert len(rows) == 3 * 2 * 4 * 3  # masks, heads, algorithms, phases
    found = {(row["mask"], row["kv_heads"], row["algorithm"], row["phase"]): row for row in rows}
    assert len(found) == len(rows)
    for row in rows:
        assert 0 < float(row["q1_s"]) <= float(row["median_s"]) <= float(row["q3_s"])
        assert float(row["kernels_s"]) > 0
        assert (row["algorithm"] == "ring flat") <= (row["ratio"] == "1")
        assert row["algorithm"] == "burst auto" or row["plan_of"] == row["algorithm"]
        assert (row["mask"] == "causal") <= (row["over_causal"] == "1")
    per_flop = [
        float(found[mask, "4", "ulysses", "step"]["tflops_a_rank"])
        for mask in ("causal", "documents:8")
    ]
    over = float(found["documents:8", "4", "ulysses", "step"]["over_causal"])
    assert over == pytest.approx(per_flop[0] / per_flop[1], rel=1e-4)
    # With one KV head the ring of K and V sends less, with four that of queries.
    auto = [found["causal", kv_heads, "burst auto", "step"]["plan_of"] for kv_heads in "14"]
    assert auto == ["burst kv flat", "burst auto"]
    # 64 tokens: 2080 causal pairs, 4 heads of 8, two matrix products of 2 FLOPs an element forward.
    assert found["causal", "4", "ulysses", "forward"]["flops"] == str(2080 * 4 * 8 * 4)
    # A block of K and V, 32 tokens, 4 heads of 8, 4 bytes; backward as many and gradients.
    sent = [found["causal", "4", "ring flat", phase] for phase in attention.PHASES]
    assert [row["payload_bytes"] for row in sent] == [str(n * 8192) for n in (1, 2, 3)]
    assert page.count("| algorithm | causal | documents:8 | blocks |") == 2
    assert "## 2 ranks, 32 tokens a rank, 4 heads, 1 KV heads, head size 8" in page


def test_the_default_is_compared_with_other_plans() -> None:
    row = {"mask": "causal", "mbit": 40.0, "ratio": 1.0, "payload_bytes": 0, "kernels_share": 1.0}
    times = {"ring flat": 2.0, "ulysses": 1.0, "burst auto": 3.0, "burst default": 1.5}
    plans = {name: "ulysses" if name == "burst default" else name for name in times}
    rows = [
        {**row, "algorithm": name, "median_s": seconds, "plan_of": plans[name]}
        for name, seconds in times.items()
    ]
    page = attention.table(rows)
    assert "| burst auto / best ring | 1.50 |" in page
    assert "| burst default / best other | 0.75 |" in page, "of ring flat"


def test_what_the_blocks_and_documents_see() -> None:
    table = attention.mask_of("blocks", 64).blocks
    assert table is not None
    rows = [torch.from_numpy(row.copy()).nonzero().flatten().tolist() for row in table]
    # Block 0 may also see the last one, which comes later: causality hides it.
    assert rows[:3] == [[0, 15], [0, 1], [0, 1, 2]] and rows[15] == [0, 14, 15]
    bounds = attention.mask_of("documents:64", 2**16).documents
    assert bounds and (bounds[0], bounds[-1]) == (0, 2**16) and 900 < len(bounds) < 1150
    assert attention.mask_of("window", 64).window == 7


def test_kernels_alone_have_the_heads_that_the_all_to_all_leaves_them() -> None:
    grouped = Sizes(512, 8, 2, 64)
    assert share_of_heads(grouped, 1) == grouped
    assert share_of_heads(grouped, 4) == Sizes(2048, 2, 1, 64)  # a KV head for each rank


@pytest.mark.parametrize(("band", "pairs"), [(Band.FULL, 8 * 8), (Band.CAUSAL, 8 * 8 / 2)])
def test_paced_kernels_take_the_time_of_their_flops(
    monkeypatch: pytest.MonkeyPatch, band: Band, pairs: float
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(paced, "time", clock)
    q, k, v, dout = (torch.ones(2, 8, heads, 16) for heads in (4, 2, 2, 4))
    tile, measured = KernelInput(q, k, v, band, scale=0.25), contexts.machine_here
    with paced.paced(1e6):
        found = contexts.machine_here(5e7)  # type: ignore[attr-defined]
        assert (found.nic_rate, found.forward_rate, found.backward_rate) == (5e7, 1e6, 1e6)
        out, lse = KERNELS["cpu"].forward(tile)
        gradients = KERNELS["cpu"].backward(tile, dout, out, lse)
    assert contexts.machine_here is measured
    assert slept == [n * 2 * 2 * 4 * 16 * pairs / 1e6 for n in (2, 5)]  # matrix products
    assert out.shape == q.shape and out.is_contiguous() and lse.shape == (2, 4, 8)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert not any(x.any() for x in (out, *gradients))


def test_only_what_can_run_is_run() -> None:
    def names(place: Place, heads: int = 8) -> set[str]:
        sizes = Sizes(512, heads, heads, 64)
        return {name for name in attention.SETTINGS if runs_here(name, place, sizes)}

    everything, double = set(attention.SETTINGS), {"ring double"}
    double |= {"burst query double", "burst kv double"}
    # Two nodes make no mesh, and one ring is the baseline.
    assert names(Place(4, 2)) == everything - {"burst kv flat", "burst mesh"}
    assert "ulysses" not in names(Place(4, 2), heads=6)
    assert names(Place(4, 4)) == everything - double
    assert not names(Place(3, 1)) & {*double, "ring hybrid", "burst hybrid"}


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (attention, "--device cuda", "runs under torchrun"),
        (attention, "--algorithms ulysses", "must name ring flat"),
        (attention, "--places 3", "invalid _place value: '3'"),
        (attention, "--mbit 400 0", "all numbers must be positive"),
        (accuracy, "--ranks 2 4", "--ranks [2, 4]: 1, and multiples of --nodes 1"),
        (loss, "--repetitions 0", "all numbers must be positive"),
    ],
)
def test_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str], script: Any, arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        script.flags(arguments.split())
    assert message in capsys.readouterr().err


def test_ways_take_turns_in_new_orders_that_are_the_same_everywhere() -> None:
    def calls() -> tuple[list[str], dict[str, list[int]]]:
        order: list[str] = []
        ways = {name: lambda name=name: order.append(name) or len(order) for name in "abcd"}
        return order, harness.in_turns(ways, 5, seed=3)

    order, results = calls()
    assert order == calls()[0]
    rounds = [tuple(order[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(one) == [*"abcd"] for one in rounds) and len(set(rounds)) > 3
    # The first round warms up.
    assert results == {n: [i + 1 for i, m in enumerate(order) if m == n and i > 3] for n in "abcd"}


def test_the_spread_has_the_median_and_the_quartiles() -> None:
    assert set(harness.spread([2.0]).values()) == {2.0}
    found = harness.spread([4.0, 1.0, 2.0, 3.0, 9.0])
    assert found == {"median_s": 3.0, "q1_s": 2.0, "q3_s": 4.0, "least_s": 1.0}


def test_a_loaded_machine_is_refused_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0.0, 0.0))
    monkeypatch.setattr(harness, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(SystemExit, match=r"last minute is 3.50, above 0.5"):
        harness.wait_until_quiet(force=False)
    harness.wait_until_quiet(force=True)
    loads = iter([0.9, 0.1])
    monkeypatch.setattr(harness, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    harness.wait_until_quiet(force=False)
    assert not [*loads]


def test_a_page_says_where_it_comes_from_and_keeps_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench/loss.py", "--tokens", "1 2"])
    rows = [{"way": "a", "median_s": 1 / 3}, {"way": "b", "bytes": 2**40}]
    file, given = tmp_path / "deep" / "page.md", harness.origin()
    args = harness.Flags("").read(["--output", str(file)])
    page = "\n# Title\n\nWords, {repetitions} {times}.\n", rows, given
    harness.publish(args, "name", *page, times="times")
    made = file.read_text()
    assert made.startswith("# Title\n\n* date: ") and made.endswith("\n\nWords, 5 times.\n")
    assert "\n* command: python scripts/bench/loss.py --tokens '1 2'\n" in made
    notes = "\n## Notes on the first\n\n* by hand\n"
    file.write_text(made + notes)
    harness.publish(args, "name", *page, times="times")
    assert file.read_text() == made + notes
    with file.with_suffix(".csv").open() as table:
        found = list(csv.DictReader(table))
    assert [*found[0]][:5] == ["benchmark", "way", "median_s", "bytes", "date"]
    assert (found[0]["median_s"], found[1]["bytes"]) == ("0.333333", str(2**40))


def test_one_command_makes_every_picture_and_table_that_the_docs_show() -> None:
    makes = {name for step in all_steps.STEPS.values() for name in step.makes} | RECORDS
    for text in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        links = re.findall(r"\]\(([^)#:]+\.(?:svg|png|md))", text.read_text())
        shown = {os.path.relpath((text.parent / link).resolve(), ROOT) for link in links}
        measured = {name for name in shown if "/results/" in name or not name.endswith(".md")}
        missing = [name for name in measured if name not in makes]
        assert not missing, f"{text.name} shows {missing}: add it to scripts/bench/all.py"


def test_a_step_that_fails_does_not_stop_the_rest(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = {
        "first": ("-c 'print(1)'", "-c '1/0'", "-c 'print(2)'"),
        "second": ("-c 'print(3)'",),
    }
    steps = {name: all_steps.Step(1, (), lines) for name, lines in commands.items()}
    monkeypatch.setattr(all_steps, "STEPS", steps)
    assert all_steps.main(["--only", "first", "second"]) == 1
    said = capfd.readouterr()
    assert said.out.split() == ["1", "3"]  # a step ends at its first failure
    assert "--only first\n" in said.err and "ZeroDivisionError" in said.err
    assert all_steps.main(["--only", "second"]) == 0
    with pytest.raises(SystemExit):
        all_steps.main(["--only", "third"])


def test_what_a_rank_sends_itself_is_as_much_as_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL waited for ever, as it would for a mesh's messages."""
    posted: list[Batch] = []

    def start(self: Any, batch: Batch, own: Any, memory: torch.Tensor) -> Posted:
        posted.append(batch)
        return Posted(batch, (), (), None)

    monkeypatch.setattr(Communicator, "start", start)

    def passes(ranks: int, settings: Any) -> None:
        config = BurstConfig(**settings)
        nodes = [rank // nccl_alone.NODE for rank in range(ranks)]
        carried = nccl_alone.ToItself([0] * ranks, {}, 1.0)
        tensors = Sizes(16, 4, 4, 8).draw("cpu", torch.float32)
        OneRank(context_of(ranks // 2, nodes, config, carried), tensors).backward()

    with harness.empty_kernels():
        for ranks, settings, *_ in nccl_alone.RINGS:
            passes(ranks, settings)
        assert posted
        with pytest.raises(ValueError, match="receives .* bytes, sends"):
            passes(8, {"topology": "mesh"})
