"""`megatron-burst plan`: what a run takes under every algorithm; named runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_burst.tools import options, terminal
from megatron_burst.tools.flags import Flags, as_asked, parsed, whole
from megatron_burst.tools.plan import ladder, measure
from megatron_burst.tools.plan.asked import checked
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.memory import usable, usable_host
from megatron_burst.tools.plan.ranking import Candidate, rank
from megatron_burst.tools.plan.reading import loss_chunking
from megatron_burst.tools.plan.search import SEARCHED, Wish, search

_ABOUT = """Predicts memory, bytes, exposed communication and time of a training step under every
algorithm and puts what fits first, then the fastest. After -- come Megatron's flags, which win over
those of the run or the model."""
_RATES = "--within-gb-s --nic-gb-s --forward-tflops --backward-tflops --linear-tflops".split()
_USUAL = "_long"  # the base of runs whose flags a model without a run gets
_COLUMNS: terminal.Columns = {
    "TP": ("tensor", 1, "{}"),
    "CP": ("context", 1, "{}"),
    "DP": ("data", 1, "{}"),
    "PP": ("pipeline", 1, "{}"),
    "EP": ("expert", 1, "{}"),
    "heads": ("head_parallel_size", 1, "{}"),
    "saved by": ("savings", 1, "{}"),
    "rho": ("recompute_fraction", 1, "{}"),
    "GiB": ("memory_bytes", 2**-30, "{:.1f}"),
    "host": ("host_bytes", 2**-30, "{:.0f}"),
    "MiB": ("sent_bytes_a_layer", 2**-20, "{:.0f}"),
    "NIC": ("sent_between_nodes_bytes_a_layer", 2**-20, "{:.0f}"),
    "exposed": ("exposed_share", 1, "{:.1%}"),
    "copies": ("exposed_copies_share", 1, "{:.1%}"),
    "s/step": ("seconds_a_step", 1, "{:.2f}"),
    "tokens/s/GPU": ("tokens_per_second_per_gpu", 1, "{:.1f}"),
    "MFU": ("mfu", 1, "{:.1%}"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the verb; return its exit status."""
    own, rest = options.split_at_dashes(sys.argv[1:] if argv is None else argv)
    given = _parser().parse_args(own)
    configs = Configs.read()
    if given.measure:
        measure.write(given.measure)
    elif given.list is not None:
        print(*configs.names(given.list), sep="\n")
    else:
        _predict(configs, given, parsed(rest or []))
    return 0


def _predict(configs: Configs, given: argparse.Namespace, flags: dict[str, Any]) -> None:
    wanted, cluster, gpus = _asked(configs, given, flags)
    if given.ladder:
        return _climb(ladder.climb(wanted, cluster, gpus), as_json=given.json)
    if given.search is None:
        found = rank(wanted, cluster, gpus, given.fractions)
    else:
        found = search(wanted, cluster, gpus, Wish(given.fractions, given.search), given.top)
    if given.json:
        print(json.dumps([_figures(each) for each in found], indent=2))
    else:
        print(f"loss: {describe_loss(found[0].flags)}")
        _print(found, given.top)
    if found[0].lacks == "host":
        raise ValueError(
            f"nothing fits: at least {min(e.host_bytes for e in found) / 2**30:.0f} GiB of a host "
            f"are needed, and {usable_host(cluster) / 2**30:.0f} may be counted: more nodes"
        )
    if found[0].lacks:
        least = min(each.memory.total for each in found) / 2**30
        raise ValueError(
            f"nothing fits: at least {least:.0f} GiB are needed, {cluster.name} has room for "
            f"{usable(cluster) / 2**30:.0f}: more GPUs, a larger --tensor-model-parallel-size, "
            "--recompute-granularity full, or --search for what does"
        )


def _climb(rungs: Sequence[ladder.Rung], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([*map(ladder.figures, rungs)], indent=2))
    else:
        ladder.show(rungs)
    if not any(rung.longest for rung in rungs):
        raise ValueError(
            f"no sequence fits on {rungs[0].load.gpus} GPUs: more of them, or --search"
        )


def describe_loss(flags: Flags) -> str:
    """Say how the loss of a run is made, and with how many matrix products."""
    chunking = loss_chunking(flags)
    way, products = (chunking, chunking.products) if chunking else ("from all logits at once", 3)
    return f"{way}; {products} products with the LM head a token"


def _figures(each: Candidate) -> dict[str, Any]:
    """Return a row of the ranking as it is written to JSON."""
    sizes = "tensor", "context", "pipeline", "expert", "data"
    return {
        "algorithm": each.name,
        "predicted_alike": list(each.twins),
        **{size: getattr(each.load, size) for size in sizes},
        "head_parallel_size": each.load.head_parallel,
        "savings": each.savings,
        "recompute_fraction": each.fraction,
        "memory_bytes": each.memory.total,
        "memory_parts": asdict(each.memory),
        "host_bytes": each.host_bytes,
        "fits": each.fits,
        "sent_bytes_a_layer": each.time.attention.sent,
        "sent_between_nodes_bytes_a_layer": each.time.attention.between,
        "exposed_share": each.time.attention.exposed_share,
        "copies_seconds": each.time.copies.seconds,
        "exposed_copies_share": each.time.copies.exposed / each.time.seconds,
        "seconds_a_step": each.time.seconds,
        "tokens_per_second_per_gpu": each.time.tokens_per_gpu,
        "mfu": each.time.mfu,
        "command": each.command(),
    }


