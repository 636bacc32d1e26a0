"""Predicts a training step under every algorithm and ranks them; checks itself with --validate.

    python -m megatron_burst.tools.plan --run 14b_1m_32gpu_a800
    python -m megatron_burst.tools.plan --model llama3_8b --cluster h100 --gpus 64 \\
        --seq-length 1048576 -- --tensor-model-parallel-size 2 --sequence-parallel
    python -m megatron_burst.tools.plan --validate
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron_burst.tools.extras import extra
from megatron_burst.tools.plan import validation
from megatron_burst.tools.plan.configs import FOLDER, Configs, parsed
from megatron_burst.tools.plan.memory import GIB
from megatron_burst.tools.plan.ranking import Candidate, rank, with_rates
from megatron_burst.tools.plan.workload import Cluster

_USUAL = "_long"  # the base of runs whose flags a model without a run gets
# What of a cluster can be given as measured, with what a unit of it is.
_RATES = {
    "within-gb-s": ("within_rate", 1e9, "from a GPU into its node"),
    "card-gb-s": ("card_rate", 1e9, "of a network card"),
    "forward-tflops": ("forward_rate", 1e12, "of attention's forward"),
    "backward-tflops": ("backward_rate", 1e12, "of attention's backward"),
    "linear-tflops": ("linear_rate", 1e12, "of matrix products"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    console = Console(highlight=False, markup=False, width=160)
    try:
        configs = Configs.read(args.configs)
        if args.fit:
            for name, value in validation.fit(configs).items():
                console.print(f"{name} = {value:.3f}  # fitted on {_row_of(configs, name)}")
        elif args.write:
            with extra("plot", __name__):
                from megatron_burst.tools.plan.page import write_page
            write_page(configs, args.write)
        elif args.validate:
            for line in validation.messages(configs, validation.rows_of(configs)):
                console.print(line)
        else:
            _rank(console, configs, args, parsed(words[cut + 1 :]))
    except ValueError as error:
        parser.exit(1, f"plan: {error}\n")
    return 0


def _rank(console: Console, configs: Configs, args: argparse.Namespace, given: Any) -> None:
    flags, cluster, gpus = _asked(configs, args, given)
    found = rank(flags, cluster, gpus, args.fractions, configs.constant("working_set"))
    load = found[0].load
    console.print(
        f"{gpus} GPUs of {cluster.name}: tensor {load.tensor} x context {load.context} x data "
        f"{load.data}; {load.tokens} tokens, {load.model.parameters / 1e9:.2f} billion parameters"
    )
    console.print(_table(found[: args.top], plain=not sys.stdout.isatty()))
    console.print("MiB: what a rank sends for one layer; exposed: of attention's time")
    if not found[0].fits:
        raise ValueError(
            "nothing fits: more GPUs, a larger --tensor-model-parallel-size, or "
            "--recompute-granularity full"
        )
    console.print(f"\nthe first of them, on every node:\n{found[0].command()}", soft_wrap=True)


def _table(found: list[Candidate], plain: bool) -> Table:
    table = Table(box=None if plain else SIMPLE)
    table.add_column("algorithm", no_wrap=True)
    for name in ("heads", "rho", "GiB", "MiB", "exposed", "s/step", "tokens/s/GPU", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        table.add_row(
            str(each),
            str(each.load.head_parallel),
            each.fraction,
            f"{each.memory.total / GIB:.1f}{'' if each.fits else ' too much'}",
            f"{each.time.sent / 2**20:.0f}",
            f"{each.time.exposed_share:.1%}",
            f"{each.time.seconds:.2f}",
            f"{each.time.tokens_per_gpu:.1f}",
            f"{each.time.mfu:.1%}",
        )
    return table


def _asked(
    configs: Configs, args: argparse.Namespace, given: dict[str, Any]
) -> tuple[dict[str, Any], Cluster, int]:
    """The flags, the machines and the number of GPUs that the command line asks for."""
    flags: dict[str, Any] = {}
    name, gpus = args.cluster, args.gpus
    if args.run:
        run = configs.run(args.run)
        flags, name, gpus = dict(run.flags), name or run.cluster, gpus or run.gpus
    if args.model:  # in the place of the run's model, of which nothing may stay
        flags = configs.flags_of(args.run or _USUAL) | configs.model(args.model)
    elif not args.run:
        flags = configs.flags_of(_USUAL)
    flags |= given
    if args.seq_length:
        flags["seq-length"] = args.seq_length
    positions = int(flags.get("max-position-embeddings", 0))
    flags["max-position-embeddings"] = max(positions, int(flags.get("seq-length", 0)))
    if not (name and gpus):
        raise ValueError("say --cluster and --gpus, or --run")
    tensor = int(flags.get("tensor-model-parallel-size", 1))
    if "context-parallel-size" not in given and (args.gpus or not args.run):
        flags["context-parallel-size"] = gpus // tensor
    if "global-batch-size" not in given:  # a sequence for each data-parallel rank
        data = max(1, gpus // (tensor * int(flags.get("context-parallel-size", 1))))
        flags["global-batch-size"] = data * -(-int(flags.get("global-batch-size", 1)) // data)
    measured = {
        field: getattr(args, flag.replace("-", "_")) * unit
        for flag, (field, unit, _) in _RATES.items()
        if getattr(args, flag.replace("-", "_")) is not None
    }
    return flags, with_rates(configs.cluster(name), measured), gpus


def _row_of(configs: Configs, name: str) -> str:
    return str(configs.published["fitted"][name]["row"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_burst.tools.plan",
        description=__doc__.split("\n")[0],
        epilog="After -- follow Megatron's flags; they win over those of the run and the model.",
    )
    parser.add_argument("--run", metavar="NAME", help="a named run of configs/")
    parser.add_argument("--model", metavar="NAME", help="a model of configs/; or flags after --")
    parser.add_argument("--cluster", metavar="NAME", help="a800, a100, h100, h200, b200")
    parser.add_argument("--gpus", type=int, metavar="N", help="of the job")
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sequence")
    parser.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        default=[0, 0.5, 1],
        metavar="RHO",
        help="of attention that may run again in recomputed layers (default: 0 0.5 1)",
    )
    for flag, (_, _, what) in _RATES.items():
        parser.add_argument(f"--{flag}", type=float, metavar="X", help=f"measured: {what}")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="rows (default: 20)")
    checks = parser.add_mutually_exclusive_group()
    checks.add_argument(
        "--validate", action="store_true", help="predictions beside what was measured, in short"
    )
    checks.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="all rows into docs/planner.md, and its picture",
    )
    checks.add_argument("--fit", action="store_true", help="fit the constants again; print them")
    parser.add_argument("--configs", type=Path, default=FOLDER, metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
