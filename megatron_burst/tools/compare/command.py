"""Train one model on the same data through several algorithms and write one report of all.

Runs megatron_burst.pretrain_gpt once for each variant: the same seed, data and model, another
--context-parallel-algo. --dry-run lists the variants, and why some cannot run here. What is
finished is kept: the same command goes on where it was interrupted. The report is DIR/compare.md,
with a picture, and DIR/compare.json.

Ends with status 1 if a variant failed, or if in the first --judged-steps the losses of one differ
from those of the reference, one context-parallel rank, by more than --tolerance; with --toy also if
a run of 100 steps or more learned nothing.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from megatron_burst.tools import options, terminal
from megatron_burst.tools.compare import collect
from megatron_burst.tools.compare.page import COLUMNS, Comparison, as_json, rows, write_report
from megatron_burst.tools.compare.results import (
    FAILED,
    LEFT_OUT,
    RAN,
    Difference,
    Result,
    device_name,
    differences,
    gpus,
    learned_too_little,
    machine,
)
from megatron_burst.tools.compare.running import Report, Series
from megatron_burst.tools.compare.toy import make_toy
from megatron_burst.tools.compare.toy import ranks as ranks_of_the_toy
from megatron_burst.tools.compare.variants import REFERENCES, Job, Variant, choose, variants
from megatron_burst.tools.flops import peak_tflops

_OURS = (
    "--context-parallel-algo",
    "--cp-comm-type",
    "--hierarchical-context-parallel-sizes",
    "--attention-backend",
    "--burst-backward",
    "--burst-topology",
    "--burst-ranks-per-node",
    "--burst-head-parallel-size",
    "--profile",
    "--tensorboard-dir",
    "--save",
)
"""What the comparison sets itself; with --save the variants would read each other's checkpoints."""
_COMPARABLE = ("--calculate-per-token-loss", "--attention-dropout", "0", "--hidden-dropout", "0")


_EXAMPLES = (
    "megatron-burst compare --toy",
    "megatron-burst compare --ranks 8 --output DIR -- MEGATRON-FLAGS",
    "megatron-burst compare --collect runs/series",
)


def _parser() -> options.Parser:
    parser = options.Parser("compare", __doc__, *_EXAMPLES)
    add, number = parser.add, options.positive
    text = "a small GPT on Python's standard library; needs no GPU and no more flags"
    add("--toy", action="store_true", help=text)
    text = "with --toy, train on this text, directory or JSONL file; may be given again"
    add("--input", type=Path, action="append", default=[], metavar="PATH", help=text)
    options.add_output(parser, "a directory (default: runs/compare, or runs/compare-toy)")
    text = "default: as many as GPUs; with --toy up to 4"
    add("--ranks", type=number, metavar="N", help=text)
    text = "take the ranks as nodes of L, as --burst-ranks-per-node does (default: one node)"
    add("--gpus-per-node", was=["--ranks-per-node"], type=number, metavar="L", help=text)
    text = "only these, as 'CP=1*,burst*,ring flat'"
    add("--variants", default="", metavar="NAMES", help=text)
    text = "starts the ranks in place of torchrun on this machine, as 'srun torchrun --nnodes 2 "
    text += "...'; what a variant runs is put behind it"
    add("--launcher", default="", metavar="COMMAND", help=text)
    text = "of one device, for the MFU (default: by its name)"
    add("--peak-tflops", type=float, help=text)
    add("--judged-steps", type=int, default=20, metavar="N", help="default: 20")
    add("--tolerance", type=float, help="default: 1e-4, under --bf16 and --fp16 1e-2")
    add("--no-trace", action="store_true", help="do not profile steps 2 and 3")
    add("--dry-run", action="store_true", help="show the commands and run none")
    text = "train nothing: write all runs of launchers below these directories into one CSV and "
    text += "one JSON, named by --output"
    add("--collect", type=Path, nargs="+", metavar="DIR", help=text)
    options.add_json(parser)
    add("flags", nargs="*", metavar="MEGATRON-FLAGS", help="after --")
    return parser


