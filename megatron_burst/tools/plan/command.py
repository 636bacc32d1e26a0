"""`megatron-burst plan`: what a run is, and what it takes under every algorithm; named runs."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from megatron_burst.tools import options, terminal
from megatron_burst.tools.plan import show
from megatron_burst.tools.plan.configs import FOLDER, Configs, parsed
from megatron_burst.tools.plan.memory import GIB
from megatron_burst.tools.plan.ranking import Candidate, rank, with_rates
from megatron_burst.tools.plan.workload import Cluster

_ABOUT = """Predicts memory, bytes, exposed communication and time of a training step under every
algorithm and puts what fits first, then the fastest. After -- come Megatron's flags, which win over
those of the run or the model."""
_USUAL = "_long"  # the base of runs whose flags a model without a run gets
# What of a cluster can be given as measured, with what a unit of it is.
_RATES = {
    "within-gb-s": ("within_rate", 1e9, "from a GPU into its node"),
    "nic-gb-s": ("nic_rate", 1e9, "of a NIC"),
    "forward-tflops": ("forward_rate", 1e12, "of attention's forward"),
    "backward-tflops": ("backward_rate", 1e12, "of attention's backward"),
    "linear-tflops": ("linear_rate", 1e12, "of matrix products"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the verb; return its exit status."""
    own, rest = options.split_at_dashes(sys.argv[1:] if argv is None else argv)
    given = _parser().parse(own)
    configs = Configs.read(given.configs)
    if given.list is not None:
        print(*configs.names(given.list), sep="\n")
    elif given.flags:
        if not given.run:
            raise ValueError("--flags wants --run NAME; --list has the names")
        print(*configs.run(given.run).arguments(), sep="\n")
    else:
        _predict(configs, given, parsed(rest or []))
    return 0


def _predict(configs: Configs, given: argparse.Namespace, flags: dict[str, Any]) -> None:
    console = terminal.console()
    changed = flags or given.model or given.cluster or given.gpus or given.seq_length
    if given.run and not changed and not given.json:
        run = configs.run(given.run)
        console.print(*show.lines(configs, run), sep="\n")
        console.print(f"flags: {shlex.join(run.arguments())}\n")
    wanted, cluster, gpus = _asked(configs, given, flags)
    found = rank(wanted, cluster, gpus, given.fractions, configs.constant("working_set"))
    if given.json:
        print(json.dumps([_figures(each) for each in found], indent=2))
        return
    load = found[0].load
    console.print(
        f"{gpus} GPUs of {cluster.name}: tensor {load.tensor} x context {load.context} x data "
        f"{load.data}; {load.tokens} tokens, {load.model.parameters / 1e9:.2f} billion parameters"
    )
    console.print(_ranking(found[: given.top]))
    console.print(
        "MiB: what a rank sends for attention of a layer; NIC: of it, to other nodes; exposed: "
        "of attention's time"
    )
    if not found[0].fits:
        raise ValueError(
            "nothing fits: more GPUs, a larger --tensor-model-parallel-size, or "
            "--recompute-granularity full"
        )
    console.print(f"\nthe first of them, on every node:\n{found[0].command()}")


def _figures(each: Candidate) -> dict[str, Any]:
    """Return a row of the ranking as it is written to JSON."""
    return {
        "algorithm": each.name,
        "same_plan": list(each.twins),
        "head_parallel_size": each.load.head_parallel,
        "recompute_fraction": each.fraction,
        "memory_bytes": each.memory.total,
        "fits": each.fits,
        "sent_bytes_a_layer": each.time.sent,
        "sent_between_nodes_bytes_a_layer": each.time.between,
        "exposed_share": each.time.exposed_share,
        "seconds_a_step": each.time.seconds,
        "tokens_per_second_per_gpu": each.time.tokens_per_gpu,
        "mfu": each.time.mfu,
        "command": each.command(),
    }


def _ranking(found: Iterable[Candidate]) -> Table:
    numbers = ("heads", "rho", "GiB", "MiB", "NIC", "exposed", "s/step", "tokens/s/GPU", "MFU")
    table = terminal.table(("algorithm",), numbers)
    for each in found:
        table.add_row(
            str(each),
            str(each.load.head_parallel),
            each.fraction,
            f"{each.memory.total / GIB:.1f}{'' if each.fits else ' too much'}",
            f"{each.time.sent / 2**20:.0f}",
            f"{each.time.between / 2**20:.0f}",
            f"{each.time.exposed_share:.1%}",
            f"{each.time.seconds:.2f}",
            f"{each.time.tokens_per_gpu:.1f}",
            f"{each.time.mfu:.1%}",
        )
    return table


