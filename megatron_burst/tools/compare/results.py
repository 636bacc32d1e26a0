"""What one variant amounts to, read from what its run wrote: losses, times, memory, messages."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_burst.tools import hardware
from megatron_burst.tools.flops import logged_step_flops
from megatron_burst.tools.report import Difference, largest_difference, summarize
from megatron_burst.tools.runlog import (
    LOSS,
    PEAK_MEMORY,
    Series,
    read_arguments,
    read_scalars,
)
from megatron_burst.tools.trace import summary
from megatron_burst.transport.chrome_trace import TraceError

RAN, FAILED, LEFT_OUT = "ran", "failed", "cannot run"
_PACKAGES = (
    "megatron-burst",
    "megatron-core",
    "torch",
    "transformer-engine",
    "flash-attn",
    "numpy",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One row; a figure is None where the run did not write it or it has no meaning here."""

    name: str
    status: str
    reason: str = ""
    command: Sequence[str] = ()
    ranks: int = 0
    steps: int = 0
    losses: Series = field(default_factory=list)
    seconds_per_step: float | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    no_mfu: str = ""
    peak_memory_bytes: float | None = None
    bytes_sent_per_rank_per_step: float | None = None
    exposed: Mapping[str, Any] | None = None
    """Of all attention calls, as `tools.trace` has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """How far a variant's losses are from the reference's."""

    first: Difference
    """In the steps that are judged."""
    overall: Difference


def measure(
    name: str, command: Sequence[str], ranks: int, directory: Path, peak_tflops: float | None
) -> Result:
    """Read the run in `directory`.

    Raises:
        RunLogError: it logged no losses.
    """
    scalars = read_scalars(directory / "tensorboard")
    arguments = read_arguments(directory / "tensorboard")
    tokens = int(arguments["seq_length"]) * int(arguments["global_batch_size"])
    run = summarize(name, scalars, tokens)
    memory = [value for _, value in scalars.get(PEAK_MEMORY, [])]
    mfu, no_mfu = _mfu(arguments, run.seconds_per_step, ranks, peak_tflops)
    speed = run.tokens_per_second
    return Result(
        name=name,
        status=RAN,
        command=list(command),
        ranks=ranks,
        steps=run.steps,
        losses=scalars[LOSS],
        seconds_per_step=run.seconds_per_step,
        tokens_per_second_per_gpu=None if speed is None else speed / ranks,
        mfu=mfu,
        no_mfu=no_mfu,
        peak_memory_bytes=memory[-1] if memory else None,
        bytes_sent_per_rank_per_step=run.bytes_sent_per_rank_per_step,
        exposed=_exposed(directory / "trace"),
    )


def _mfu(
    arguments: Mapping[str, str], seconds: float | None, ranks: int, peak: float | None
) -> tuple[float | None, str]:
    if peak is None:
        return None, "the device's peak is not known (--peak-tflops)"
    flops, why_not = logged_step_flops(arguments)
    if flops is None or seconds is None:
        return None, why_not or "no step was timed"
    return flops / (seconds * ranks * peak * 1e12), ""


def _exposed(directory: Path) -> Mapping[str, Any] | None:
    if not directory.is_dir():
        return None
    content, _ = summary(directory)
    if content["miscounts"]:
        raise TraceError(f"{directory}: {content['miscounts'][0]}")
    (whole,) = [row for row in content["rows"] if row["name"] == "attention"]
    return {**whole, "training_steps": len(content["training_steps"]), "ranks": content["ranks"]}


def apart(results: Sequence[Result], reference: str, steps: int) -> dict[str, Apart]:
    """Return, by name, how far the losses of each variant that ran are from the reference's."""
    losses = {result.name: result.losses for result in results if result.status == RAN}
    found = {}
    for name in losses:
        if name == reference:
            continue
        pair = {name: losses[name], reference: losses[reference]}
        first, overall = largest_difference(pair, steps), largest_difference(pair)
        assert first is not None and overall is not None
        found[name] = Apart(first=first, overall=overall)
    return found


def device_name() -> str:
    """Return the name of the GPU, or of the processor where there is none."""
    if torch.cuda.is_available() and os.environ.get("MEGATRON_BURST_CPU") != "1":
        return torch.cuda.get_device_name(0)
    return hardware.cpu_model()


def machine() -> dict[str, str]:
    """Return what the runs were made on, and with which versions."""
    found = {
        "device": device_name(),
        "processor": hardware.cpu_model(),
        "system": platform.platform(),
    }
    found["cores"] = str(len(os.sched_getaffinity(0)))
    found["python"] = platform.python_version()
    found |= {name: text for name in _PACKAGES if (text := hardware.installed(name))}
    return found
