"""`megatron-burst compare`: runs the variants and writes one report of all."""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from megatron_burst.config import size_or_auto
from megatron_burst.tools import terminal
from megatron_burst.tools.arguments.compare import parser
from megatron_burst.tools.compare.page import Comparison, as_json, table, write_report
from megatron_burst.tools.compare.results import LEFT_OUT, RAN, Result, gpus, machine
from megatron_burst.tools.compare.running import Series, Watched
from megatron_burst.tools.compare.toy import make_toy
from megatron_burst.tools.compare.variants import Job, Variant, choose, fitted, variants
from megatron_burst.tools.flags import (
    DOCUMENTS,
    Flags,
    adapt_flags,
    arguments,
    heads_of,
    parsed,
    whole,
    without,
)
from megatron_burst.tools.flops import peak_tflops
from megatron_burst.tools.launch.processes import Signals
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.own_flags import checked
from megatron_burst.transport import lock

_OURS = """
    context-parallel-algo cp-comm-type hierarchical-context-parallel-sizes attention-backend
    burst-backward burst-topology burst-ranks-per-node burst-head-parallel-size profile
    tensorboard-dir save
""".split()
"""What the comparison sets itself; with --save the variants would read each other's checkpoints."""
# Variants say by themselves how documents are told apart; ours never make the dense mask.
_OF_DOCUMENTS = (DOCUMENTS, "--no-create-attention-mask-in-dataloader")
_TRACED_STEPS = 4  # by the flags of `running`
_COMPARABLE = ("--calculate-per-token-loss", "--attention-dropout", "0", "--hidden-dropout", "0")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    console = Console(stderr=True, quiet=True) if args.json else terminal.console()
    _fill(args)
    series, chosen = _series_and_variants(args)
    if args.dry_run:
        for variant in chosen:
            what = variant.why_not and f"{LEFT_OUT}: {variant.why_not}"
            console.print(f"# {variant.title}\n{what or shlex.join(series.command(variant))}\n")
        return 0
    _refuse_too_many(series, chosen)
    try:
        with lock.held(args.output, say=lambda text: terminal.complain("compare", [text])):
            results = _run_all(series, chosen, console)
    except KeyboardInterrupt:
        terminal.complain("compare", ["interrupted; the same command goes on from here"])
        return 130
    comparison = Comparison(
        command=shlex.join(["megatron-burst", "compare", *argv]),
        flags=args.flags,
        machine=machine(),
        results=results,
        judged_steps=args.judged_steps,
        tolerance=args.tolerance,
        is_toy=args.toy,
    )
    _show(comparison, write_report(comparison, args.output), console)
    if args.json:
        print(json.dumps(as_json(comparison), indent=2))
    terminal.complain("compare", comparison.faults)
    return 1 if comparison.faults else 0


def _fill(args: argparse.Namespace) -> None:
    """Replace what was not given by its default.

    Raises:
        ValueError: flags that contradict each other, or that nothing knows.
    """
    if (args.toy and args.run) or (args.input and not args.toy):
        raise ValueError("--toy and --run have a model each, and --input is text for --toy")
    if args.gpt and not (args.toy or args.run):
        raise ValueError("--gpt is for the model of --toy or --run: behind -- flags say what it is")
    if args.tolerance is not None and args.tolerance < 0:
        raise ValueError(f"--tolerance {args.tolerance} is negative")
    checked(Configs.read(), parsed(args.flags))
    name = "-toy" if args.toy else f"-{args.run}" if args.run else ""
    args.output = (args.output or Path("runs") / f"compare{name}").resolve()
    if args.toy:
        if not args.ranks:  # four, or the power of two that the GPUs allow
            args.ranks = 2 ** min(gpus().bit_length() - 1, 2) if gpus() else 4
        if not args.gpus_per_node and not gpus() and args.ranks % 2 == 0:
            args.gpus_per_node = args.ranks // 2  # as two nodes, for the double rings
        folder, short = args.output / "corpus", DOCUMENTS in args.flags
        toy = make_toy(folder, args.input, paragraphs=short, is_dry=args.dry_run)
        args.flags = _named(parsed(toy), args)
    if args.run:
        run = Configs.read().run(args.run)
        named = {name: value for name, value in run.flags.items() if name not in _OURS}
        args.flags, args.ranks = _named(named, args), args.ranks or run.gpus
        cluster = Configs.read().cluster(run.cluster)
        args.gpus_per_node = args.gpus_per_node or cluster.gpus_per_node
    args.ranks = args.ranks or gpus()
    if not args.ranks:
        raise ValueError("there is no GPU here, so say how many processes: --ranks N, or --toy")
    if args.tolerance is None:
        args.tolerance = 1e-2 if {"--bf16", "--fp16"} & set(args.flags) else 1e-4


