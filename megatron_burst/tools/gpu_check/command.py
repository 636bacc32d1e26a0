"""`megatron-burst gpu-check`: runs the stages and writes what they find."""

import importlib
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from rich.console import Console

from megatron_burst.tools import hardware, terminal
from megatron_burst.tools.arguments.gpu_check import RANKS, STAGES, parser
from megatron_burst.tools.gpu_check.ranks import refusal
from megatron_burst.tools.gpu_check.report import Report, Result
from megatron_burst.tools.gpu_check.stage import Check, Device
from megatron_burst.transport import lock
from megatron_burst.transport.nccl import loaded


def main(argv: list[str]) -> int:
    """Run the stages; return the exit status."""
    args = parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here; --device cpu runs the same on small sizes")
    console = Console(stderr=True, quiet=True) if args.json else terminal.console()
    args.output.mkdir(parents=True, exist_ok=True)  # where it cannot be, say so before all stages
    ranks = args.ranks or _ranks(args.device)
    device = Device(torch.device(args.device), args.output, ranks, say=partial(_say, console))
    name = torch.cuda.get_device_name() if device.is_gpu else f"CPU, {hardware.cpu_model()}"
    machine = hardware.describe("gpu-check", ["megatron-burst", "gpu-check", *argv])
    del machine["host"]  # the page is there to be shown
    results: list[Result] = []
    report = Report(device=name, machine=machine, results=results)
    with lock.held(args.output, say=lambda text: terminal.complain("gpu-check", [text])):
        for number in sorted(set(args.stage)):
            results.append(_run(number, device, console))
            page = report.write(args.output)  # also if the next one ends the process
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    console.print(f"report: {page}, {page.with_suffix('.json')}")
    terminal.complain("gpu-check", report.advice(args.output))
    return 1 if report.failed else 0


def _ranks(device: str) -> int:
    gpus = torch.cuda.device_count() if device == "cuda" else 4
    if gpus == 1:  # which two share where NCCL lets them
        return 4 if refusal(2, 1, loaded()) else 2
    return max(number for number in RANKS if number <= gpus)


def _say(console: Console, text: str) -> None:
    console.print(f"  ...    {text}")


def _run(number: int, device: Device, console: Console) -> Result:
    name, begun = STAGES[number - 1], time.perf_counter()
    module = importlib.import_module(f"{__package__}.{name}")
    about = (module.__doc__ or "").partition("\n")[0]
    console.print(f"[{number}/{len(STAGES)}] {name}: {about}")
    checks: list[Check] = []
    for check in _checks(module, device):
        checks.append(check)
        state = "FAILED" if not check.passed else "ok" if check.allowed else ""
        console.print(f"  {state:<6} {check.name}: {check.found} {check.allowed}".rstrip())
    seconds = time.perf_counter() - begun
    result = Result(number, name, about, module.REMEDY, seconds, checks)
    console.print(f"  {result.verdict} in {seconds:.0f} s")
    return result


def _checks(module: Any, device: Device) -> Iterator[Check]:
    """Yield what a stage finds, and as a failure what it raises: the next one runs all the same."""
    try:
        device.synchronize()  # an error of an earlier kernel is not this stage's
    except RuntimeError as error:
        text = f"{error}; run --stage with this number alone, into another --output"
        yield Check("an earlier stage has left the device in error", text, passed=False)
        return
    yield from device.guarded(module.check(device))
    with suppress(RuntimeError):  # of a device in error, which the next stage says
        device.free()
