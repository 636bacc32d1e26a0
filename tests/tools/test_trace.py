"""The ranges that torch.profiler shows, and how much of communication they hide. (fast tier)"""

import gzip
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_burst import BurstConfig, ring_attention
from megatron_burst.plans.schedules.batches import batches_of
from megatron_burst.plans.schedules.plan import Plan
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools import trace
from megatron_burst.transport import profiling
from tests.tier import one_in
from tests.tools.conftest import Printed
from tests.workers import Team, WorkerPool

RANKS = 4
SETTINGS = {
    "burst double": {"ranks_per_node": 2, "backward": "query"},
    "ring": {"algorithm": "ring"},
    "allgather": {"algorithm": "allgather"},
    "ulysses": {"algorithm": "ulysses"},
    "hybrid": {"head_parallel_size": 2},
    "chunks": {"head_chunks": 2},
}


def planned(plan: Plan) -> tuple[int, int, int]:
    calls = sum(len(batches_of(step.blocks)) for step in plan.steps)
    return calls, len(plan.sends), len(plan.receives)


def profiled(team: Team, settings: dict[str, Any], mask: Mask, directory: Path) -> dict[str, Any]:
    """Profile one of three attention calls; return what was planned and sent in it."""
    context = team.context(BurstConfig(**settings))
    torch.manual_seed(0)
    shape = (1, 16 * RANKS, 4, 8)
    q, k, v = (context.shard(torch.randn(shape), dim=1).requires_grad_() for _ in range(3))

    def attend() -> None:
        ring_attention(q, k, v, context, mask=mask).sum().backward()

    attend()
    sent = context.bytes_sent
    with torch.profiler.profile() as profiler:
        attend()
    sent = context.bytes_sent - sent
    attend()
    profiler.export_chrome_trace(str(directory / f"rank-{team.rank}.json.gz"))
    (call,) = context.kept.calls.values()
    return {
        "forward": planned(call.forward_plan),
        "backward": planned(call.backward_plan),
        "sent": sent,
    }


def run(workers: WorkerPool, directory: Path, name: str, mask: Mask) -> list[dict[str, Any]]:
    return workers.run(range(RANKS), profiled, SETTINGS[name], mask, directory)


