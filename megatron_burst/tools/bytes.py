"""Counts the bytes that every algorithm sends on a described cluster, and checks them on paper.

    python -m megatron_burst.tools.bytes --seq-length 1048576 --heads 32 --kv-heads 8 \\
        --head-dim 128 --nodes 2 --ranks-per-node 8

Counted is what the plans of all ranks send for one attention layer; beside it stands the closed
formula, worked out without a plan. Ends with status 1 where the two differ.

With --head-parallel-size U the rings are those of P/U ranks that hold U times the tokens and 1/U of
the heads, and every rank also sends what the all-to-all over the heads takes.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron_burst.attention.head_exchange import exchange_plan
from megatron_burst.config import GradDtype, GradientReturn, Topology
from megatron_burst.plans.cost import Shape, Traffic, traffic
from megatron_burst.plans.head_parallel import kv_head_copies
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.plan import Hop, Kind
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import choose_grid

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
RETURNS = (GradientReturn.CHAIN, GradientReturn.HOME)
ALLGATHER = "allgather"
PLACES = ("a rank sends", "busiest card", "busiest node")
# Of one rank's tokens: the blocks, their gradients, and all that ulysses exchanges.
ITEMS = {
    "KV": "n*Hkv*(dk+dv)*e",
    "Q": "n*Hq*((dk+dv)*e+8)",
    "dKV": "n*Hkv*(dk+dv)*g",
    "dQ": "n*Hq*dk*g",
    "H": "n*(Hq+Hkv)*(dk+dv)*e",
}
_ITEMS_OF_RING = {Kind.KV: ("KV", "dKV"), Kind.QUERY: ("Q", "dQ")}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster of equal nodes, and the attention of one layer, as one of its rings has them."""

    nodes: int
    ranks_per_node: int
    shape: Shape
    mask: Mask
    head_parallel_size: int = 1  # how many rings there are, each of other heads

    @property
    def ranks(self) -> int:
        """P, the ranks of a ring: of all without head parallelism."""
        return self.nodes * self.ranks_per_node

    @property
    def placement(self) -> list[int]:
        """The node of each rank."""
        return [rank // self.ranks_per_node for rank in range(self.ranks)]

    @cached_property
    def tiling(self) -> Tiling:
        """The tiles under zigzag; of how many tokens makes no difference to what travels."""
        return Tiling(zigzag(4 * self.ranks, self.ranks), self.mask)

    @cached_property
    def symbols(self) -> dict[str, int]:
        """The values of all symbols of the formulas."""
        values = {
            "P": self.ranks,
            "M": self.nodes,
            "L": self.ranks_per_node,
            "U": self.head_parallel_size,
            "n": self.shape.tokens,
            "Hq": self.shape.query_heads,
            "Hkv": self.shape.kv_heads,
            "dk": self.shape.head_dim,
            "dv": self.shape.value_head_dim,
            "e": self.shape.element_bytes,
            "g": self.shape.gradient_bytes,
        }
        return values | {name: _evaluate(formula, values) for name, formula in ITEMS.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm's forward, or its backward with one way for gradients to return."""

    algorithm: str
    returns: str = ""
    counted: Traffic | None = None
    formulas: tuple[str, ...] = ()
    why_not: str = ""

    def lines(self, setting: Setting) -> Iterator[tuple[str, int, str, int]]:
        """Give each place with the bytes counted, the formula and its value."""
        if self.counted is None:
            return
        counted = (self.counted.rank, self.counted.nic, self.counted.node)
        for place, count, formula in zip(PLACES, counted, self.formulas, strict=True):
            yield place, count, formula, _evaluate(formula, setting.symbols)


class _Case(NamedTuple):
    """A ring as a user can ask for it."""

    name: str
    burst: bool  # or a baseline
    topology: Topology
    travels: Kind


def forward_rows(setting: Setting) -> list[Row]:
    """Count the forward of every algorithm; in all rings K and V travel."""
    cases = [
        _Case("ring flat", False, Topology.FLAT, Kind.KV),
        _Case("ring double", False, Topology.DOUBLE, Kind.KV),
        _Case("burst flat", True, Topology.FLAT, Kind.KV),
        _Case("burst double", True, Topology.DOUBLE, Kind.KV),
        _Case(f"burst auto: {_auto_shape(setting)}", True, Topology.AUTO, Kind.KV),
        _Case(ALLGATHER, False, Topology.FLAT, Kind.KV),
    ]
    return [*(_ring_row(setting, case, None) for case in cases), _ulysses_row(setting)]


def backward_rows(setting: Setting) -> list[Row]:
    """Count the backward of every algorithm, with both ways for gradients to return."""
    cases = [
        _Case("ring flat", False, Topology.FLAT, Kind.KV),
        _Case("ring double", False, Topology.DOUBLE, Kind.KV),
        _Case("burst query flat", True, Topology.FLAT, Kind.QUERY),
        _Case("burst query double", True, Topology.DOUBLE, Kind.QUERY),
        _Case("burst kv double", True, Topology.DOUBLE, Kind.KV),
        _Case(ALLGATHER, False, Topology.FLAT, Kind.KV),
    ]
    rows = [_ring_row(setting, case, returns) for case in cases for returns in RETURNS]
    for returns in RETURNS:
        kind = _auto_kind(setting, returns)
        name = f"burst auto: {kind} {_auto_shape(setting)}"
        rows.append(_ring_row(setting, _Case(name, True, Topology.AUTO, kind), returns))
    return [*rows, _ulysses_row(setting)]


def differences(setting: Setting, rows: Sequence[Row]) -> list[str]:
    """Say where the counted bytes are not those of the formula."""
    return [
        f"{' '.join(filter(None, (row.algorithm, row.returns)))}, {place}: counted {count:,} "
        f"bytes, but {_pretty(formula)} = {value:,}"
        for row in rows
        for place, count, formula, value in row.lines(setting)
        if count != value
    ]


def _ring_row(setting: Setting, case: _Case, returns: GradientReturn | None) -> Row:
    """Count one ring's forward, or with `returns` its backward."""
    if case.name == ALLGATHER and setting.head_parallel_size > 1:
        return Row(case.name, why_not="no head parallelism with it")
    counted = _with_exchange(setting, _ring_traffic(setting, case.topology, case.travels, returns))
    double = case.topology is not Topology.FLAT
    block, gradient = _ITEMS_OF_RING[case.travels]
    reads = _hops(setting, double, None)
    if returns is None:
        formulas = [_sum((count, block)) for count in reads]
        return Row(case.name, "", counted, _and_exchange(setting, formulas))
    formulas = [
        _sum((a, block), (b, gradient))
        for a, b in zip(reads, _hops(setting, double, returns), strict=True)
    ]
    straight = case.burst and (double or setting.nodes == 1)
    default = GradientReturn.HOME if straight else GradientReturn.CHAIN
    return Row(
        case.name,
        f"{returns} *" if returns is default else returns,
        counted,
        _and_exchange(setting, formulas),
    )


def _with_exchange(setting: Setting, ring: Traffic) -> Traffic:
    """Add the all-to-all, which stays in the node, and the rings of the other heads."""
    size = setting.head_parallel_size
    return Traffic(ring.rank + setting.shape.exchange_bytes(size), ring.nic, ring.node * size)


def _and_exchange(setting: Setting, formulas: Sequence[str]) -> tuple[str, ...]:
    """Write down what `_with_exchange` counts."""
    if setting.head_parallel_size == 1:
        return tuple(formulas)
    rank, card, node = formulas
    return f"{rank} + (U-1)*H//U", card, node if node == "0" else f"U*({node})"


def _ring_traffic(
    setting: Setting, topology: Topology, kind: Kind, returns: GradientReturn | None
) -> Traffic:
    grid, _ = choose_grid(topology, setting.placement)
    ring = Ring(setting.tiling, grid, kind, returns or GradientReturn.CHAIN)
    hops = [*ring.reads(), *(ring.gradients() if returns else ())]
    return traffic(hops, setting.shape.item_bytes(), setting.placement)


def _hops(setting: Setting, double: bool, returns: GradientReturn | None) -> tuple[str, ...]:
    """How many blocks, or with `returns` gradients, leave a rank, a card and a node."""
    if double:
        # A chain's last sum comes to the owner's node at another rank than the owner.
        longer = returns is GradientReturn.CHAIN and min(setting.nodes, setting.ranks_per_node) > 1
        return "P" if longer else "(P-1)", "(M-1)", "L*(M-1)"
    if returns is GradientReturn.HOME:
        return "(P-1)", "(P-L)", "L*(P-L)"
    # All that leaves a node leaves it from its last rank.
    return ("(P-1)", "(P-1)", "(P-1)") if setting.nodes > 1 else ("(P-1)", "0", "0")


def _auto_shape(setting: Setting) -> str:
    return "double" if setting.nodes > 1 else "flat"


def _auto_kind(setting: Setting, returns: GradientReturn) -> Kind:
    """What travels backward where the configuration leaves it open."""

    def bytes_of_bottleneck(kind: Kind) -> int:
        return _ring_traffic(setting, Topology.AUTO, kind, returns).bottleneck

    return min(_ITEMS_OF_RING, key=bytes_of_bottleneck)


def _ulysses_row(setting: Setting) -> Row:
    """Count an all-to-all of q, k, v and out, or of their gradients: the same bytes."""
    if setting.head_parallel_size > 1:
        return Row("ulysses", why_not="is --head-parallel-size P: count it without that option")
    shape, ranks = setting.shape, setting.ranks
    try:
        copies = kv_head_copies(shape.query_heads, shape.kv_heads, ranks)
    except ValueError:
        given = f"{shape.query_heads} query and {shape.kv_heads} kv heads"
        return Row("ulysses", why_not=f"{given} cannot be shared out evenly over {ranks} ranks")
    heads = (shape.query_heads, shape.kv_heads * copies)
    dims = (shape.head_dim, shape.value_head_dim)
    row_bytes = sum(count // ranks * dim * shape.element_bytes for count in heads for dim in dims)
    hops = [
        Hop(send.item, rank, send.peer, send.channel, 0, send.lands)
        for rank in range(ranks)
        for send in exchange_plan(rank, ranks).sends
    ]
    counted = traffic(hops, {Kind.HEADS: shape.tokens * row_bytes}, setting.placement)
    held = "H" if copies == 1 else "n*(Hq+P)*(dk+dv)*e"  # a copy of a kv head for every rank
    formulas = tuple(f"{count}*{held}//P" for count in ("(P-1)", "(P-L)", "L*(P-L)"))
    return Row("ulysses", "", counted, formulas)


def _sum(*terms: tuple[str, str]) -> str:
    """Write down counts times items: `(P-1)*(KV+dKV)`."""
    items: dict[str, list[str]] = {}
    for count, item in terms:
        items.setdefault(count, []).append(item)
    items.pop("0", None)
    products = [f"{c}*{i[0] if len(i) == 1 else f'({"+".join(i)})'}" for c, i in items.items()]
    return " + ".join(products) or "0"


def _evaluate(formula: str, values: dict[str, int]) -> int:
    """Work out a formula of this file, so that what is shown is what has this value."""
    return int(eval(formula, {"__builtins__": {}}, values))


def _pretty(formula: str) -> str:
    return formula.replace("//", "/").replace("*", "·")


def _table(title: str, setting: Setting, rows: Sequence[Row], plain: bool) -> Table:
    table = Table(title=title, title_justify="left", box=None if plain else SIMPLE)
    for name in ("algorithm", "gradients", ""):
        table.add_column(name, no_wrap=True)
    table.add_column("bytes counted", justify="right")
    table.add_column("formula")
    table.add_column("its value", justify="right")
    if not any(row.returns for row in rows):
        table.columns[1].header = ""
    for row in rows:
        if row.why_not:
            table.add_row(row.algorithm, "", "", "", row.why_not, "", end_section=True)
        for place, count, formula, value in row.lines(setting):
            first = place == PLACES[0]
            table.add_row(
                row.algorithm if first else "",
                row.returns if first else "",
                place,
                f"{count:,}",
                _pretty(formula),
                f"{value:,}",
                end_section=place == PLACES[-1],
            )
    return table


def _legend(setting: Setting) -> str:
    values = setting.symbols
    lines = ["One attention layer; n: batch x tokens of a rank."]
    lines += ["Busiest card: a network card for every rank; busiest node: one for all its ranks."]
    if setting.head_parallel_size > 1:
        lines += ["All of a ring, one of U: its ranks P and L a node, their tokens n and heads."]
    hidden = {*ITEMS} if setting.head_parallel_size > 1 else {*ITEMS, "U"}
    lines += [", ".join(f"{name} = {values[name]:,}" for name in values if name not in hidden)]
    lines += [f"{name} = {_pretty(text)} = {values[name]:,}" for name, text in ITEMS.items()]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_burst.tools.bytes", description=__doc__.split("\n")[0]
    )
    tokens = parser.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--tokens-per-rank", type=_positive, metavar="N")
    tokens.add_argument("--seq-length", type=_positive, metavar="N", help="of all ranks together")
    heads = "of a rank, after tensor parallelism"
    parser.add_argument("--heads", type=_positive, required=True, help=f"query heads {heads}")
    parser.add_argument("--kv-heads", type=_positive, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=_positive, required=True)
    parser.add_argument("--value-head-dim", type=_positive, help="default: that of --head-dim")
    parser.add_argument("--nodes", type=_positive, default=1, metavar="M", help="default: 1")
    parser.add_argument("--ranks-per-node", type=_positive, required=True, metavar="L")
    parser.add_argument(
        "--head-parallel-size",
        type=_positive,
        default=1,
        metavar="U",
        help="over how many ranks of a node the heads are spread (default: 1)",
    )
    parser.add_argument("--batch", type=_positive, default=1, help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16")
    parser.add_argument(
        "--grad-dtype",
        choices=[dtype.value for dtype in GradDtype],
        default="float32",
        help="of gradients while they travel (default: %(default)s)",
    )
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _setting(args: argparse.Namespace) -> Setting:
    ranks = args.nodes * args.ranks_per_node
    kv_heads = args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise ValueError(f"--heads {args.heads} is not a multiple of --kv-heads {kv_heads}")
    tokens = args.seq_length or args.tokens_per_rank * ranks
    element = DTYPE_BYTES[args.dtype]
    shape = Shape(
        tokens=args.batch * zigzag(tokens, ranks).local_tokens,
        query_heads=args.heads,
        kv_heads=kv_heads,
        head_dim=args.head_dim,
        value_head_dim=args.value_head_dim or args.head_dim,
        element_bytes=element,
        gradient_bytes=4 if args.grad_dtype == GradDtype.FLOAT32 else element,
    )
    mask = Mask.causal() if args.mask == "causal" else Mask.full()
    setting = Setting(nodes=args.nodes, ranks_per_node=args.ranks_per_node, shape=shape, mask=mask)
    return of_a_ring(setting, args.head_parallel_size)


def of_a_ring(setting: Setting, size: int) -> Setting:
    """Return the setting of one of the rings if the heads are spread over `size` ranks."""
    shape = setting.shape
    if setting.ranks_per_node % size:
        raise ValueError(
            f"--head-parallel-size {size} does not divide --ranks-per-node {setting.ranks_per_node}"
        )
    copies = kv_head_copies(shape.query_heads, shape.kv_heads, size)
    heads = shape.query_heads // size, shape.kv_heads * copies // size
    shape = dataclasses.replace(
        shape, tokens=shape.tokens * size, query_heads=heads[0], kv_heads=heads[1]
    )
    return dataclasses.replace(
        setting,
        ranks_per_node=setting.ranks_per_node // size,
        shape=shape,
        head_parallel_size=size,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        setting = _setting(args)
    except ValueError as error:
        parser.exit(1, f"bytes: {error}\n")
    plain = not sys.stdout.isatty()
    # Wide enough for every row, which a narrow terminal may wrap: no number may be cut.
    console = Console(highlight=False, markup=False, width=160)
    console.print(_legend(setting))
    problems = []
    for title, rows in {
        "Forward": forward_rows(setting),
        "Backward": backward_rows(setting),
    }.items():
        console.print()
        console.print(_table(title, setting, rows, plain))
        problems += [f"{title.lower()}, {text}" for text in differences(setting, rows)]
    console.print("\n* what is taken where the configuration leaves it open")
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for problem in problems:
        errors.print(f"bytes: {problem}", style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
