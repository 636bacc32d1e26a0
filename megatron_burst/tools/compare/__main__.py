"""Trains one model on the same data through several algorithms and writes one report of all.

    python -m megatron_burst.tools.compare --toy
    python -m megatron_burst.tools.compare --ranks 8 --output DIR -- MEGATRON-FLAGS

runs `megatron_burst.pretrain_gpt` once for each variant: the same seed, data and model, another
--context-parallel-algo. --dry-run lists the variants, and why some cannot run here. What is
finished is kept: the same command goes on where it was interrupted. The report is DIR/compare.html,
a page without links to anything outside, and DIR/compare.json.

Ends with status 1 if a variant failed, or if in the first --judged-steps the losses of one differ
from those of the reference, one context-parallel rank, by more than --tolerance.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from megatron_burst.tools.extras import extra

with extra("train,plot", __name__):
    from megatron_burst.tools.compare.page import Comparison, write_report
    from megatron_burst.tools.compare.results import (
        FAILED,
        LEFT_OUT,
        RAN,
        Apart,
        Result,
        apart,
        device_name,
        machine,
    )
    from megatron_burst.tools.compare.running import Report, Series
    from megatron_burst.tools.compare.toy import RANKS, RANKS_PER_NODE, make_toy
    from megatron_burst.tools.compare.variants import REFERENCES, Job, Variant, choose, variants
    from megatron_burst.tools.exposure import calls_of, load
    from megatron_burst.tools.flops import peak_tflops
    from megatron_burst.tools.timeline_figure import draw_timeline

_OURS = (
    "--context-parallel-algo",
    "--cp-comm-type",
    "--hierarchical-context-parallel-sizes",
    "--attention-backend",
    "--burst-backward",
    "--burst-topology",
    "--burst-ranks-per-node",
    "--burst-head-parallel-size",
    "--burst-trace",
    "--tensorboard-dir",
    "--save",
)
"""What the comparison sets itself; with --save the variants would read each other's checkpoints."""
_COMPARABLE = ("--calculate-per-token-loss", "--attention-dropout", "0", "--hidden-dropout", "0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_burst.tools.compare", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help=f"a small GPT on Python's standard library, {RANKS} ranks as 2 nodes of "
        f"{RANKS_PER_NODE}; needs no GPU and no more flags",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: runs/compare, or runs/compare-toy"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="default: as many as GPUs")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="L",
        help="take the ranks as nodes of L, as --burst-ranks-per-node does (default: one node)",
    )
    parser.add_argument(
        "--variants", default="", metavar="NAMES", help="only these, as 'CP=1*,burst*,ring flat'"
    )
    parser.add_argument(
        "--launcher",
        default="",
        metavar="COMMAND",
        help="starts the ranks in place of torchrun on this machine, as 'srun torchrun --nnodes 2 "
        "...'; what a variant runs is put behind it",
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="of one device, for the MFU (default: by its name)"
    )
    parser.add_argument("--judged-steps", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument(
        "--tolerance", type=float, help="default: 1e-4, under --bf16 and --fp16 1e-2"
    )
    parser.add_argument("--no-trace", action="store_true", help="do not record steps 2 and 3")
    parser.add_argument("--dry-run", action="store_true", help="show the commands and run none")
    parser.add_argument("flags", nargs="*", metavar="MEGATRON-FLAGS", help="after --")
    return parser


def job_of(args: argparse.Namespace, flags: Sequence[str]) -> tuple[Job, list[str]]:
    """Return the sizes that the flags give, and the flags without the context-parallel size.

    Raises:
        ValueError: a flag is set by the comparison itself, or sizes do not fit.
    """
    names = {flag.split("=")[0] for flag in flags}
    if taken := sorted(names & set(_OURS)):
        raise ValueError(f"{', '.join(taken)}: the comparison sets it itself; drop it")
    sizes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size"):
        sizes.add_argument(f"--{name}", type=int, default=1)
    for name in ("context-parallel-size", "num-attention-heads", "num-query-groups"):
        sizes.add_argument(f"--{name}", type=int)
    sizes.add_argument("--group-query-attention", action="store_true")
    given, _ = sizes.parse_known_args(flags)
    size = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    size.add_argument("--context-parallel-size")
    _, others = size.parse_known_args(flags)
    model = given.tensor_model_parallel_size * given.pipeline_model_parallel_size
    ranks = args.ranks or (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not ranks:
        raise ValueError("there is no GPU here, so say how many processes: --ranks N, or --toy")
    job = Job(
        ranks=ranks,
        tensor=given.tensor_model_parallel_size,
        pipeline=given.pipeline_model_parallel_size,
        context=given.context_parallel_size or max(ranks // model, 1),
        heads=given.num_attention_heads,
        kv_heads=given.num_query_groups if given.group_query_attention else None,
        ranks_per_node=args.ranks_per_node,
        without_megatrons=_why_no_megatron(),
    )
    return job, others


def _why_no_megatron() -> str:
    if not torch.cuda.is_available():
        return "Megatron's context parallelism needs TransformerEngine, and that a GPU"
    if find_spec("transformer_engine") is None:
        return "Megatron's context parallelism needs TransformerEngine, which is not installed"
    return ""


def _run_all(series: Series, rows: Sequence[Variant], console: Console) -> list[Result]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    results, runs = [], [variant for variant in rows if not variant.why_not]
    with Progress(*columns, console=console, transient=True) as progress:
        for variant in rows:
            if variant.why_not:
                results.append(series.run(variant, print))
                continue
            number = f"[{runs.index(variant) + 1}/{len(runs)}]"
            again = " (finished before)" if series.is_finished(variant) else ""
            task = progress.add_task(f"{number} {variant.name}")
            result = series.run(variant, _shown(progress, task, f"{number} {variant.name}"))
            progress.remove_task(task)
            results.append(result)
            console.print(f"{number} {variant.name}{again}: {_line(result)}")
    return results


def _shown(progress: Progress, task: TaskID, name: str) -> Report:
    return lambda text: progress.update(task, description=f"{name}: {text}")


def _line(result: Result) -> str:
    if result.status != RAN:
        return f"{result.status}: {result.reason}"
    seconds = result.seconds_per_step
    return f"loss {result.losses[-1][1]:.4f}" + (f", {seconds:.3f} s a step" if seconds else "")


def _faults(
    results: Sequence[Result], apart_by_name: dict[str, Apart], tolerance: float
) -> list[str]:
    found = [f"{r.name} failed: {r.reason}" for r in results if r.status == FAILED]
    for name, far in apart_by_name.items():
        if not far.first.relative <= tolerance:
            found.append(
                f"{name} differs from {far.first.runs[1]} by {far.first.relative:.1e} at step "
                f"{far.first.step} (allowed: {tolerance:.0e})"
            )
    return found


def _timelines(
    series: Series, rows: Sequence[Variant], results: Sequence[Result]
) -> dict[str, Path]:
    found = {}
    for variant, result in zip(rows, results, strict=True):
        if not result.exposed or variant.name in REFERENCES:
            continue
        folder = series.folder(variant)
        calls = calls_of(load(folder / "trace"))
        step = max(call.call.arguments["training_step"] for call in calls)
        draw_timeline(calls, step, folder / "timeline.png")
        found[variant.name] = folder / "timeline.png"
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    """What the command line asks for."""

    output: Path
    flags: Sequence[str]
    rows: Sequence[Variant]
    series: Series
    entropy: float | None
    tolerance: float


def _setup(args: argparse.Namespace) -> _Setup:
    output: Path = args.output or Path("runs") / ("compare-toy" if args.toy else "compare")
    output, flags, entropy = output.resolve(), list(args.flags), None
    if args.toy:
        args.ranks, args.ranks_per_node = args.ranks or RANKS, args.ranks_per_node or RANKS_PER_NODE
        toy, entropy = make_toy(output / "corpus")
        flags = [*toy, *flags]
    job, flags = job_of(args, flags)
    patterns = [name.strip() for name in args.variants.split(",") if name.strip()]
    series = Series(
        output,
        [*_COMPARABLE, *flags],
        job.ranks,
        launcher=shlex.split(args.launcher),
        peak_tflops=args.peak_tflops or peak_tflops(device_name()),
        traced=not args.no_trace,
    )
    rows = choose(variants(job), patterns)
    tolerance = args.tolerance
    if tolerance is None:
        tolerance = 1e-2 if {"--bf16", "--fp16"} & set(flags) else 1e-4
    return _Setup(
        output=output, flags=flags, rows=rows, series=series, entropy=entropy, tolerance=tolerance
    )


def _show(setup: _Setup, console: Console) -> None:
    for variant in setup.rows:
        what = variant.why_not and f"{LEFT_OUT}: {variant.why_not}"
        console.print(f"# {variant.name}\n{what or shlex.join(setup.series.command(variant))}\n")


def _compare(args: argparse.Namespace, setup: _Setup, console: Console) -> list[str]:
    setup.output.mkdir(parents=True, exist_ok=True)
    results = _run_all(setup.series, setup.rows, console)
    ran = [result.name for result in results if result.status == RAN]
    reference = next((name for name in (*REFERENCES, *ran) if name in ran), None)
    far = apart(results, reference, args.judged_steps) if reference else {}
    comparison = Comparison(
        title=f"Context parallelism compared: {len(ran)} of {len(setup.rows)} variants",
        command=shlex.join(["python", "-m", "megatron_burst.tools.compare", *sys.argv[1:]]),
        flags=setup.flags,
        machine=machine(),
        results=results,
        reference=reference,
        apart=far,
        judged_steps=args.judged_steps,
        tolerance=setup.tolerance,
        faults=_faults(results, far, setup.tolerance),
        entropy=setup.entropy,
        timelines=_timelines(setup.series, setup.rows, results),
    )
    page, data = write_report(comparison, setup.output)
    left = [result.name for result in results if result.status == LEFT_OUT]
    console.print(f"not run, with the reasons in the report: {', '.join(left) or 'none'}")
    console.print(f"report: {page}, {data}")
    return list(comparison.faults)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        setup = _setup(args)
        if args.dry_run:
            _show(setup, console)
            return 0
        problems = _compare(args, setup, console)
    except (ValueError, OSError) as error:
        problems = [str(error)]
    except KeyboardInterrupt:
        errors.print("compare: interrupted; the same command goes on from here", style="red")
        return 130
    for problem in problems:
        errors.print(f"compare: {problem}", style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
