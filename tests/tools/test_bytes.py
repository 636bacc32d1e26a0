"""The bytes that plans send are those of the formulas, and the command says so. (fast tier)"""

import pytest
import torch

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.config import Algorithm, GradientReturn, Topology
from megatron_burst.plans.cost import Shape, bytes_sent
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.plan import Kind, Plan
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import choose_grid
from megatron_burst.tools import bytes as command
from megatron_burst.transport.comm import Communicator

RINGS = [
    *("ring flat", "ring double", "burst query flat", "burst query double", "burst kv double"),
    "allgather",
]


def setting(nodes: int, length: int, shape: Shape, mask: Mask | None = None) -> command.Setting:
    mask = mask or Mask.causal()
    return command.Setting(nodes=nodes, ranks_per_node=length, shape=shape, mask=mask)


def shape(query_heads: int = 24, kv_heads: int = 24, **changes: int) -> Shape:
    odd = {"tokens": 12, "head_dim": 5, "value_head_dim": 3} | changes
    element = {"element_bytes": 2, "gradient_bytes": 4} | changes
    return Shape(query_heads=query_heads, kv_heads=kv_heads, **(odd | element))


GRIDS = [(1, 1), (1, 2), (1, 8), (2, 1), (8, 1), (2, 2), (2, 4), (3, 2), (2, 8), (4, 3), (3, 5)]


@pytest.mark.parametrize(("nodes", "length"), GRIDS)
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.full()], ids=["causal", "full"])
@pytest.mark.parametrize("kv_heads", [24, 8, 3])
def test_what_plans_send_is_what_the_formulas_say(
    nodes: int, length: int, mask: Mask, kv_heads: int
) -> None:
    here = setting(nodes, length, shape(kv_heads=kv_heads), mask)
    forward, backward = command.forward_rows(here), command.backward_rows(here)
    for rows in (forward, backward):
        assert command.differences(here, rows) == []
        assert all(row.counted or row.why_not for row in rows)
    pairs = [(row.algorithm, row.returns.removesuffix(" *")) for row in backward]
    assert {(name, way) for name in RINGS for way in ("chain", "home")} <= set(pairs)
    assert len(forward) == 7 and len(backward) == 15


