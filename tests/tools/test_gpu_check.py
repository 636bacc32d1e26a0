"""The verb gpu-check on the CPU: every stage passes, and fails on a planted error. (fast tier)

The stages that start processes, ranks and training, are slow.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from megatron_burst import linear_cross_entropy
from megatron_burst.attention import kv as keys
from megatron_burst.attention.saved import AttentionMemory, SavedRows
from megatron_burst.attention.sums import PartialOutputs, Sums
from megatron_burst.kernels import KernelInput
from megatron_burst.kernels.cpu import CpuKernel
from megatron_burst.plans.choice.head_parallel import HeadGroups
from megatron_burst.plans.schedules.plan import Send
from megatron_burst.tools.arguments.gpu_check import STAGES
from megatron_burst.tools.gpu_check import (
    command,
    kernels,
    loss,
    machine,
    memory,
    recompute,
    rings,
    tiles,
    training,
)
from megatron_burst.tools.gpu_check.one_process import Post, ThreadedCommunicator, run_all
from megatron_burst.tools.gpu_check.report import Report, Result
from megatron_burst.tools.gpu_check.stage import Check, Device, at_least, at_most
from megatron_burst.tools.one_rank import Sizes
from megatron_burst.transport import lock
from megatron_burst.transport.comm import Transfers
from megatron_burst.transport.errors import CommunicationError
from tests.attention.faults import lost_gradient, stale_buffer, swapped_chunk

pytestmark = pytest.mark.usefixtures("little_to_collect")

QUIET, CPU = Console(quiet=True), Device(torch.device("cpu"), Path())
IN_PROCESS = [str(number) for number, name in enumerate(STAGES, 1) if number < 8]


def test_every_stage_of_one_process_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--device", "cpu", "--json", "--output", str(tmp_path), "--stage", *IN_PROCESS]
    status = command.main(flags)
    content = json.loads(capsys.readouterr().out)
    faults = [c for s in content["stages"] for c in s["checks"] if not c["passed"]]
    assert status == 0 and content["passed"], faults
    assert [stage["name"] for stage in content["stages"]] == STAGES[:7]
    assert content == json.loads((tmp_path / "gpu-check.json").read_text())
    page = (tmp_path / "gpu-check.md").read_text()
    assert page.startswith("# GPU check: 7 of 7 stages passed") and "## 3. rings: passed" in page
    lines = {check["name"]: check for stage in content["stages"] for check in stage["checks"]}
    settings = {name.partition(" nodes, ")[2] for name in lines if " nodes, " in name}
    assert settings == set(rings._SETTINGS), "every schedule was compared"
    assert not any(c["allowed"] for n, c in lines.items() if "speed" in n or "tokens a rank" in n)


def test_one_ranks_share_is_timed_beside_a_call_of_as_many_flops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Device, "seconds", lambda *_: 1.0)
    found = [*tiles._rows(CPU, Sizes(64, 4, 2, 32))]
    names = ["one call, 192 tokens", "a rank of 8, kv ring", "a rank of 8, query ring"]
    assert [name for name, *_ in found[::2]] == [f"{name}, forward" for name in names]
    assert {speed for _, speed, _ in found[:2]} == {1.0} and found[0][2] > 0
    assert [speed for _, speed, _ in found[2:]] == pytest.approx([1.0] * 4, rel=0.15)


# Planted errors: which stage, of which object what is replaced, and by what.


def scaled(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any) -> Any:
        dq, dk, dv = original(*args)
        return dq, dk * 1.03, dv

    return backward


def mixed_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """The sequences of a batch change places."""

    def forward(*args: Any) -> Any:
        out, lse = original(*args)
        return out.flip(0), lse

    return forward


def broken(_: Any) -> Callable[..., Any]:
    def forward(*_: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")

    return forward


def wrong_merge(original: Callable[..., Any]) -> Callable[..., Any]:
    """Parts count as much as their rows say, not as their log-sum-exps do."""

    def accumulate(self: PartialOutputs, total: Any, rows: Any, parts: Any) -> None:
        original(self, total, rows, (parts[0], parts[1] + 0.1))

    return accumulate


def early_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """Land without waiting."""

    def wait(self: ThreadedCommunicator, posted: Any) -> None:
        if posted.batch.where.startswith("forward"):
            return
        original(self, posted)

    return wait


def early_write(original: Callable[..., Any]) -> Callable[..., Any]:
    """Write to what is still being sent."""

    def post(self: Transfers, number: int) -> None:
        original(self, number)
        for message in (m for batch in self._steps[number].batches for m in batch.messages):
            if isinstance(message.transfer, Send):
                message.bytes(self._own, self._memory).add_(1)

    return post


def waits(original: Callable[..., Any]) -> Callable[..., Any]:
    def accumulate(self: PartialOutputs, total: Any, rows: Any, parts: Any) -> None:
        if parts[1].max().item() > -torch.inf:
            original(self, total, rows, parts)

    return accumulate


LEAKED: list[Tensor] = []


def hoards(original: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that keeps its workspace."""

    def forward(self: CpuKernel, tile: KernelInput) -> Any:
        LEAKED.append(tile.q.float())
        return original(self, tile)

    return forward


