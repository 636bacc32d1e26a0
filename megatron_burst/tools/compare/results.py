"""What one variant amounts to, read from what its run wrote: losses, times, memory, messages."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles

import torch

from megatron_burst.cpu_platform.platform import cpu_platform_wanted
from megatron_burst.tools import hardware, runlog, terminal, trace
from megatron_burst.tools.flops import logged_step_flops

RAN, FAILED, LEFT_OUT = "ran", "failed", "cannot run"
_OF_A_JOB = "SLURM_", "MASTER_", "CUDA_VISIBLE_", "BURST_"  # of a start, not of a training
WARM_UP = 5
"""How many of the first iteration times are left out, where twice as many exist."""

FIGURES: terminal.Columns = {
    "step ms": ("seconds_per_step", 1e3, "{:,.0f}"),
    "tokens/s a rank": ("tokens_per_second_per_gpu", 1, "{:,.0f}"),
    "MFU %": ("mfu", 100, "{:.1f}"),
    "peak GiB": ("peak_memory_bytes", 2**-30, "{:.2f}"),
    "sent MiB": ("bytes_sent_per_rank_per_step", 2**-20, "{:,.1f}"),
    "max/mean": ("imbalance", 1, "{:.3f}"),
    "exposed ms": ("exposed", 1e3, "{:,.1f}"),
    "exposed %": ("share", 100, "{:.0f}"),
    "hidden %": ("hidden", 100, "{:.0f}"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One row; a figure is None where the run did not write it or it has no meaning here."""

    name: str
    status: str
    reason: str = ""
    command: Sequence[str] = ()
    dropped: Sequence[str] = ()  # of the common flags: they have no effect here
    ranks: int = 0
    steps: int = 0
    losses: runlog.Series = field(default_factory=list)
    seconds_per_step: float | None = None
    quartiles: tuple[float, float] | None = None
    """Seconds that a quarter, and three quarters, of the steps take at most."""
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    peak_memory_bytes: float | None = None
    bytes_sent_per_rank_per_step: float | None = None
    documents: float | None = None  # of a micro-batch
    imbalance: float | None = None  # FLOPs of attention, max/mean over the ranks
    exposed: Mapping[str, float | None] | None = None
    """Of a rank and step: seconds of attention, exposed ones, their share, what of the
    communication is hidden, None where nothing is sent. See `tools.trace`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest |a - b| / |b| of two runs' losses, nan if any is nan, and the step it is at."""

    relative: float
    step: int


def measure(
    name: str, directory: Path, peak_tflops: float | None, command: Sequence[str] = ()
) -> Result:
    """Read the run in `directory`.

    Raises:
        ValueError: it logged no losses, or its profile cannot be read.
    """
    scalars = runlog.read_scalars(directory / "tensorboard")
    arguments = runlog.read_arguments(directory / "tensorboard")
    if not (losses := scalars.get(runlog.LOSS)):
        raise ValueError(f"{name}: the run logged no {runlog.LOSS!r}; it has {sorted(scalars)}")
    times = [value for _, value in scalars.get("iteration-time", [])]
    times = times[WARM_UP:] if len(times) >= 2 * WARM_UP else times
    last = {name: series[-1][1] for name, series in scalars.items()}
    ranks, seconds = int(arguments["world_size"]), median(times) if times else None
    batches = {int(size) for _, size in scalars.get("batch-size", ())}  # it may be ramped up
    batch = int(arguments["global_batch_size"]) if not batches else batches.pop()
    tokens = 0 if batches else int(arguments["seq_length"]) * batch
    flops = logged_step_flops(arguments | {"global_batch_size": str(batch)}) if tokens else None
    return Result(
        name=name,
        status=RAN,
        command=list(command),
        ranks=ranks,
        steps=len(losses),
        losses=losses,
        seconds_per_step=seconds,
        quartiles=(quantiles(times)[0], quantiles(times)[2]) if len(times) > 1 else None,
        tokens_per_second_per_gpu=tokens / seconds / ranks if tokens and seconds else None,
        mfu=flops / (seconds * ranks * peak_tflops * 1e12)
        if flops and seconds and peak_tflops
        else None,
        peak_memory_bytes=last.get("burst/peak-memory-bytes"),
        bytes_sent_per_rank_per_step=last.get("burst/bytes-sent-per-rank"),
        documents=last.get("burst/documents"),
        imbalance=last.get("burst/imbalance"),
        exposed=_exposed(directory / "torch_profile"),
    )


def _exposed(directory: Path) -> Mapping[str, float | None] | None:
    if not directory.is_dir():
        return None
    content = trace.summary(directory)
    rows = [row for row in content["rows"] if row["name"] == trace.ATTENTION]
    names = ("seconds", "communication", "exposed", "bytes_sent")
    means = {name: fmean(row[name] for row in rows) / content["steps"] for name in names}
    hidden = trace.hidden(means["exposed"], means["communication"])
    return means | {"share": means["exposed"] / means["seconds"], "hidden": hidden}


def differences(results: Sequence[Result], reference: str, first: int) -> dict[str, Difference]:
    """Return, by name, how far losses of the `first` steps are from the reference's.

    Of them those that both logged: a run may end before another, by a limit of its time.

    Raises:
        ValueError: there is no such step.
    """
    losses = {result.name: dict(result.losses) for result in results if result.status == RAN}
    expected = [*losses.pop(reference).items()][:first]
    by_name = {}
    for name, series in losses.items():
        pairs = [(series[step], b, step) for step, b in expected if step in series]
        if not pairs:
            raise ValueError(f"{name!r} logged none of the first {first} steps of {reference!r}")
        apart = [(abs(a - b) / abs(b) if b else math.nan, step) for a, b, step in pairs]
        relative, step = max(apart, key=lambda x: math.inf if math.isnan(x[0]) else x[0])
        by_name[name] = Difference(relative=relative, step=step)
    return by_name


def gpus() -> int:
    """Return how many GPUs a training uses here: none with MEGATRON_BURST_CPU=1."""
    return 0 if cpu_platform_wanted() else torch.cuda.device_count()


def machine() -> dict[str, str]:
    """Return what the runs were made on, with which versions and under which settings."""
    processor, settings = hardware.cpu_model(), hardware.settings(os.environ)
    return {
        "device": torch.cuda.get_device_name(0) if gpus() else processor,
        "processor": processor,
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **hardware.versions(),
        **{name: x for name, x in settings.items() if not name.startswith(_OF_A_JOB)},
    }