def _named(flags: Flags, args: argparse.Namespace) -> list[str]:
    """The flags of --toy or --run for the model that is asked for, and the user's behind."""
    return [*arguments(adapt_flags(flags, parsed(args.flags), gpt=args.gpt)), *args.flags]


def _series_and_variants(args: argparse.Namespace) -> tuple[Series, list[Variant]]:
    """The runs and the variants.

    Raises:
        ValueError: a flag is set by the comparison itself, or sizes do not fit.
    """
    given = parsed(args.flags)
    if taken := sorted(set(given) & set(_OURS)):
        named = ", ".join(f"--{name}" for name in taken)
        raise ValueError(f"{named}: the comparison sets it itself; drop it")

    if not args.no_trace and whole(given, "train-iters", _TRACED_STEPS) < _TRACED_STEPS:
        raise ValueError(
            f"--train-iters {given['train-iters']}: steps 2 and 3 are profiled, which takes "
            f"{_TRACED_STEPS}: add --no-trace"
        )

    number = partial(whole, given)
    tensor, pipeline, experts = (
        number(f"{name}-model-parallel-size") for name in ("tensor", "pipeline", "expert")
    )
    context = number("context-parallel-size", max(args.ranks // (tensor * pipeline), 1))
    job = Job(
        ranks=args.ranks,
        tensor=tensor,
        pipeline=pipeline,
        experts=experts * number("expert-tensor-parallel-size", tensor),
        context=context,
        heads=heads_of(given) if "num-attention-heads" in given else None,
        head_chunks=size_or_auto(str(given.get("burst-head-chunks", 1))) or 1,
        ranks_per_node=args.gpus_per_node,
        without_megatrons=_why_no_megatron(is_here=not args.launcher),
        has_documents=DOCUMENTS in args.flags,
        has_windows="window-size" in given,
    )
    common = without(args.flags, _OF_DOCUMENTS) if job.has_documents else args.flags
    if "global-batch-size" not in given:  # by default the data-parallel ranks', which are not all's
        batch = number("micro-batch-size") * args.ranks // (tensor * pipeline * context)
        common = [*common, "--global-batch-size", str(batch)]
    series = Series(
        directory=args.output,
        flags=[*_COMPARABLE, *common],
        ranks=args.ranks,
        launcher=shlex.split(args.launcher),
        peak_tflops=args.peak_tflops or peak_tflops(machine()["device"]),
        traced=not args.no_trace,
    )
    patterns = [name.strip() for name in args.variants.split(",") if name.strip()]
    return series, choose(fitted(variants(job), common), patterns)


def _why_no_megatron(*, is_here: bool) -> str:
    """Why it cannot run; a launcher may start it where there are GPUs."""
    needs = "Megatron's context parallelism needs TransformerEngine, "
    if is_here and not gpus():
        return f"{needs}and that a GPU"
    return "" if find_spec("transformer_engine") else f"{needs}which is not installed"


def _refuse_too_many(series: Series, chosen: Sequence[Variant]) -> None:
    """Say before any starts that none can, or that this machine has too few GPUs for one."""
    if all(variant.why_not for variant in chosen):
        raise ValueError("no variant can run here: --dry-run says why of each")
    for variant in chosen:
        starts = not variant.why_not and series.starts_here(variant)
        if starts and 0 < gpus() < variant.ranks:
            raise ValueError(
                f"{variant.name} starts {variant.ranks} ranks here, and this machine has {gpus()} "
                "GPUs: give --launcher or fewer --ranks, or leave it out by --variants"
            )


def _run_all(series: Series, chosen: Sequence[Variant], console: Console) -> list[Result]:
    left_out = (variant for variant in chosen if variant.why_not)
    results = {v.name: Result(name=v.name, status=LEFT_OUT, reason=v.why_not) for v in left_out}
    runs, signals = [v for v in chosen if not v.why_not], Signals()
    for number, variant in enumerate(runs, start=1):
        name, again = variant.name, " (finished before)" if series.is_finished(variant) else ""
        with console.status(Watched(name, series.folder(variant) / "log.txt")):
            results[name] = replace(series.run(variant, signals), dropped=variant.dropped)
        console.print(f"[{number}/{len(runs)}] {variant.title}{again}: {_line(results[name])}")
    return [results[variant.name] for variant in chosen]


def _line(result: Result) -> str:
    if result.status != RAN:
        return f"{result.status}: {result.reason}"
    seconds = result.seconds_per_step
    return f"loss {result.losses[-1][1]:.4f}" + (f", {seconds:.3f} s a step" if seconds else "")


def _show(comparison: Comparison, page: Path, console: Console) -> None:
    columns, rows = table(comparison)
    console.print(terminal.table(("",), columns, rows))
    if not comparison.faults:
        console.print(*comparison.verdict, sep="\n")
    console.print(f"report: {page}, {page.with_suffix('.json')}")