@pytest.mark.parametrize(("nodes", "length", "size"), [(1, 4, 2), (2, 2, 2), (2, 8, 4), (3, 4, 2)])
@pytest.mark.parametrize("kv_heads", [24, 2, 1])
def test_a_hybrid_sends_what_its_rings_and_its_all_to_all_send(
    nodes: int, length: int, size: int, kv_heads: int
) -> None:
    whole = shape(kv_heads=kv_heads)
    here = command.of_a_ring(setting(nodes, length, whole), size)
    copied = max(kv_heads, size)
    assert here.ranks == nodes * length // size
    assert here.shape == shape(24 // size, copied // size, tokens=12 * size)
    forward, backward = command.forward_rows(here), command.backward_rows(here)
    for rows in (forward, backward):
        assert command.differences(here, rows) == []
    (flat,) = (row.counted for row in forward if row.algorithm == "ring flat")
    block, exchanged = 12 * copied * (5 + 3) * 2, 12 * (24 + copied) * (5 + 3) * 2
    assert flat and flat.rank == (here.ranks - 1) * block + exchanged * (size - 1) // size
    assert flat.node == ((here.ranks - 1) * block * size if nodes > 1 else 0)
    refused = {row.algorithm for row in (*forward, *backward) if row.why_not}
    assert refused == {"allgather", "ulysses"}


def test_a_double_ring_loads_a_card_less_by_the_ranks_of_a_node() -> None:
    rows = {row.algorithm: row.counted for row in command.forward_rows(setting(2, 8, shape()))}
    kv = 12 * 24 * (5 + 3) * 2
    flat, double = rows["ring flat"], rows["burst double"]
    assert flat and (flat.rank, flat.nic, flat.node) == (15 * kv, 15 * kv, 15 * kv)
    assert double and (double.rank, double.nic, double.node) == (15 * kv, kv, 8 * kv)
    assert rows["burst auto: double"] == double


def test_ulysses_exchanges_p_minus_1_of_p_parts_of_four_tensors() -> None:
    here = setting(2, 4, shape(kv_heads=8))
    total = 12 * (24 + 8) * (5 + 3) * 2
    for rows in (command.forward_rows(here), command.backward_rows(here)):
        counted = rows[-1].counted
        assert counted
        assert (counted.rank, counted.nic) == (total * 7 // 8, total * 4 // 8)
        assert counted.node == total * 16 // 8


def plan_of_context(here: command.Setting, config: BurstConfig) -> Plan:
    """What the first rank of a context with these settings carries out backward."""
    topology = config.topology
    if config.algorithm is not Algorithm.BURST and topology is Topology.AUTO:
        topology = Topology.FLAT
    grid, _ = choose_grid(topology, here.placement)
    context = BurstContext(config, None, grid, here.placement, Communicator((), {}, 1.0))
    q, k, v = (
        torch.zeros(1, here.shape.tokens, heads, 64, dtype=torch.bfloat16)
        for heads in (here.shape.query_heads, here.shape.kv_heads, here.shape.kv_heads)
    )
    return context.prepare(q, k, v, here.mask, 1.0).backward_plan


@pytest.mark.parametrize("grid", [(1, 4), (2, 2)])
@pytest.mark.parametrize(
    ("heads", "grad_dtype", "travels"),
    [
        ((4, 4), "model", Kind.QUERY),
        ((4, 1), "float32", Kind.KV),
        ((4, 2), "model", Kind.KV),
    ],
)
def test_auto_takes_what_a_context_takes(
    grid: tuple[int, int], heads: tuple[int, int], grad_dtype: str, travels: Kind
) -> None:
    gradient_bytes = 2 if grad_dtype == "model" else 4
    of = shape(*heads, tokens=8, head_dim=64, value_head_dim=64, gradient_bytes=gradient_bytes)
    here = setting(*grid, of)
    plan = plan_of_context(here, BurstConfig(grad_dtype=grad_dtype, kernel="reference"))
    (row,) = [
        row
        for row in command.backward_rows(here)
        if row.algorithm.startswith("burst auto") and row.returns.endswith("*")
    ]
    assert {send.item.kind for send in plan.sends} == {travels, travels.gradient}
    assert row.algorithm == f"burst auto: {travels} {'double' if grid[0] > 1 else 'flat'}"
    assert row.counted and row.counted.rank == bytes_sent(plan, of.item_bytes())


@pytest.mark.parametrize("grid", [(1, 4), (2, 2)])
@pytest.mark.parametrize(
    ("name", "algorithm", "backward", "topology"),
    [
        ("ring flat", "ring", "auto", "auto"),
        ("ring double", "ring", "auto", "double"),
        ("burst query flat", "burst", "query", "flat"),
        ("burst query double", "burst", "query", "double"),
        ("burst kv double", "burst", "kv", "double"),
        ("allgather", "allgather", "auto", "auto"),
    ],
)
def test_the_return_with_the_mark_is_what_a_context_takes(
    grid: tuple[int, int], name: str, algorithm: str, backward: str, topology: str
) -> None:
    here = setting(*grid, shape(4, 4, tokens=8, head_dim=64, value_head_dim=64))
    config = BurstConfig(
        algorithm=algorithm, backward=backward, topology=topology, kernel="reference"
    )
    (returns,) = [
        GradientReturn(row.returns.removesuffix(" *"))
        for row in command.backward_rows(here)
        if row.algorithm == name and row.returns.endswith("*")
    ]
    ranks, kind = here.ranks, Kind.QUERY if backward == "query" else Kind.KV
    placed, _ = choose_grid(Topology.DOUBLE if "double" in name else Topology.FLAT, here.placement)
    tiling = Tiling(zigzag(8 * ranks, ranks), here.mask)
    ring = Ring(tiling, placed, kind, returns, gather=name == "allgather")
    assert plan_of_context(here, config) == ring.backward(0)


SMALL = "--heads 6 --head-dim 4 --nodes 2 --ranks-per-node 3"


def test_the_command_prints_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seq-length", "120", *SMALL.split()]) == 0
    printed = capsys.readouterr().out
    assert "P = 6, M = 2, L = 3, n = 20, Hq = 6, Hkv = 6, dk = 4, dv = 4, e = 2, g = 4" in printed
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "ring flat a rank sends 9,600 (P-1)·KV 9,600" in lines
    assert "ring double chain * a rank sends 32,640 (P-1)·KV + P·dKV 32,640" in lines
    assert "ulysses a rank sends 3,200 (P-1)·H/P 3,200" in lines
    for name in (*RINGS, "burst flat", "burst double", "burst auto: query double"):
        assert any(line.startswith(name) for line in lines)
    assert "\x1b" not in printed and max(map(len, printed.splitlines())) <= 160


@pytest.mark.parametrize(
    ("arguments", "symbols"),
    [
        ("--tokens-per-rank 20 --batch 3", "n = 60"),
        ("--tokens-per-rank 20 --kv-heads 2 --value-head-dim 7", "Hkv = 2, dk = 4, dv = 7"),
        ("--tokens-per-rank 20 --dtype float32 --grad-dtype model", "e = 4, g = 4"),
        ("--tokens-per-rank 20 --grad-dtype model --mask full", "e = 2, g = 2"),
        (
            "--tokens-per-rank 20 --head-parallel-size 3",
            "P = 2, M = 2, L = 1, U = 3, n = 60, Hq = ",
        ),
    ],
)
def test_the_options_change_the_symbols(
    capsys: pytest.CaptureFixture[str], arguments: str, symbols: str
) -> None:
    assert command.main([*arguments.split(), *SMALL.split()]) == 0
    assert symbols in capsys.readouterr().out


def test_ulysses_says_why_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--tokens-per-rank 20 --heads 4 --head-dim 4 --nodes 2 --ranks-per-node 3"
    assert command.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    why = "4 query and 4 kv heads cannot be shared out evenly over 6 ranks"
    assert printed.count(why) == 2


def test_ulysses_gives_every_rank_a_kv_head() -> None:
    rows = command.forward_rows(setting(2, 4, shape(kv_heads=2)))
    counted = rows[-1].counted
    assert counted and counted.rank == 12 * (24 + 8) * (5 + 3) * 2 * 7 // 8


@pytest.mark.parametrize(
    ("item", "row"),
    [
        ("KV", "forward, ring flat, a rank sends: counted 9,600 bytes, but (P-1)·KV = 9,605"),
        ("dQ", "backward, burst query flat home, busiest card: counted"),
    ],
)
def test_a_formula_that_does_not_hold_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], item: str, row: str
) -> None:
    monkeypatch.setitem(command.ITEMS, item, f"{command.ITEMS[item]}+1")
    assert command.main(["--tokens-per-rank", "20", *SMALL.split()]) == 1
    assert row in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seq-length 100", "divisible by 2 x 6 ranks = 12, got 100 tokens"),
        ("--tokens-per-rank 5", "divisible by 2 x 6 ranks = 12, got 30 tokens"),
        ("--seq-length 120 --kv-heads 4", "--heads 6 is not a multiple of --kv-heads 4"),
        (
            "--seq-length 120 --head-parallel-size 2",
            "--head-parallel-size 2 does not divide --ranks-per-node 3",
        ),
        ("--seq-length 120 --batch 0", "--batch: 0 is not positive"),
        ("--seq-length 120 --tokens-per-rank 5", "not allowed with"),
        ("", "one of the arguments --tokens-per-rank --seq-length is required"),
    ],
)
def test_wrong_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([*arguments.split(), *SMALL.split()])
    assert ended.value.code
    assert message in capsys.readouterr().err
