"""The bytes that plans send are those of formulas on paper, which know no plan. (fast tier)

P ranks are M nodes of L; KV, Q, dKV, dQ are the bytes of a rank's blocks and of their gradients.
"""

import json
from dataclasses import replace

import pytest
import torch

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.config import Algorithm, GradientReturn, Topology
from megatron_burst.plans.cost import Shape, Traffic, bytes_sent
from megatron_burst.plans.topology import choose_grid
from megatron_burst.tools.command import main
from megatron_burst.tools.plan.traffic import Row, Setting, rows
from megatron_burst.transport.comm import Communicator

CHAIN, HOME = GradientReturn.CHAIN, GradientReturn.HOME
GRIDS = [(1, 1), (1, 2), (1, 8), (2, 1), (8, 1), (2, 2), (2, 4), (3, 2), (2, 8), (4, 3), (3, 5)]
RINGS = [
    *("ring flat", "ring double", "allgather", "burst kv flat", "burst kv double"),
    *("burst query flat", "burst query double"),
]


def shape(query_heads: int = 24, kv_heads: int = 24, **changes: int) -> Shape:
    odd = {"tokens": 12, "head_dim": 5, "value_head_dim": 3} | changes
    element = {"element_bytes": 2, "gradient_bytes": 4} | changes
    return Shape(query_heads=query_heads, kv_heads=kv_heads, **(odd | element))


def setting(nodes: int, length: int, of: Shape) -> Setting:
    return Setting(nodes=nodes, ranks_per_node=length, shape=of)


def found(here: Setting, returns: GradientReturn = GradientReturn.AUTO) -> dict[str, Row]:
    return {row.algorithm: row for row in rows(here, returns)}


def blocks(of: Shape) -> dict[str, int]:
    n, query_heads, kv_heads = of.tokens, of.query_heads, of.kv_heads
    dims, e, g = of.head_dim + of.value_head_dim, of.element_bytes, of.gradient_bytes
    return {
        "KV": n * kv_heads * dims * e,
        "dKV": n * kv_heads * dims * g,
        "Q": n * query_heads * (dims * e + 8),
        "dQ": n * query_heads * of.head_dim * g,
    }


def times(here: Setting, double: bool, returns: GradientReturn | None) -> Traffic:
    """How many blocks, or with `returns` gradients, leave a rank, a NIC and a node."""
    nodes, length, ranks = here.nodes, here.ranks_per_node, here.ranks
    if double:
        # A chain's last sum comes to the owner's node at another rank than the owner.
        longer = returns is CHAIN and min(nodes, length) > 1
        return Traffic(ranks - 1 + longer, nodes - 1, length * (nodes - 1))
    if returns is HOME:
        return Traffic(ranks - 1, ranks - length, length * (ranks - length))
    # All that leaves a node leaves it from its last rank.
    leaves = ranks - 1 if nodes > 1 else 0
    return Traffic(ranks - 1, leaves, leaves)


def on_paper(here: Setting, name: str, returns: GradientReturn) -> tuple[Traffic, Traffic]:
    """Forward and backward of a ring; U rings of other heads share a node's NIC."""
    size, sizes = blocks(here.shape), here.head_parallel_size
    block, gradient = ("Q", "dQ") if "query" in name else ("KV", "dKV")
    reads = times(here, "double" in name, None)
    returned = times(here, "double" in name, returns)
    exchanged = here.shape.exchange_bytes(sizes)

    def sent(reading: int, returning: int, once: int = 0, rings: int = 1) -> int:
        return rings * (reading * size[block] + returning * size[gradient]) + once

    forward = Traffic(
        reads.rank * size["KV"] + exchanged,
        reads.card * size["KV"],
        sizes * reads.node * size["KV"],
    )
    return forward, Traffic(
        sent(reads.rank, returned.rank, exchanged),
        sent(reads.card, returned.card),
        sent(reads.node, returned.node, rings=sizes),
    )


@pytest.mark.parametrize(("nodes", "length"), GRIDS)
@pytest.mark.parametrize("kv_heads", [24, 8, 3])
@pytest.mark.parametrize("returns", [CHAIN, HOME])
def test_what_plans_send_is_what_the_formulas_say(
    nodes: int, length: int, kv_heads: int, returns: GradientReturn
) -> None:
    here = setting(nodes, length, shape(kv_heads=kv_heads))
    rows_found = found(here, returns)
    assert {name for name in rows_found if "auto" not in name} == {*RINGS, "ulysses"}
    for name in RINGS:
        row = rows_found[name]
        assert (row.forward, row.backward) == on_paper(here, name, returns), name


