"""What one variant amounts to, read from what its run wrote: losses, times, memory, messages."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import torch

from megatron_burst.tools import hardware, trace
from megatron_burst.tools.flops import logged_step_flops
from megatron_burst.tools.runlog import (
    BYTES_SENT,
    ITERATION_SECONDS,
    LOSS,
    PEAK_MEMORY,
    RunLogError,
    Series,
    read_arguments,
    read_scalars,
)

RAN, FAILED, LEFT_OUT = "ran", "failed", "cannot run"
WARM_UP = 5
"""How many of the first iteration times are left out, where twice as many exist."""
LAST = 10
"""Over how many of the last losses `learned_too_little` takes the mean."""
ENTROPY_MARGIN_NATS = 0.5
_STEPS_TO_LEARN = 100
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
    exposed: Mapping[str, float] | None = None
    """Of a rank and step: seconds of attention, exposed ones, their share, what of the
    communication is hidden. See `tools.trace`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest |a - b| / |b| of two runs' losses, nan if any is nan, and the step it is at."""

    relative: float
    step: int


def measure(
    name: str, command: Sequence[str], ranks: int, directory: Path, peak_tflops: float | None
) -> Result:
    """Read the run in `directory`.

    Raises:
        RunLogError: it logged no losses.
        TraceError: its profile cannot be read.
    """
    scalars = read_scalars(directory / "tensorboard")
    arguments = read_arguments(directory / "tensorboard")
    if not scalars.get(LOSS):
        raise RunLogError(f"{name}: the run logged no {LOSS!r}; it has {sorted(scalars)}")
    seconds = _after_warm_up(scalars.get(ITERATION_SECONDS, []))
    memory = [value for _, value in scalars.get(PEAK_MEMORY, [])]
    sent = [count for _, count in scalars.get(BYTES_SENT, [])]
    tokens = int(arguments["seq_length"]) * int(arguments["global_batch_size"])
    mfu, no_mfu = _mfu(arguments, seconds, ranks, peak_tflops)
    return Result(
        name=name,
        status=RAN,
        command=list(command),
        ranks=ranks,
        steps=len(scalars[LOSS]),
        losses=scalars[LOSS],
        seconds_per_step=seconds,
        tokens_per_second_per_gpu=tokens / seconds / ranks if seconds else None,
        mfu=mfu,
        no_mfu=no_mfu,
        peak_memory_bytes=memory[-1] if memory else None,
        bytes_sent_per_rank_per_step=fmean(sent) if sent else None,
        exposed=_exposed(directory / "torch_profile"),
    )


def differences(
    results: Sequence[Result], reference: str, first: int | None = None
) -> dict[str, Difference]:
    """Return, by name, how far losses of the `first` steps (None: all) are from the reference's.

    Raises:
        RunLogError: two runs did not log the same steps.
    """
    losses = {result.name: result.losses for result in results if result.status == RAN}
    expected = losses.pop(reference)
    found = {}
    for name, series in losses.items():
        if [step for step, _ in series] != [step for step, _ in expected]:
            raise RunLogError(
                f"{name!r} logged {len(series)} steps, {reference!r} logged {len(expected)}: "
                "runs can be compared only step by step"
            )
        pairs = zip(series[:first], expected[:first], strict=True)
        apart = [(abs(a - b) / abs(b) if b else math.nan, step) for (step, a), (_, b) in pairs]
        relative, step = max(apart, key=lambda x: math.inf if math.isnan(x[0]) else x[0])
        found[name] = Difference(relative=relative, step=step)
    return found


def learned_too_little(result: Result, entropy: float | None) -> str:
    """Return why a long run of the toy did not learn: nothing where it did, or was short."""
    if entropy is None or result.status != RAN or result.steps < _STEPS_TO_LEARN:
        return ""
    mean = fmean(loss for _, loss in result.losses[-LAST:])
    if mean <= entropy - ENTROPY_MARGIN_NATS:
        return ""
    return (
        f"{result.name} ends at a loss of {mean:.3f}, not {entropy - ENTROPY_MARGIN_NATS:.3f} or "
        f"less, {ENTROPY_MARGIN_NATS} nat under the unigram entropy: train longer"
    )


def _after_warm_up(times: Series) -> float | None:
    seconds = [value for _, value in times]
    kept = seconds[WARM_UP:] if len(seconds) >= 2 * WARM_UP else seconds
    return median(kept) if kept else None


def _mfu(
    arguments: Mapping[str, str], seconds: float | None, ranks: int, peak: float | None
) -> tuple[float | None, str]:
    if peak is None:
        return None, "the device's peak is not known (--peak-tflops)"
    flops, why_not = logged_step_flops(arguments)
    if flops is None or seconds is None:
        return None, why_not or "no step was timed"
    return flops / (seconds * ranks * peak * 1e12), ""


def _exposed(directory: Path) -> Mapping[str, float] | None:
    if not directory.is_dir():
        return None
    content = trace.summary(directory)
    rows = [row for row in content["rows"] if row["name"] == trace.ATTENTION]
    names = ("seconds", "communication", "exposed", "bytes_sent")
    found = {name: fmean(row[name] for row in rows) / content["steps"] for name in names}
    communication = found["communication"] or 1.0
    found["share"] = found["exposed"] / found["seconds"]
    return found | {"hidden": 1 - found["exposed"] / communication}


def device_name() -> str:
    """Return the name of the GPU, or of the processor where there is none."""
    return torch.cuda.get_device_name(0) if gpus() else hardware.cpu_model()


def gpus() -> int:
    """Return how many GPUs a training uses here: none with MEGATRON_BURST_CPU=1."""
    on_cpu = os.environ.get("MEGATRON_BURST_CPU") == "1"
    return 0 if on_cpu or not torch.cuda.is_available() else torch.cuda.device_count()


def machine() -> dict[str, str]:
    """Return what the runs were made on, and with which versions."""
    found = {
        "device": device_name(),
        "processor": hardware.cpu_model(),
        "system": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
    }
    return found | {name: text for name in _PACKAGES if (text := hardware.installed(name))}
