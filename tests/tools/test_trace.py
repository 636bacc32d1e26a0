"""--burst-trace: what is recorded is what was planned; its clock, files, picture. (fast tier)"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_burst import BurstConfig, BurstContext, ring_attention
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.plan import Plan
from megatron_burst.plans.timeline import Message, Step, timeline
from megatron_burst.tools import trace
from megatron_burst.tools.exposure import calls_of, exposures, load
from megatron_burst.transport.chrome_trace import RankTrace, TraceError, file_of, write
from megatron_burst.transport.trace import DeviceClock, HostClock, Recorder
from tests.workers import Team, WorkerPool

RANKS = 4
SETTINGS = {
    "burst double": {"ranks_per_node": 2, "backward": "query"},
    "ring": {"algorithm": "ring"},
    "allgather": {"algorithm": "allgather"},
    "ulysses": {"algorithm": "ulysses"},
    "hybrid": {"head_parallel_size": 2},
}


def planned(plan: Plan) -> tuple[int, int, int]:
    return len(plan.tiles), len(plan.sends), len(plan.receives)


def traced(team: Team, settings: dict[str, Any], mask: Mask, directory: Path) -> dict[str, Any]:
    """Two attention calls, the second within a traced step; what was planned and sent in it."""
    recorder = Recorder(HostClock())
    config = BurstConfig(**settings)
    context = BurstContext.create(config, team.group, groups=team.groups, recorder=recorder)
    torch.manual_seed(0)
    shape = (1, 16 * RANKS, 4, 8)
    q, k, v = (context.shard(torch.randn(shape), dim=1).requires_grad_() for _ in range(3))

    def attend() -> None:
        ring_attention(q, k, v, context, mask=mask).sum().backward()

    attend()
    assert not recorder.calls, "off until it is started"
    sent = context.bytes_sent
    recorder.start(7)
    attend()
    recorder.stop()
    sent = context.bytes_sent - sent
    attend()
    write(recorder, directory, team.rank, RANKS)
    (plans,) = context._plans.values()
    return {
        "forward": planned(plans.forward),
        "backward": planned(plans.backward),
        "sent": sent,
    }


def run(
    workers: WorkerPool,
    directory: Path,
    settings: dict[str, Any],
    mask: Mask = Mask.causal(),  # noqa: B008
) -> list[dict[str, Any]]:
    return workers.run(range(RANKS), traced, settings, mask, directory)


@pytest.fixture(scope="module")
def double(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("double")
    run(workers, directory, SETTINGS["burst double"])
    return directory


@pytest.mark.parametrize("name", SETTINGS)
def test_the_trace_has_the_tiles_and_messages_of_the_plan(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    expected = run(workers, tmp_path, SETTINGS[name])
    for ours, found in zip(expected, load(tmp_path), strict=True):
        check_counts(found, ours)


def test_so_it_is_where_a_window_is_sent_straight(workers: WorkerPool, tmp_path: Path) -> None:
    expected = run(workers, tmp_path, {}, Mask.causal(window=4))
    for ours, found in zip(expected, load(tmp_path), strict=True):
        check_counts(found, ours)


def check_counts(found: RankTrace, expected: dict[str, Any]) -> None:
    calls = calls_of([found])
    names = Counter(call.name for call in calls)
    assert names.pop("head exchange", 0) in (0, 4)  # of q, k, v and of the output, and back
    assert names == {"forward": 1, "backward": 1}, "the traced step alone"
    for call in calls:
        assert call.miscounts == []
        assert call.call.arguments["training_step"] == 7
        if call.name in expected:
            counted = tuple(len(call.events[kind]) for kind in ("tile", "send", "receive"))
            assert counted == expected[call.name]
        # Times are in files to the nanosecond, in floats since 1970 to the microsecond.
        parts = [event for kind in ("post", "tile", "sum", "wait") for event in call.events[kind]]
        assert all(
            call.call.start - 1e-6 <= p.start <= p.stop <= call.call.stop + 1e-6 for p in parts
        )
        assert sum(part.seconds for part in parts) <= call.call.seconds + 1e-6
    sent = sum(e.arguments["bytes"] for call in calls for e in call.events["send"])
    assert sent == expected["sent"]


def test_the_command_joins_draws_and_predicts(
    double: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace.main([str(double), "--link-gbit", "100", "10"]) == 0
    shown = capsys.readouterr().out
    assert "peer late" in shown and "waits most" in shown
    joined = json.loads((double / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in joined} == set(range(RANKS))
    assert Counter(e["ph"] for e in joined)["b"] == Counter(e["ph"] for e in joined)["e"] > 0
    written = json.loads((double / "exposed.json").read_text())
    (whole,) = [row for row in written["rows"] if row["name"] == "attention"]
    assert 0 < whole["late"] <= whole["waiting"] < whole["seconds"]
    assert whole["share"] == pytest.approx(whole["waiting"] / whole["seconds"])
    assert (double / "timeline.svg").read_text().startswith("<?xml")
    assert (double / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_slower_links_are_predicted_to_be_waited_for(double: Path) -> None:
    calls = calls_of(load(double))
    channels = {e.arguments["channel"] for c in calls for e in c.events["send"]}
    fast, slow = (
        exposures(calls, dict.fromkeys(channels, seconds))[-1] for seconds in (1e-15, 1e-3)
    )
    assert fast.predicted_share < 0.2 and slow.predicted_share > 0.9
    assert fast.share == slow.share, "what was measured stays"


def test_a_trace_without_a_tile_of_the_plan_is_told(
    double: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(RANKS):
        content = json.loads(file_of(double, rank).read_text())
        if rank == 2:
            events = content["traceEvents"]
            events.remove(next(e for e in events if e.get("cat") == "tile"))
        file_of(tmp_path, rank).write_text(json.dumps(content))
    assert trace.main([str(tmp_path)]) == 1
    assert "rank 2, call 0 (forward): 3 tiles, planned 4" in capsys.readouterr().err


def test_traces_that_are_not_whole_are_refused(double: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no trace"):
        load(tmp_path)
    for rank in (0, 1, 3):
        file_of(tmp_path, rank).write_text(file_of(double, rank).read_text())
    with pytest.raises(TraceError, match="ranks 0, 1, 3, but that run had 4 ranks"):
        load(tmp_path)
    file_of(tmp_path, 2).write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match="is no trace of --burst-trace"):
        load(tmp_path)


def test_a_recorder_that_is_off_hands_out_one_object() -> None:
    recorder = Recorder(HostClock())
    assert recorder.sum(0) is recorder.wait(1) is recorder.call("forward", Plan(0, ()), ())
    recorder.start(1)
    assert recorder.wait(0) is recorder.sum(0), "outside of a call, too"


class FakeEvent:
    """A CUDA event whose time is the number of events before it."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.milliseconds, FakeEvent.made = FakeEvent.made, FakeEvent.made + 1

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.milliseconds - self.milliseconds