def job_of(args: argparse.Namespace, flags: Sequence[str]) -> Job:
    """Return the sizes that the flags give.

    Raises:
        ValueError: a flag is set by the comparison itself, or sizes do not fit.
    """
    names = {flag.split("=")[0] for flag in flags}
    if taken := sorted(names & set(_OURS)):
        raise ValueError(f"{', '.join(taken)}: the comparison sets it itself; drop it")
    ranks = args.ranks or gpus()
    if not ranks:
        raise ValueError("there is no GPU here, so say how many processes: --ranks N, or --toy")
    given = _sizes().parse_known_args(flags)[0]
    tensor, pipeline = given.tensor_model_parallel_size, given.pipeline_model_parallel_size
    return Job(
        ranks=ranks,
        tensor=tensor,
        pipeline=pipeline,
        context=given.context_parallel_size or max(ranks // (tensor * pipeline), 1),
        heads=given.num_attention_heads,
        kv_heads=given.num_query_groups if given.group_query_attention else None,
        ranks_per_node=args.gpus_per_node,
        without_megatrons=_why_no_megatron(),
    )


def _sizes() -> argparse.ArgumentParser:
    sizes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size"):
        sizes.add_argument(f"--{name}", type=int, default=1)
    for name in ("context-parallel-size", "num-attention-heads", "num-query-groups"):
        sizes.add_argument(f"--{name}", type=int)
    sizes.add_argument("--group-query-attention", action="store_true")
    return sizes


def _why_no_megatron() -> str:
    if not gpus():
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
    results: Sequence[Result], reference: str, apart: dict[str, Difference], setup: "_Setup"
) -> list[str]:
    found = [f"{r.name} failed: {r.reason}" for r in results if r.status == FAILED]
    found += filter(None, (learned_too_little(result, setup.entropy) for result in results))
    return found + [
        f"{name} differs from {reference} by {far.relative:.1e} at step {far.step} "
        f"(allowed: {setup.tolerance:.0e})"
        for name, far in apart.items()
        if not far.relative <= setup.tolerance
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    """What the command line asks for."""

    output: Path
    flags: Sequence[str]
    variants: Sequence[Variant]
    series: Series
    entropy: float | None
    tolerance: float
    judged_steps: int


def _setup(args: argparse.Namespace) -> _Setup:
    output: Path = args.output or Path("runs") / ("compare-toy" if args.toy else "compare")
    output, flags, entropy = output.resolve(), list(args.flags), None
    if args.toy:
        args.ranks = args.ranks or ranks_of_the_toy()
        if not args.gpus_per_node and not gpus() and args.ranks % 2 == 0:
            args.gpus_per_node = args.ranks // 2  # as two nodes, for the double rings
        toy, entropy = make_toy(output / "corpus", args.input)
        flags = [*toy, *flags]
    job = job_of(args, flags)
    patterns = [name.strip() for name in args.variants.split(",") if name.strip()]
    series = Series(
        output,
        [*_COMPARABLE, *flags],
        job.ranks,
        launcher=shlex.split(args.launcher),
        peak_tflops=args.peak_tflops or peak_tflops(device_name()),
        traced=not args.no_trace,
    )
    chosen = choose(variants(job), patterns)
    tolerance = args.tolerance
    if tolerance is None:
        tolerance = 1e-2 if {"--bf16", "--fp16"} & set(flags) else 1e-4
    return _Setup(
        output=output,
        flags=flags,
        variants=chosen,
        series=series,
        entropy=entropy,
        tolerance=tolerance,
        judged_steps=args.judged_steps,
    )


def _show(setup: _Setup, console: Console) -> None:
    for variant in setup.variants:
        what = variant.why_not and f"{LEFT_OUT}: {variant.why_not}"
        console.print(f"# {variant.name}\n{what or shlex.join(setup.series.command(variant))}\n")


def _compare(words: Sequence[str], setup: _Setup, console: Console) -> Comparison:
    setup.output.mkdir(parents=True, exist_ok=True)
    results = _run_all(setup.series, setup.variants, console)
    ran = [result.name for result in results if result.status == RAN]
    reference = next((name for name in (*REFERENCES, *ran) if name in ran), None)
    apart = differences(results, reference, setup.judged_steps) if reference else {}
    comparison = Comparison(
        title=f"Context parallelism compared: {len(ran)} of {len(setup.variants)} variants",
        command=shlex.join(["megatron-burst", "compare", *words]),
        flags=setup.flags,
        machine=machine(),
        results=results,
        reference=reference,
        apart=apart,
        apart_in_all_steps=differences(results, reference) if reference else {},
        judged_steps=setup.judged_steps,
        tolerance=setup.tolerance,
        faults=_faults(results, reference or "", apart, setup),
        entropy=setup.entropy,
    )
    page = write_report(comparison, setup.output)
    table = terminal.table(("",), COLUMNS)
    for name, cells in rows(comparison).items():
        table.add_row(name, *cells)
    console.print(table)
    if left := [result.name for result in results if result.status == LEFT_OUT]:
        console.print(f"{len(left)} variants were not run; the page says why")
    if not comparison.faults:
        console.print(*comparison.verdict, sep="\n")
    console.print(f"report: {page}, {page.with_suffix('.json')}")
    return comparison


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status.

    Raises:
        ValueError: a flag cannot be what it is; the message says why.
    """
    words = sys.argv[1:] if argv is None else argv
    args = _parser().parse(words)
    if args.collect:
        return collect.write(args.collect, args.output, as_json=args.json)
    console = Console(stderr=True, quiet=True) if args.json else terminal.console()
    setup = _setup(args)
    if args.dry_run:
        _show(setup, console)
        return 0
    try:
        comparison = _compare(words, setup, console)
    except KeyboardInterrupt:
        terminal.complain("compare", ["interrupted; the same command goes on from here"])
        return 130
    if args.json:
        print(json.dumps(as_json(comparison), indent=2))
    terminal.complain("compare", comparison.faults)
    return 1 if comparison.faults else 0