@pytest.fixture(scope="module")
def double(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("double")
    run(workers, directory, "burst double", Mask.causal())
    return directory


@pytest.mark.parametrize(("name", "window"), one_in(3, itertools.product(SETTINGS, [None, 4])))
def test_the_ranges_are_the_tiles_and_messages_of_the_plan(
    workers: WorkerPool, tmp_path: Path, name: str, window: int | None
) -> None:
    expected = run(workers, tmp_path, name, Mask.causal(window=window))
    rows = {(row["rank"], row["name"]): row for row in trace.summary(tmp_path)["rows"]}
    chunks = SETTINGS[name].get("head_chunks", 1)
    for rank, ours in enumerate(expected):
        names = names_of(tmp_path / f"rank-{rank}.json.gz")
        for call in ("forward", "backward"):
            assert names.count(f"burst: {call}") == chunks, "the profiled call alone"
            assert rows[rank, call]["exposed"] <= rows[rank, call]["communication"]
            steps = [name for name in names if name.startswith(f"burst: {call} step ")]
            tiles = [name for name in steps if re.search(r": tile \d \d$", name)]
            posts = " ".join(name for name in steps if ": post " in name)
            counted = len(tiles), posts.count("send "), posts.count("receive ")
            assert counted == tuple(chunks * number for number in ours[call])
        assert rows[rank, trace.ATTENTION]["bytes_sent"] == ours["sent"]
        exchanges = rows.get((rank, "head exchange"), {"calls": 0})["calls"]
        assert exchanges == (4 if name in ("ulysses", "hybrid") else 0)


def names_of(path: Path) -> list[str]:
    content = json.loads(gzip.decompress(path.read_bytes()))
    return [e["name"] for e in content["traceEvents"] if e.get("cat") == "user_annotation"]


def test_the_command_prints_a_table_or_json(double: Path, printed: Printed) -> None:
    said = printed(f"trace {double}")
    assert said.count(trace.ATTENTION) > RANKS
    content = json.loads(printed(f"trace {double} --json"))
    assert content["ranks"] == list(range(RANKS)) and content["steps"] == 1
    for row in content["rows"]:
        assert 0 < row["exposed"] <= row["communication"]
        assert row["exposed"] < row["seconds"]
        assert row["share"] == pytest.approx(row["exposed"] / row["seconds"])


def event(kind: str, name: str, start: float, stop: float, **arguments: Any) -> dict[str, Any]:
    span = {"ts": start, "dur": stop - start, "tid": 7, "ph": "X"}
    return {"cat": kind, "name": name, "args": arguments, **span}


def write(directory: Path, *events: dict[str, Any]) -> Path:
    content = {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}
    (directory / "rank-3.json").write_text(json.dumps(content))
    return directory


def row_of(directory: Path, name: str = trace.ATTENTION) -> dict[str, Any]:
    (row,) = [row for row in trace.summary(directory)["rows"] if row["name"] == name]
    return row


def test_on_the_cpu_waits_are_exposed(tmp_path: Path) -> None:
    write(
        tmp_path,
        event("user_annotation", "burst: forward", 0, 100),
        event("user_annotation", "burst: forward step 0: post for step 1, 64 bytes: send", 10, 11),
        event("user_annotation", "burst: forward step 0: tile 1 2", 11, 60),
        event("user_annotation", "burst: forward step 1: wait", 70, 90),
        event("user_annotation", "something else", 0, 1),
    )
    row = row_of(tmp_path)
    assert row["rank"] == 3 and row["bytes_sent"] == 64
    assert row["seconds"] == pytest.approx(100e-6)
    assert row["communication"] == pytest.approx(80e-6)
    assert row["exposed"] == pytest.approx(20e-6)
    assert (row["share"], row["hidden"]) == pytest.approx((0.2, 0.75))


def test_where_nothing_is_sent_nothing_is_said_to_be_hidden(
    tmp_path: Path, printed: Printed
) -> None:
    write(tmp_path, event("user_annotation", "burst: forward", 0, 100))
    assert row_of(tmp_path)["hidden"] is None
    assert re.search(r"forward .* 0\.0% +- *\n", printed(f"trace {tmp_path}"))


def test_the_help_says_of_what_its_shares_are() -> None:
    said = " ".join(trace.parser().format_help().split())
    assert "exposed milliseconds / milliseconds of attention" in said
    assert "exposed milliseconds / milliseconds of communication" in said


def test_on_a_gpu_what_no_other_kernel_runs_beside_is_exposed(tmp_path: Path) -> None:
    """Also beside kernels of others; and a step that attention has nothing to do with."""
    write(
        tmp_path,
        event("user_annotation", "ProfilerStep#2", 0, 1000),
        event("user_annotation", "ProfilerStep#3", 1000, 2000),
        event("user_annotation", "burst: backward", 0, 50),
        event("user_annotation", "burst: backward step 0: wait", 20, 50),
        event("cuda_runtime", "cudaLaunchKernel", 5, 6, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 10, 11, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 60, 61, correlation=3),
        event("cuda_runtime", "cudaEventRecord", 12, 13, correlation=9),
        event("kernel", "ncclDevKernel_SendRecv(...)", 100, 300, correlation=1),
        event("kernel", "flash_bwd", 120, 200, correlation=2),
        event("kernel", "another layer's", 250, 320, correlation=3),
    )
    row = row_of(tmp_path, "backward")
    assert row["seconds"] == pytest.approx(200e-6), "from its first kernel to its last"
    assert row["communication"] == pytest.approx(200e-6)
    assert row["exposed"] == pytest.approx(70e-6)
    assert trace.summary(tmp_path)["steps"] == 2


def test_what_is_no_trace_of_attention_is_refused(tmp_path: Path, printed: Printed) -> None:
    def refused(message: str) -> None:
        assert message in printed(f"trace {tmp_path}", 1)

    refused("has no rank-N.json.gz: train with --profile --use-pytorch-profiler")
    (tmp_path / "rank-0.json").write_text('{"traceEvents": []}')
    refused("no attention of ours ran in the profiled steps")


CALL = event("user_annotation", "burst: forward", 0, 100)
POST = event("user_annotation", "burst: forward step 0: post for step 1, 64 bytes: send", 10, 11)
WAIT = event("user_annotation", "burst: forward step 1: wait", 70, 90)


@pytest.mark.parametrize("key", ["name", "ts", "dur", "tid", "args"])
@pytest.mark.parametrize("value", [None, "x", float("nan"), -1e400])
@pytest.mark.parametrize("which", range(3))
def test_an_event_that_is_malformed_is_named_or_makes_no_difference(
    tmp_path: Path, key: str, value: Any, which: int
) -> None:
    events = [CALL, POST, WAIT]
    expected = trace.summary(write(tmp_path, *events))["rows"]
    for changed in (
        {**events[which], key: value},
        {name: found for name, found in events[which].items() if name != key},
    ):
        events[which] = changed
        try:
            rows = trace.summary(write(tmp_path, *events))["rows"]
        except ValueError as error:
            assert str(tmp_path) in str(error)
        else:
            assert rows == expected or key in ("name", "tid")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b'{"traceEvents": 3}', b'{"traceEvents": [3]}'],
)
@pytest.mark.parametrize("name", ["rank-1.json", "rank-1.json.gz", "rank-x.json"])
def test_files_that_are_no_traces_are_named(tmp_path: Path, content: bytes, name: str) -> None:
    whole = gzip.compress(content) if name.endswith(".gz") else content
    for data in (whole, whole[:-1], whole[:20] + b"\xff" + whole[21:]):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name} is no trace of torch.profiler"):
            trace.summary(tmp_path)


def test_a_rank_has_one_file(tmp_path: Path) -> None:
    write(tmp_path, CALL)
    (tmp_path / "rank-03.json").write_text((tmp_path / "rank-3.json").read_text())
    with pytest.raises(ValueError, match="a second file of the rank"):
        trace.summary(tmp_path)


def test_without_a_profiler_nothing_is_made_and_no_word_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Word:
        def __str__(self) -> str:
            raise AssertionError

    make: Callable[..., Any] = profiling.span
    assert make("forward") is make("forward", 1, "post", Word())
    with torch.profiler.profile(), pytest.raises(AssertionError):
        make("forward", 1, "post", Word())


def test_the_work_grows_with_the_events_not_with_their_square() -> None:
    reads = itertools.count()

    class Counted(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            next(reads)
            return super().__getitem__(name)

    events = list[Counted]()
    for call in range(200):
        one = {"cat": "user_annotation", "name": f"{trace.PREFIX}forward", "ts": 9 * call}
        events.append(Counted(one, dur=8, tid=1))
        launch = {"cat": "cuda_runtime", "ts": 9 * call + 1, "tid": 1}
        events.append(Counted(launch, args={"correlation": call}))
        events.append(Counted(launch, cat="kernel", name="x", dur=1, args={"correlation": call}))
    assert len([*trace._calls(events)]) == 200
    assert next(reads) < 40 * len(events)