def leaks(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: AttentionMemory, row: int, out: Tensor, lse: Tensor) -> None:
        LEAKED.append(out.clone())
        original(self, row, out, lse)

    return save


def other_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    def put(self: SavedRows, out: Tensor, lse: Tensor) -> None:
        original(replace(self, out_BSHD=self.out_BSHD.flip(1)), out, lse)

    return put


def other_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **more: linear_cross_entropy(*args, z_loss=0.01, **more)


def other_last_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def losses(*args: Any, **more: Any) -> Tensor:
        every = linear_cross_entropy(*args, **more)
        return torch.cat([every[:-1], 1.5 * every[-1:]]) if every.dim() else every

    return losses


def all_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **_: loss.all_logits(*args, reduction="none")


def rounded(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: original(a, b).bfloat16().float()


FAULTS: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "a kernel that cannot start": ("machine", CpuKernel, "forward", broken),
    "a wrong gradient": ("kernels", CpuKernel, "backward", scaled),
    "a wrong merge": ("rings", PartialOutputs, "accumulate", wrong_merge),
    "sequences mixed up": ("rings", CpuKernel, "forward", mixed_up),
    "an early read": ("rings", ThreadedCommunicator, "wait", early_read),
    "an early write": ("rings", Transfers, "post", early_write),
    "a stale buffer": ("rings", Transfers, "land", stale_buffer),
    "a lost gradient": ("rings", Sums, "take", lost_gradient),
    "a swapped rank": ("rings", HeadGroups, "ring_layout", swapped_chunk),
    "a rounded gradient of latents": ("rings", keys, "_product", rounded),
    "the host waits": ("tiles", PartialOutputs, "accumulate", waits),
    "more memory": ("memory", CpuKernel, "forward", hoards),
    "another loss": ("loss", loss, "linear_cross_entropy", other_loss),
    "another loss of the last token": ("loss", loss, "linear_cross_entropy", other_last_loss),
    "a loss of all logits": ("loss", loss, "linear_cross_entropy", all_at_once),
    "saved rows in another order": ("recompute", SavedRows, "put", other_rows),
    "a leak": ("recompute", AttentionMemory, "save", leaks),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_error_fails_its_stage(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, holder, name, make = FAULTS[fault]
    monkeypatch.setattr(rings, "_SETTINGS", {"kv ring": rings._SETTINGS["kv ring"]})
    monkeypatch.setattr(memory, "_RINGS", memory._RINGS[:1])
    monkeypatch.setattr(recompute, "_FRACTIONS", (0.5,))
    monkeypatch.setattr(kernels, "cases", lambda **_: kernels.CORNERS[2:5])
    monkeypatch.setattr(holder, name, make(getattr(holder, name)))
    result = run(stage)
    assert result.verdict == "failed" and result.faults
    LEAKED.clear()


def test_waits_are_no_errors_any_more_where_a_rank_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    gpu: Any = SimpleNamespace(is_gpu=True)
    with pytest.raises(RuntimeError, match="a kernel"), tiles._errors_for_waits(gpu):
        raise RuntimeError("a kernel")
    assert modes == ["error", "default"]


def run(stage: str, device: Device = CPU) -> Result:
    return command._run(STAGES.index(stage) + 1, device, QUIET)


def test_ranks_of_one_process_call_kernels_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As flash-attn 4 compiles: of first calls at the same time all fail."""
    whole, calls = CpuKernel.forward, threading.Lock()

    def forward(self: CpuKernel, tile: KernelInput) -> Any:
        assert calls.acquire(blocking=False), "two calls at a time"
        try:
            time.sleep(1e-3)
            return whole(self, tile)
        finally:
            calls.release()

    monkeypatch.setattr(CpuKernel, "forward", forward)
    monkeypatch.setattr(rings, "_SETTINGS", {"kv ring": rings._SETTINGS["kv ring"]})
    result = run("rings")
    assert result.verdict == "passed", result.faults


def test_what_auto_takes_is_held_against_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"first": CpuKernel(), "second": CpuKernel()}
    monkeypatch.setattr(Device, "kernels", lambda *_: both)
    monkeypatch.setattr(Device, "judged", lambda _, check: check)
    times = iter([2.0] * 4 + [1.0] * 4)
    monkeypatch.setattr(Device, "seconds", lambda *_: next(times))
    *rows, last = machine._speeds(CPU)
    assert len(rows) == 4 and rows[0].name == "first, 128 tokens, full"
    assert last.found == "0.500 (first beside second)" and not last.passed


NOTHING: Any = (1, 0, None, 1)


def test_a_message_that_nobody_sends_is_named() -> None:
    post = Post()

    def fail() -> None:
        raise ValueError("this rank sends nothing")

    with pytest.raises(RuntimeError, match="rank 1: ValueError: this rank sends nothing"):
        run_all(post, [lambda: post.take(NOTHING, "receive kv"), fail])
    with pytest.raises(CommunicationError, match="nobody sent what was to receive kv"):
        Post(patience=0.01).take(NOTHING, "receive kv")


def test_what_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other cases, kernels and schedules are looked at; a refusal is one of kernels alone."""
    whole = CpuKernel.forward

    def forward(self: CpuKernel, tile: KernelInput) -> Any:
        if tile.q.shape[1] == 1:
            raise RuntimeError("no engine serves one query\nmore")
        return whole(self, tile)

    monkeypatch.setattr(CpuKernel, "forward", forward)
    monkeypatch.setattr(kernels, "cases", lambda **_: kernels.CORNERS[2:5])
    result = run("kernels")
    assert [c.name.partition(":")[0] for c in result.faults] == [
        *("cpu, case 1", "cpu, case 2", "cpu, the worst case")
    ]
    assert "inf of RuntimeError: no engine serves one query" in result.faults[0].found

    def refused(_: Any, __: Any, case: Any, ___: Any) -> Any:
        kernel = "no kernel can serve this\n  cpu: a reason"
        raise ValueError(kernel if case.setting == "ring" else "documents do not fit")

    monkeypatch.setattr(rings, "run", refused)
    monkeypatch.setattr(rings, "_SETTINGS", {"kv ring": {}, "ring": {}})
    result = run("rings")
    assert [c.name for c in result.faults] == ["cpu, 4 ranks, kv ring: ValueError"]
    assert [c.found for c in result.checks if "refused" in c.name] == ["cpu: a reason"] * 2
    assert "latents, error of k" in [c.name for c in result.checks]


def test_a_device_in_error_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Device, "free", lost)
    monkeypatch.setattr(Device, "timed", lost)
    assert run("machine").verdict == "failed"
    monkeypatch.setattr(Device, "synchronize", lost)
    (said,) = run("loss").checks
    assert said.name == "an earlier stage has left the device in error" and not said.passed


# The stages that start processes.


@pytest.mark.parametrize(("apart", "verdict"), [(0.0, "passed"), (0.3, "failed")])
def test_losses_that_differ_fail_the_training(
    apart: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained: the results are made up."""
    pytest.importorskip("tensorboard")
    from megatron_burst.tools.compare import results, running, toy

    def made_up(_: Any, variant: Any, *__: Any) -> Any:
        more = apart if "chunked" in variant.name else 0.0
        losses = [(step, 5.0 - step / 20 + more) for step in range(1, 6)]
        return results.Result(name=variant.name, status=results.RAN, losses=losses, steps=5)

    monkeypatch.setattr(running.Series, "run", made_up)
    monkeypatch.setattr(toy, "make_toy", lambda *_: [])
    assert run("training", replace(CPU, folder=tmp_path)).verdict == verdict


def test_without_megatron_the_training_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "find_spec", lambda _: None)
    result = run("training")
    assert result.verdict == "passed" and "pip install" in result.checks[0].found


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ranks", "training"])
def test_a_stage_of_processes_passes(stage: str, tmp_path: Path) -> None:
    result = run(stage, replace(CPU, folder=tmp_path))
    assert result.verdict == "passed", result.faults


# What is said.


def test_a_failure_says_what_to_do_and_what_to_report(tmp_path: Path) -> None:
    checks = [at_most("error of a|b", float("nan"), 1.0), at_least("speed", 0.9, 0.8)]
    wrong = Result(
        number=2, name="kernels", about="About.", remedy="do this", seconds=1.0, checks=checks
    )
    right = replace(wrong, number=3, checks=[Check("x", "1")])
    machine = {"time": "today", "versions": {"torch": "2.11"}, "command": ["megatron-burst"]}
    report = Report(device="d", machine=machine, results=[wrong, right])
    page = report.write(tmp_path).read_text()
    assert page.startswith("# GPU check: 1 of 2 stages passed")
    assert "* stage 2, kernels, failed: do this" in page and "gpu-check.json" in page
    assert "| error of a/b | nan | <= 1 | **failed** |" in page
    assert replace(right, checks=[]).verdict == "failed", "a stage that looked at nothing"


def test_on_a_gpu_times_are_between_events_and_memory_is_the_allocators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = SimpleNamespace(record=int, synchronize=int, elapsed_time=lambda _: 2.0)
    stand_ins: dict[str, Any] = {
        "Event": lambda **_: event,
        "memory_allocated": lambda _: 100,
        "max_memory_allocated": lambda _: 350,
    }
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        stand_ins[name] = lambda *_: None
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = Device(torch.device("cuda"), Path())
    assert device.seconds(lambda: None) == 2e-3
    assert device.peak(lambda: None, ()) == 250
    assert device.left_behind(lambda: None) == 0
    failed = at_least("speed", 0.5, 0.8)
    assert device.judged(failed) == failed
    assert CPU.judged(failed).passed


def test_without_a_gpu_it_says_how_to_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no GPU here; --device cpu runs the same"):
        command.main([])


def test_two_checks_do_not_share_an_output(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--stage", "6", "--output", str(tmp_path)]
    with lock.held(tmp_path, say=print), pytest.raises(ValueError, match="is in use by a process"):
        command.main(words)
    assert [file.name for file in tmp_path.iterdir()] == [lock.NAME]


@pytest.mark.parametrize("records", [False, True])
def test_memory_of_messages_that_waits_for_nccl_is_noticed(
    records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, buffers, owned = list[torch.Tensor](), list[bytearray](), list[int]()

    def record(x: torch.Tensor, _: Any) -> None:
        if records or x.untyped_storage()._cdata == owned[-1]:  # no alias
            held.append(x)

    def empty(size: int, **_: Any) -> torch.Tensor:
        """As a GPU's allocator: in the first buffer that no tensor has; a CPU's may take others."""
        free = (n for n in range(len(buffers)) if sys.getrefcount(buffers[n]) == 2)
        if (number := next(free, len(buffers))) == len(buffers):
            buffers.append(bytearray(size))
        made = torch.frombuffer(buffers[number], dtype=torch.uint8)
        owned.append(made.untyped_storage()._cdata)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(memory, "_LAGGING", 64)
    monkeypatch.setattr(Device, "is_gpu", True)
    monkeypatch.setattr(Device, "free", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    message, tensor = memory._while_a_message_lags(CPU)
    assert message.passed is not records and tensor.found == "waits for it" and tensor.passed