def _print(found: list[Candidate], most: int) -> None:
    load, table = found[0].load, terminal.table(("algorithm",), _COLUMNS)
    for each in found[:most]:
        lacks = f" (too much memory of the {each.lacks})" if each.lacks else ""
        table.add_row(f"{each}{lacks}", *terminal.cells(_figures(each), _COLUMNS))
    console = terminal.console()
    console.print(
        f"{load.gpus} GPUs of {load.cluster.name}: tensor {load.tensor} x context {load.context} x "
        f"{f'pipeline {load.pipeline} x ' if load.pipeline > 1 else ''}data {load.data}; "
        f"{load.tokens} tokens, {load.model.parameters / 1e9:.2f} billion parameters"
    )
    console.print(table)
    console.print(
        "GiB: of a GPU; host: GiB of a host; MiB: what a rank sends for attention of a layer; NIC: "
        "of it, to other nodes; exposed: of attention's time; copies: to the host that are waited "
        "for, of the step"
    )
    if buffers := found[0].memory.nccl / 2**30:
        console.print(f"of a GPU, NCCL's buffers for attention's messages: {buffers:.2f} GiB")
    if found[0].fits:
        print(f"\nthe first of them, on every node:\n{found[0].command()}")


def _asked(
    configs: Configs, given: argparse.Namespace, own: dict[str, Any]
) -> tuple[dict[str, Any], Cluster, int]:
    """The flags, the machines and the number of GPUs that the command line asks for."""
    run = configs.run(given.run) if given.run else None
    name, gpus = given.cluster or (run and run.cluster), given.gpus or (run and run.gpus)
    if not (name and gpus):
        raise ValueError("say --cluster and --gpus, or --run")
    flags = dict(run.flags) if run else configs.flags_of(_USUAL)
    if given.model:  # in the place of the run's model, of which nothing may stay
        flags = configs.flags_of(given.run or _USUAL) | configs.model(given.model)
    own = checked(configs, own)
    flags = as_asked(flags, own, gpt=given.gpt) | own
    if given.seq_length:
        flags["seq-length"] = given.seq_length
    elif given.ladder:
        flags.setdefault("seq-length", 2**20)
    positions = "max-position-embeddings", "seq-length"
    flags[positions[0]] = max(whole(flags, name, 0) for name in positions)
    if given.documents:
        flags |= {"dataloader-inter-document-masking": True, "documents-mean": given.documents}
    cluster = configs.cluster(name)
    if given.search is not None or given.ladder:  # sizes stay if they are given behind the dashes
        kept = {name: flags[name] for name in flags if name not in SEARCHED or name in own}
        return kept, cluster, gpus
    # All GPUs take part, with a sequence for each data-parallel rank.
    ranks = whole(flags, "tensor-model-parallel-size")
    ranks *= whole(flags, "pipeline-model-parallel-size")
    if "context-parallel-size" not in own and (given.gpus or not run):
        flags["context-parallel-size"] = max(1, gpus // ranks)
    if "global-batch-size" not in own:
        data = max(1, gpus // (ranks * whole(flags, "context-parallel-size")))
        data *= whole(flags, "micro-batch-size")
        flags["global-batch-size"] = data * -(-whole(flags, "global-batch-size") // data)
    return flags, cluster, gpus


def _parser() -> options.Parser:
    parser = options.Parser(
        "plan",
        _ABOUT,
        "megatron-burst plan --run 14b_1m_32gpu_a800",
        "megatron-burst plan --model llama3_8b --cluster h100 --gpus 64 --seq-length 1048576",
        "megatron-burst plan --model llama3_8b --cluster h100 --gpus 8 --seq-length 65536 --search",
        "megatron-burst plan --model llama3_8b --cluster h100 --gpus 8 --ladder",
        "megatron-burst plan --measure here.toml",
    )
    add = parser.add_argument
    add("--run", metavar="NAME", help="a named run of configs/runs.toml")
    add("--gpt", action="store_true", help="as a GPTModel (default: as a HybridModel)")
    text = "print the names of all runs, or of those that match, as 'scaling-*'"
    add("--list", nargs="?", const="*", metavar="PATTERN", help=text)
    add("--model", metavar="NAME", help="a model of configs/; or flags after --")
    text = "a800, a100, h100, h200, b200, gb200, or a file that --measure wrote"
    add("--cluster", metavar="NAME", help=text)
    add("--gpus", type=options.positive, metavar="N", help="of the job")
    text = "tokens of a sequence, as 131072, 128k or 1M"
    add("--seq-length", type=options.tokens, metavar="N", help=text)
    text = "of attention that may be recomputed in recomputed layers (default: 0 0.5 1)"
    add("--fractions", type=float, nargs="+", default=[0, 0.5, 1], metavar="RHO", help=text)
    text = "try all sizes that are not given behind --, of pipelines (pp) and experts (ep) if asked"
    add("--search", nargs="*", choices=("pp", "ep"), metavar="pp ep", help=text)
    text = "how far sequences go, one saving of memory after the other, at its best sizes"
    add("--ladder", action="store_true", help=text)
    text = "packed sequences: documents of this mean length, exponentially distributed"
    add("--documents", type=options.tokens, metavar="N", help=text)
    text = "measure the rates of this machine's GPUs and write a cluster file"
    add("--measure", metavar="FILE", help=text)
    add("--top", type=options.positive, default=20, metavar="N", help="rows (default: 20)")
    options.add_gone(
        parser, "--flags", remedy="megatron-burst launch local --dry-run --run NAME has them"
    )
    options.add_gone(parser, "--plot", remedy="--json has memory and tokens/s of every way")
    text = "write it into a file for --cluster, which may have another cluster as its base"
    options.add_gone(parser, *_RATES, remedy=text)
    return parser