def _asked(
    configs: Configs, given: argparse.Namespace, own: dict[str, Any]
) -> tuple[dict[str, Any], Cluster, int]:
    """The flags, the machines and the number of GPUs that the command line asks for."""
    flags: dict[str, Any] = {}
    name, gpus = given.cluster, given.gpus
    if given.run:
        run = configs.run(given.run)
        flags, name, gpus = dict(run.flags), name or run.cluster, gpus or run.gpus
    if given.model:  # in the place of the run's model, of which nothing may stay
        flags = configs.flags_of(given.run or _USUAL) | configs.model(given.model)
    elif not given.run:
        flags = configs.flags_of(_USUAL)
    flags |= own
    if given.seq_length:
        flags["seq-length"] = given.seq_length
    positions = int(flags.get("max-position-embeddings", 0))
    flags["max-position-embeddings"] = max(positions, int(flags.get("seq-length", 0)))
    if not (name and gpus):
        raise ValueError("say --cluster and --gpus, or --run")
    _fill(flags, own, gpus, others_than_the_runs=bool(given.gpus or not given.run))
    return flags, with_rates(configs.cluster(name), _measured(given)), gpus


def _fill(
    flags: dict[str, Any], own: dict[str, Any], gpus: int, *, others_than_the_runs: bool
) -> None:
    """Let all GPUs take part, with a sequence for each data-parallel rank."""
    tensor = int(flags.get("tensor-model-parallel-size", 1))
    if "context-parallel-size" not in own and others_than_the_runs:
        flags["context-parallel-size"] = gpus // tensor
    if "global-batch-size" not in own:
        data = max(1, gpus // (tensor * int(flags.get("context-parallel-size", 1))))
        flags["global-batch-size"] = data * -(-int(flags.get("global-batch-size", 1)) // data)


def _measured(given: argparse.Namespace) -> dict[str, float]:
    values = {flag: getattr(given, flag.replace("-", "_")) for flag in _RATES}
    return {_RATES[flag][0]: x * _RATES[flag][1] for flag, x in values.items() if x is not None}


def _parser() -> options.Parser:
    parser = options.Parser(
        "plan",
        _ABOUT,
        "megatron-burst plan --run 14b_1m_32gpu_a800",
        "megatron-burst plan --model llama3_8b --cluster h100 --gpus 64 --seq-length 1048576",
        "megatron-burst plan --run toy --flags",
    )
    _add_runs(parser)
    _add_predicted(parser)
    return parser


def _add_runs(parser: options.Parser) -> None:
    parser.section("named runs")
    options.add_run(parser, FOLDER)
    text = "print the flags of --run alone, a word a line, for scripts"
    parser.add("--flags", action="store_true", help=text)
    text = "print the names of all runs, or of those that match, as 'scaling-*'"
    parser.add("--list", nargs="?", const="*", metavar="PATTERN", help=text)


def _add_predicted(parser: options.Parser) -> None:
    parser.section("what is predicted")
    parser.add("--model", metavar="NAME", help="a model of configs/; or flags after --")
    parser.add("--cluster", metavar="NAME", help="a800, a100, h100, h200, b200")
    parser.add("--gpus", type=options.positive, metavar="N", help="of the job")
    parser.add("--seq-length", type=options.positive, metavar="N", help="tokens of a sequence")
    parser.add(
        "--fractions",
        type=float,
        nargs="+",
        default=[0, 0.5, 1],
        metavar="RHO",
        help="of attention that may be recomputed in recomputed layers (default: 0 0.5 1)",
    )
    for flag, (_, _, what) in _RATES.items():
        was = ("--card-gb-s",) if flag == "nic-gb-s" else ()
        parser.add(f"--{flag}", was=was, type=float, metavar="X", help=f"measured: {what}")
    parser.add("--top", type=options.positive, default=20, metavar="N", help="rows (default: 20)")
    options.add_json(parser)