@pytest.mark.parametrize(("nodes", "length", "size"), [(1, 4, 2), (2, 2, 2), (2, 8, 4), (3, 4, 2)])
@pytest.mark.parametrize("kv_heads", [24, 2, 1])
def test_a_hybrid_sends_what_its_rings_and_its_all_to_all_send(
    nodes: int, length: int, size: int, kv_heads: int
) -> None:
    here = setting(nodes, length, shape(kv_heads=kv_heads)).of_a_ring(size)
    copied = max(kv_heads, size)
    assert here.ranks == nodes * length // size
    assert here.shape == shape(24 // size, copied // size, tokens=12 * size)
    exchanged = 12 * (24 + copied) * (5 + 3) * 2 * (size - 1) // size
    assert here.shape.exchange_bytes(size) == exchanged
    for returns in (CHAIN, HOME):
        rows_found = found(here, returns)
        for name in set(RINGS) - {"allgather"}:
            row = rows_found[name]
            assert (row.forward, row.backward) == on_paper(here, name, returns), name
        assert {name for name, row in rows_found.items() if row.why_not} == {"allgather", "ulysses"}


@pytest.mark.parametrize(
    ("nodes", "length", "kv_heads"), [(2, 4, 8), (2, 4, 2), (1, 8, 24), (4, 2, 1)]
)
def test_ulysses_exchanges_p_minus_1_of_p_parts_of_four_tensors(
    nodes: int, length: int, kv_heads: int
) -> None:
    ulysses = found(setting(nodes, length, shape(kv_heads=kv_heads)))["ulysses"]
    total = 12 * (24 + max(kv_heads, 8)) * (5 + 3) * 2  # every rank has a kv head
    away = 8 - length
    counted = Traffic(total * 7 // 8, total * away // 8, length * total * away // 8)
    assert ulysses.forward == ulysses.backward == counted


def test_ulysses_says_why_it_cannot() -> None:
    row = found(setting(2, 3, shape(4, 4)))["ulysses"]
    assert row.why_not == "4 query and 4 kv heads cannot be shared out evenly over 6 ranks"


@pytest.mark.parametrize("grid", [(1, 4), (2, 2)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (4, 2)])
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_each_row_is_what_a_context_sends(
    grid: tuple[int, int], heads: tuple[int, int], gradient_bytes: int
) -> None:
    of = shape(*heads, tokens=8, head_dim=64, value_head_dim=64, gradient_bytes=gradient_bytes)
    here = setting(*grid, of)
    dtype = "model" if gradient_bytes == 2 else "float32"
    for name, row in found(here).items():
        if name == "ulysses":
            continue
        config = BurstConfig(kernel="reference", grad_dtype=dtype, **asked(name))
        topology = config.topology
        if config.algorithm is not Algorithm.BURST and topology is Topology.AUTO:
            topology = Topology.FLAT
        placed, _ = choose_grid(topology, here.placement)
        context = BurstContext(config, None, placed, here.placement, Communicator((), {}, 1.0))
        q, k, v = (
            torch.zeros(1, of.tokens, count, 64, dtype=torch.bfloat16)
            for count in (of.query_heads, of.kv_heads, of.kv_heads)
        )
        plan = context.prepare(q, k, v, Mask.causal(), 1.0).backward_plan
        assert row.backward and row.backward.rank == bytes_sent(plan, of.item_bytes()), name
        if "auto" in name:
            kinds = {send.item.kind for send in plan.sends}
            assert any(f"auto: {kind} " in name for kind in kinds), name


def asked(name: str) -> dict[str, str]:
    """The settings that a row's name stands for."""
    given = {"algorithm": name.split()[0]}
    if "auto" not in name:
        for word in name.split()[1:]:
            given["topology" if word in list(Topology) else "backward"] = word
    return given


SMALL = "--heads 6 --head-dim 4 --nodes 2 --gpus-per-node 3"


def test_the_command_prints_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--seq-length", "120", *SMALL.split()]) == 0
    said = capsys.readouterr().out
    for name in (*RINGS, "ulysses", "burst auto: query double"):
        assert any(line.strip().startswith(name) for line in said.splitlines())


@pytest.mark.parametrize(
    ("words", "of"),
    [
        ("--tokens-per-rank 20 --batch 3", {"tokens": 60}),
        ("--seq-length 120 --kv-heads 2 --value-head-dim 7", {"kv_heads": 2, "value_head_dim": 7}),
        (
            "--tokens-per-rank 20 --dtype float32 --grad-dtype model",
            {"element_bytes": 4, "gradient_bytes": 4},
        ),
        ("--tokens-per-rank 20 --grad-dtype model", {"gradient_bytes": 2}),
    ],
)
def test_the_options_change_what_is_counted(
    capsys: pytest.CaptureFixture[str], words: str, of: dict[str, int]
) -> None:
    assert main(["plan", "--json", *words.split(), *SMALL.split()]) == 0
    printed = {row["algorithm"]: row for row in json.loads(capsys.readouterr().out)}
    usual = shape(6, 6, tokens=20, head_dim=4, value_head_dim=4)
    here = setting(2, 3, replace(usual, **of))
    for name, row in found(here).items():
        if name in ("ring flat", "burst query double"):
            assert row.forward and row.backward
            assert printed[name]["forward_bytes"]["rank"] == row.forward.rank
            assert printed[name]["backward_bytes"]["nic"] == row.backward.card


def test_heads_that_are_spread(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--tokens-per-rank 20 --head-parallel-size 3 --json {SMALL}"
    assert main(["plan", *words.split()]) == 0
    printed = {row["algorithm"]: row for row in json.loads(capsys.readouterr().out)}
    here = setting(2, 3, shape(6, 6, tokens=20, head_dim=4, value_head_dim=4)).of_a_ring(3)
    assert printed["ring flat"]["forward_bytes"]["rank"] == found(here)["ring flat"].forward.rank


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seq-length 100", "divisible by 2 x 6 ranks = 12, got 100 tokens"),
        ("--tokens-per-rank 5", "divisible by 2 x 6 ranks = 12, got 30 tokens"),
        ("--seq-length 120 --kv-heads 4", "--heads 6 is not a multiple of --kv-heads 4"),
        (
            "--seq-length 120 --head-parallel-size 2",
            "--head-parallel-size 2 does not divide --gpus-per-node 3",
        ),
        ("", "--heads also wants --head-dim, --gpus-per-node, and --tokens-per-rank or"),
    ],
)
def test_wrong_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["plan", *words.split(), *SMALL.split()]) == 1
    assert message in capsys.readouterr().err