def test_on_a_gpu_the_host_waits_at_the_start_and_at_the_end_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("synchronize"))
    recorder = Recorder(DeviceClock())
    recorder.start(2)
    recorder.start(3)
    with recorder.call("forward", Plan(0, ()), (0,)):
        for step in range(5):
            with recorder.wait(step):
                pass
    assert len(waits) == 1
    write(recorder, tmp_path, 0, 1)
    assert len(waits) == 2
    (call,) = calls_of(load(tmp_path))
    assert call.call.seconds == pytest.approx(11e-3) and call.waiting == pytest.approx(5e-3)


# The prediction


def test_ranks_wait_for_what_their_tiles_do_not_hide() -> None:
    def step(computing: float, rank: int, lands: int) -> Step:
        there, back = (
            Message(rank, 1 - rank, "c", lands, 3.0),
            Message(1 - rank, rank, "c", lands, 3.0),
        )
        return Step(computing, (there,), (back,))

    times = timeline({rank: [step(1.0, rank, 0), Step(4.0)] for rank in (0, 1)})
    assert [(t.start, t.computed, t.landed) for t in times[0]] == [(0, 1, 3), (3, 7, 7)]
    # Asked for a step earlier, it has arrived.
    times = timeline({rank: [step(1.0, rank, 1), Step(4.0)] for rank in (0, 1)})
    assert [t.waiting for t in times[1]] == [0, 0]


def test_messages_of_one_channel_go_one_after_the_other_and_wait_for_a_late_end() -> None:
    two = [Message(0, 1, "c", 1, 2.0), Message(0, 1, "c", 1, 2.0)]
    early = {0: [Step(0.0, two), Step(0.0)], 1: [Step(0.0, (), two), Step(0.0)]}
    assert timeline(early)[1][1].landed == 4
    apart = [Message(0, 1, "c", 1, 2.0), Message(0, 1, "d", 1, 2.0)]
    both = {0: [Step(0.0, apart), Step(0.0)], 1: [Step(0.0, (), apart), Step(0.0)]}
    assert timeline(both)[1][1].landed == 2
    one = two[:1]
    late = {0: [Step(0.0, one), Step(0.0)], 1: [Step(5.0), Step(0.0, (), one)]}
    assert timeline(late)[0][1].waiting == 7


def test_a_message_that_nobody_sends_is_an_error() -> None:
    with pytest.raises(ValueError, match="never get beyond the step named: {1: 0}"):
        timeline({0: [Step(1.0)], 1: [Step(1.0, (), [Message(0, 1, "c", 0, 1.0)])]})
