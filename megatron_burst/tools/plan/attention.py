"""The part of `megatron-burst plan` that counts what attention alone sends."""

import argparse
import json
from typing import Any

from megatron_burst.config import GradDtype
from megatron_burst.plans.cost import Shape, Traffic
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.planning import mib
from megatron_burst.tools import options, terminal
from megatron_burst.tools.plan import traffic

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def add_flags(parser: options.Parser) -> None:
    """Add what describes one rank's attention and the ranks."""
    parser.section("bytes of attention alone")
    options.add_shape(parser)
    parser.add("--tokens-per-rank", type=options.positive, metavar="N", help="or --seq-length")
    options.add_cluster(parser, was_gpus=("--ranks-per-node",), nodes=1)
    text = "over how many ranks of a node the heads are spread (default: 1)"
    parser.add("--head-parallel-size", type=options.positive, default=1, metavar="U", help=text)
    parser.add("--dtype", choices=_DTYPE_BYTES, default="bfloat16", help="default: %(default)s")
    values = [dtype.value for dtype in GradDtype]
    text = "of gradients while they are sent (default: %(default)s)"
    parser.add("--grad-dtype", choices=values, default="float32", help=text)


def show_bytes(given: argparse.Namespace) -> None:
    """Print what attention of --heads sends under every algorithm."""
    found = list(traffic.rows(_setting(given)))
    if given.json:
        print(json.dumps([_counted(row) for row in found], indent=2))
        return
    numbers = [
        f"{direction}: {where}"
        for direction in ("forward", "backward")
        for where in ("a rank", "busiest NIC", "busiest node")
    ]
    table = terminal.table(("algorithm",), numbers)
    for row in found:
        table.add_row(row.algorithm, *(row.why_not and [row.why_not] or _cells(row)))
    console = terminal.console()
    console.print("What one attention layer sends, counted in the plans of all ranks:")
    console.print(table)
    console.print(
        "busiest NIC: with a NIC for every rank; busiest node: with one for all its ranks"
    )


def _cells(row: traffic.Row) -> list[str]:
    passes = [way for way in (row.forward, row.backward) if way]
    return [mib(count) for way in passes for count in (way.rank, way.card, way.node)]


def _counted(row: traffic.Row) -> dict[str, Any]:
    def of(way: Traffic | None) -> dict[str, int] | None:
        return way and {"rank": way.rank, "nic": way.card, "node": way.node}

    ways = {"forward_bytes": of(row.forward), "backward_bytes": of(row.backward)}
    return {"algorithm": row.algorithm, **ways, "why_not": row.why_not}


def _setting(given: argparse.Namespace) -> traffic.Setting:
    if not (given.head_dim and given.gpus_per_node and (given.tokens_per_rank or given.seq_length)):
        raise ValueError(
            "--heads also wants --head-dim, --gpus-per-node, and --tokens-per-rank or --seq-length"
        )
    ranks = given.nodes * given.gpus_per_node
    kv_heads = given.kv_heads or given.heads
    if given.heads % kv_heads:
        raise ValueError(f"--heads {given.heads} is not a multiple of --kv-heads {kv_heads}")
    tokens = given.tokens_per_rank * ranks if given.tokens_per_rank else given.seq_length
    element = _DTYPE_BYTES[given.dtype]
    shape = Shape(
        tokens=given.batch * zigzag(tokens, ranks).local_tokens,
        query_heads=given.heads,
        kv_heads=kv_heads,
        head_dim=given.head_dim,
        value_head_dim=given.value_head_dim or given.head_dim,
        element_bytes=element,
        gradient_bytes=4 if given.grad_dtype == GradDtype.FLOAT32 else element,
    )
    whole = traffic.Setting(nodes=given.nodes, ranks_per_node=given.gpus_per_node, shape=shape)
    return whole.of_a_ring(given.head_parallel_size)
