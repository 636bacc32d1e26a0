"""Ring attention against the float64 dense oracle, and its bytes against the plan. (fast tier)"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.attention.preparing import prepare
from megatron_burst.config import Topology
from megatron_burst.plans.schedules.plan import Channel, Kind, Plan
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, choose_grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.transport.comm import Communicator
from tests.attention.cases import (
    FLOAT32_TOLERANCE,
    HEADS,
    Answer,
    Case,
    errors,
    lines_of_plans,
    run_cases,
    variants,
)
from tests.plans.masks import Masking
from tests.plans.simulator import tiles_of
from tests.tier import examples, in_turn, is_thorough, slow_if, some
from tests.workers import Team, WorkerPool

GRAD_DTYPES = ("float32", "model")
BFLOAT16_OVER_FLASH = 1.5
# Rounding to bfloat16 errs evenly within ±2^-8 of the power of two below a value: its root mean
# square is at most this part of the value.
ONE_ROUNDING = 2**-8 / 3**0.5


@dataclass(frozen=True)
class Place:
    """Processes of the eight, of which so many share a node, and what is tried there."""

    processes: Sequence[int]
    per_node: int
    topologies: tuple[str, ...] = ("flat", "double")

    @property
    def ranks(self) -> int:
        return len(self.processes)

    def grid(self, case: Case) -> Grid:
        flat = case.config.get("algorithm") == "ulysses"
        topology = Topology.FLAT if flat else Topology(case.config["topology"])
        return choose_grid(topology, [p // self.per_node for p in self.processes])[0]

    def is_chained(self, case: Case) -> bool:
        """Of baselines, where each partial would cross nodes, and on nodes of one at no cost."""
        if case.config["algorithm"] != "burst":
            return True
        grid, several = self.grid(case), len({p // self.per_node for p in self.processes}) > 1
        exact = case.dtype.itemsize >= 4 and not case.mask.is_sparse
        return several and (grid.nodes == 1 or (grid.ranks_per_node == 1 and exact))


ONE_NODE = {f"{p} on a node": Place(range(8 - p, 8), 8, ("flat",)) for p in range(1, 9)}
PLACES = {
    **ONE_NODE,
    "3 nodes x 1": Place(range(5, 8), 1),
    "2 nodes x 2": Place(range(4, 8), 2),
    "2 nodes x 3": Place(range(6), 3, ("double",)),
    "3 nodes x 2": Place(range(2, 8), 2, ("double",)),
    "2 nodes x 4": Place(range(8), 4, ("double",)),
    "4 nodes x 2": Place(range(8), 2, ("double",)),
    "every second process, 2 nodes x 2": Place(range(1, 8, 2), 4, ("double",)),
    "nodes of 1, 2 and 2": Place(range(3, 8), 2, ("double",)),
    "nodes of 3 and 4": Place(range(1, 8), 4, ("double",)),
}
SLOW = {"7 on a node", "8 on a node", "3 nodes x 1", "2 nodes x 3", "2 nodes x 4", "4 nodes x 2"}
SLOW |= {"4 on a node", "5 on a node", "6 on a node", "nodes of 3 and 4"}
EVERY_PLACE = pytest.mark.parametrize("name", slow_if(SLOW, PLACES))
SHAPES = [
    {"batch": 2, "chunk": 1, "dim": 5},  # one token a chunk, an odd head size
    {"chunk": 13, "dim": 16},
    {"batch": 2, "chunk": 5, "dim": 7},
]


def hard_cases(place: Place) -> list[Case]:
    """The settings at this place; each with one of the shapes, heads and masks, in turns.

    In the fast tier every second one where there are other places of as many settings.
    """
    turns = [*itertools.product(SHAPES, HEADS.values(), (Masking(), Masking(False)))]
    random.Random(repr(place)).shuffle(turns)
    cases = []
    for number, setting in enumerate(variants(place.topologies)):
        shape, heads, mask = turns[number % len(turns)]
        if setting["algorithm"] == "ulysses":
            heads = (2 * place.ranks, place.ranks)
        config = {**setting, "ranks_per_node": place.per_node}
        cases.append(Case(config=config, heads=heads, masking=mask, **shape))
    return [*some(cases, 2, place.ranks % 2)] if place.topologies == ("double",) else cases


@pytest.fixture(scope="module")
def answers(workers: WorkerPool) -> Callable[[Place], list[tuple[Case, Answer]]]:
    """All hard cases of a place with their answers; several tests look at them."""
    known: dict[int, list[tuple[Case, Answer]]] = {}

    def of(place: Place) -> list[tuple[Case, Answer]]:
        if id(place) not in known:
            cases = hard_cases(place)
            answered = run_cases(workers, place.processes, cases)
            known[id(place)] = list(zip(cases, answered, strict=True))
        return known[id(place)]

    return of


type Answers = Callable[[Place], list[tuple[Case, Answer]]]


@EVERY_PLACE
def test_float32_equals_the_dense_oracle(answers: Answers, name: str) -> None:
    place = PLACES[name]
    for case, answer in answers(place):
        worst = errors(answer.found, case.expected(place.ranks))
        assert max(worst.values()) < FLOAT32_TOLERANCE, (case, worst)
        assert {reply.grid for reply in answer.replies} == {str(place.grid(case))}


@EVERY_PLACE
def test_counted_bytes_equal_the_plan(answers: Answers, name: str) -> None:
    for case, answer in answers(PLACES[name]):
        check_bytes(case, PLACES[name], answer)


def check_bytes(case: Case, place: Place, answer: Answer) -> None:
    sizes = case.shape.item_bytes()
    if case.config["algorithm"] == "ulysses":
        assert {reply.sent for reply in answer.replies} == {ulysses_bytes(case, place.ranks)}
        return
    for rank, reply in enumerate(answer.replies):
        found = [reply.forward, reply.backward]
        for plan, counted in zip(plans_of(case, place, rank), found, strict=True):
            by_channel: Counter[Channel] = Counter()
            for send in plan.sends:
                by_channel[send.channel] += sizes[send.item.kind]
            assert counted == by_channel, (case, rank)


def plans_of(case: Case, place: Place, rank: int) -> list[Plan]:
    tiling = Tiling(zigzag(2 * place.ranks * case.chunk, place.ranks), case.mask)
    gather = case.config["algorithm"] == "allgather"
    shared = tiling, place.grid(case)
    back = Kind(case.config.get("backward", "kv")), place.is_chained(case)
    forward = Ring(*shared, gather=gather).forward(rank)
    return [forward, Ring(*shared, *back, gather).backward(rank)]


def ulysses_bytes(case: Case, ranks: int) -> tuple[int, int]:
    """Of q, k, v, out and lse a rank keeps one part in P, and so of all gradients but lse's."""
    rows, wide = case.batch * 2 * case.chunk, max(4, case.dtype.itemsize)
    query_heads, kv_heads = case.heads
    blocks = rows * 2 * (query_heads + kv_heads) * case.dim * case.dtype.itemsize
    lse = rows * query_heads * wide
    return (blocks + lse) * (ranks - 1) // ranks, blocks * (ranks - 1) // ranks


@pytest.mark.parametrize("name", slow_if({"3 nodes x 2"}, ["3 on a node", "3 nodes x 2"]))
def test_the_reference_kernel_in_float64_is_exact(workers: WorkerPool, name: str) -> None:
    place = PLACES[name]
    cases = [
        replace(case, dtype=torch.float64, config={**case.config, "kernel": "reference"})
        for case in hard_cases(place)
    ]
    for case, answer in zip(cases, run_cases(workers, place.processes, cases), strict=True):
        worst = errors(answer.found, case.expected(place.ranks))
        assert max(worst.values()) < 1e-14, (case, worst)
        check_bytes(case, place, answer)


BFLOAT16 = [
    "mha, 4 on a node",
    "mha, 2 nodes x 2",
    "gqa 4:1, 2 on a node",
    "gqa 4:1, 2 nodes x 4",
    "gqa 8:1, 8 on a node",
]
BOTH_HEADS = {"mha, 2 nodes x 2", "gqa 4:1, 2 on a node"}  # and both kinds of rings


@pytest.mark.parametrize("where", slow_if({*BFLOAT16} - BOTH_HEADS, BFLOAT16))
def test_bfloat16_is_nearly_as_exact_as_one_call_of_flash_attention(
    workers: WorkerPool, where: str
) -> None:
    heads, name = where.split(", ")
    place = PLACES[name]
    algorithms = ("burst", "allgather", "ulysses") if heads == "mha" else ("burst",)
    cases = [
        Case(
            config={**setting, "ranks_per_node": place.per_node},
            chunk=(512 if is_thorough() else 256) // place.ranks,
            heads=HEADS[heads],
            dim=32,
            dtype=torch.bfloat16,
        )
        for setting in variants(place.topologies[-1:], GRAD_DTYPES)
        if setting["algorithm"] in algorithms
    ]
    expected = cases[0].expected(place.ranks)
    flash = errors(cases[0].one_kernel_call(place.ranks, "cpu"), expected)
    unrounded: dict[str, dict[str, float]] = {}
    for case, answer in zip(cases, run_cases(workers, place.processes, cases), strict=True):
        check_bytes(case, place, answer)
        found = errors(answer.found, expected)
        way = str({**case.config, "grad_dtype": ""})
        if case.config.get("grad_dtype") == "model":
            sent = ONE_ROUNDING * roundings(case, place) ** 0.5
            bound = {n: math.hypot(error, sent) for n, error in unrounded[way].items()}
        else:
            unrounded[way] = found
            bound = {n: BFLOAT16_OVER_FLASH * error for n, error in flash.items()}
        for result, error in found.items():
            assert error <= bound[result], (case, result, error, bound[result])


def roundings(case: Case, place: Place) -> int:
    """How often a gradient that is sent in bfloat16 is rounded on its way, at most.

    A kernel's own partial is bfloat16 already, so the first hop of a pass rounds nothing; each
    further one rounds the sum so far, which is no larger than the whole. Sent home, only the sums
    of nodes are rounded, each once, and together these are no larger than the whole.
    """
    grid = place.grid(case)
    double = min(grid.nodes, grid.ranks_per_node) > 1
    if not place.is_chained(case):
        return 1 if double else 0
    return (grid.ranks if double else grid.ranks - 1) - grid.nodes


@examples(40)
@given(
    place=st.sampled_from([*PLACES.values()]),
    which=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    chunk=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 8]),
    dim=st.integers(1, 20),
    mask=st.sampled_from([Masking(), Masking(False)]),
    kernel=st.sampled_from(["cpu", "reference"]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_dense_oracle(
    workers: WorkerPool,
    place: Place,
    which: int,
    batch: int,
    chunk: int,
    kv_heads: int,
    group: int,
    dim: int,
    mask: Mask,
    kernel: str,
    seed: int,
) -> None:
    settings_ = variants(place.topologies)
    config = settings_[which % len(settings_)] | {"ranks_per_node": place.per_node}
    kv_heads *= place.ranks if config["algorithm"] == "ulysses" else 1
    case = Case(
        config={**config, "kernel": kernel},
        batch=batch,
        chunk=chunk,
        heads=(kv_heads * group, kv_heads),
        dim=dim,
        masking=mask,
        seed=seed,
    )
    (answer,) = run_cases(workers, place.processes, [case])
    check_bytes(case, place, answer)
    for found, wanted in zip(answer.found, case.expected(place.ranks), strict=True):
        # Tiny cases cancel: dq of a single visible key is exactly 0, so allow an absolute floor.
        floor = wanted.norm() + wanted.numel() ** 0.5
        assert (found.double() - wanted).norm() <= FLOAT32_TOLERANCE * floor


def test_shapes_dtypes_and_masks_may_change_from_call_to_call(workers: WorkerPool) -> None:
    place = PLACES["2 nodes x 2"]
    config = {"ranks_per_node": place.per_node, "backward": "query"}
    cases = [
        Case(config=config, masking=mask, dtype=dtype, **shape)
        for shape, mask, dtype in (
            (SHAPES[0], Masking(), torch.float32),
            (SHAPES[1], Masking(), torch.float64),
            (SHAPES[1], Masking(False), torch.float32),
            (SHAPES[0], Masking(), torch.float32),
        )
    ]
    for case, answer in zip(cases, run_cases(workers, place.processes, cases), strict=True):
        assert max(errors(answer.found, case.expected(4)).values()) < FLOAT32_TOLERANCE


def ring_cases(config: dict[str, Any], **shape: Any) -> list[Case]:
    """The backward that `auto` takes, and both that there are."""
    return [
        Case(config={**config, "backward": backward}, **shape)
        for backward in ("auto", "kv", "query")
    ]


AUTO = ["4 on a node, flat", "2 nodes x 2, double", "2 nodes x 3, flat", "2 nodes x 3, double"]


@pytest.mark.parametrize("where", slow_if(AUTO[1:], AUTO))
def test_auto_never_sends_more_than_the_cheaper_ring(workers: WorkerPool, where: str) -> None:
    name, topology = where.split(", ")
    place = PLACES[name]
    kinds = some([*itertools.product(HEADS.values(), ("float32", "model"))], 5)
    config = {"ranks_per_node": place.per_node, "topology": topology}
    cases = [
        ring_cases(config | {"grad_dtype": dtype}, heads=heads, dim=8, dtype=torch.bfloat16)
        for heads, dtype in kinds
    ]
    answers = run_cases(workers, place.processes, [*itertools.chain(*cases)])
    for kind, same_kind in zip(kinds, itertools.batched(answers, 3), strict=True):
        for most in (most_bytes, most_bytes_of_a_rank):
            auto, kv, query = map(most, same_kind)
            assert auto == min(kv, query), kind
            assert (query < kv) == (kind[0] == HEADS["mha"]), kind


def plan_as_configured(team: Team, case: Case) -> tuple[int, Plan]:
    context = team.context(BurstConfig(**case.config))
    q, k, v, _ = (context.shard(x, dim=1) for x in case.inputs(context.ranks))
    return context.rank, prepare(context, q, k, v, case.mask, 1.0).backward_plan


@pytest.mark.parametrize(
    ("name", "algorithm", "topology", "way"),
    [
        ("3 on a node", "burst", "flat", "home"),
        ("3 nodes x 1", "burst", "double", "chain"),  # in float32
        ("2 nodes x 2", "burst", "double", "home"),
        ("2 nodes x 2", "burst", "flat", "chain"),  # each partial would cross the nodes
        ("nodes of 1, 2 and 2", "burst", "double", "chain"),  # a flat ring, too
        ("3 on a node", "ring", "flat", "chain"),
        ("2 nodes x 2", "ring", "double", "chain"),
        ("2 nodes x 2", "allgather", "flat", "chain"),
    ],
)
def test_gradients_go_home_straight_unless_that_crosses_nodes_more_often(
    workers: WorkerPool, name: str, algorithm: str, topology: str, way: str
) -> None:
    place = PLACES[name]
    config = {"algorithm": algorithm, "topology": topology, "ranks_per_node": place.per_node}
    case = Case(config=config)
    assert place.is_chained(case) == (way == "chain")
    for rank, plan in workers.run(place.processes, plan_as_configured, case):
        expected = plans_of(case, place, rank)[1]
        assert steps_of(plan) == steps_of(expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.bfloat16},  # a part is half as wide as a sum
        {"dtype": torch.bfloat16, "config": {"grad_dtype": "model"}},  # rounded at every hop
        # A part may be fewer rows than a sum; a direct exchange would be over the limit.
        {"masking": Masking(window=23998), "chunk": 4000, "config": {"memory_mb": 1}},
    ],
    ids=["a part is narrower", "rounded", "a part is fewer rows"],
)
def test_nodes_of_one_rank_take_no_chain_that_costs_more(
    workers: WorkerPool, settings: dict[str, Any]
) -> None:
    place = PLACES["3 nodes x 1"]
    config = {"algorithm": "burst", "topology": "double", "ranks_per_node": 1}
    case = Case(**settings | {"config": config | settings.get("config", {})})
    assert not place.is_chained(case)
    for rank, plan in workers.run(place.processes, plan_as_configured, case):
        assert steps_of(plan) == steps_of(plans_of(case, place, rank)[1])


def steps_of(plan: Plan) -> list[tuple[object, ...]]:
    return [(step.receives, step.sends, tiles_of(step)) for step in plan.steps]


def most_bytes(answer: Answer) -> int:
    """What the bottleneck link has to carry in the backward: a NIC, if one is in use."""
    between = (Channel.READ_BETWEEN, Channel.GRADIENT_BETWEEN)
    cards = [sum(reply.backward[c] for c in between) for reply in answer.replies]
    return max(cards) or most_bytes_of_a_rank(answer)


def most_bytes_of_a_rank(answer: Answer) -> int:
    return max(reply.sent[1] for reply in answer.replies)


@pytest.mark.parametrize(
    ("name", "heads", "choice", "other"),
    [("3 on a node", "gqa 4:1", "kv", "query"), ("2 nodes x 2", "mha", "query", "kv")],
)
def test_the_choice_of_auto_is_logged_once_with_both_figures(
    workers: WorkerPool, name: str, heads: str, choice: str, other: str
) -> None:
    place = PLACES[name]
    auto, kv, query = ring_cases(
        {"ranks_per_node": place.per_node, "grad_dtype": "model"},
        heads=HEADS[heads],
        chunk=64,
        dim=64,
        dtype=torch.bfloat16,
    )
    answered = run_cases(workers, place.processes, [kv, query])
    figures = dict(zip(("kv", "query"), map(in_mib, map(most_bytes, answered)), strict=True))
    (line,), *rest = workers.run(place.processes, lines_of_plans, auto)
    assert rest == [[]] * (place.ranks - 1)
    grid = "flat ring" if place in ONE_NODE.values() else "double ring of 2 nodes x 2 ranks"
    forward = in_mib(answered[0].replies[0].forward.total())
    assert f"burst on {place.ranks} ranks (zigzag, {grid})" in line
    assert f"sends {forward} a rank forward by the kv ring; on the bottleneck link" in line
    assert f"backward the {choice} ring {figures[choice]} (the {other} ring" in line
    assert f"(the {other} ring {figures[other]});" in line
    assert figures[choice] != figures[other] and "0.00" not in line


def in_mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def test_results_do_not_depend_on_the_run(workers: WorkerPool) -> None:
    place = PLACES["2 nodes x 2"]
    cases = [
        Case(config={**setting, "ranks_per_node": 2}, chunk=16, dim=16, dtype=torch.bfloat16)
        for setting in variants(("double",), GRAD_DTYPES)
        if setting["algorithm"] == "burst"
    ]
    cases = [*some(cases, 3)]
    first, second = (run_cases(workers, place.processes, cases) for _ in range(2))
    for case, a, b in zip(cases, first, second, strict=True):
        assert all(map(torch.equal, a.found, b.found)), case


def sent_as(config: dict[str, Any], *grad_dtypes: str, **shape: Any) -> list[Case]:
    """Cases that differ in how gradients travel."""
    shape = {"chunk": 16, "dim": 16, "dtype": torch.bfloat16, **shape}
    return [Case(config=config | {"grad_dtype": dtype}, **shape) for dtype in grad_dtypes]


@pytest.mark.parametrize(
    ("topology", "way"), in_turn(["flat", "double", "direct"], [("query", 2 + 4 / 16), ("kv", 1.0)])
)
def test_what_a_kernel_returned_goes_home_in_bfloat16_and_loses_nothing(
    workers: WorkerPool, topology: str, way: tuple[str, float]
) -> None:
    """On a flat ring, where each rank is a node, and straight to the owner under a window."""
    backward, e = way
    common: dict[str, Any] = {"backward": backward, "ranks_per_node": 4}
    if topology == "double":  # auto would take a mesh
        common |= {"topology": topology, "ranks_per_node": 1}
    masking = Masking(window=3 if topology == "direct" else None)
    cases = sent_as(common, "float32", "auto", "model", masking=masking)
    first, *others = run_cases(workers, 4, cases)
    for other in others:
        assert all(map(torch.equal, first.found, other.found))
        ratio = other.replies[0].sent[1] / first.replies[0].sent[1]
        assert ratio == (2 * e + 2) / (2 * e + 4)


NODES = [(2, 2, "double"), (2, 4, "double"), (4, 2, "double"), (4, 2, "mesh")]


@pytest.mark.parametrize("backward", ["kv", "query"])
@pytest.mark.parametrize("place", slow_if(NODES[1:], NODES), ids=str)
def test_between_nodes_it_does_so_within_the_node_and_sums_stay_float32(
    workers: WorkerPool, place: tuple[int, int, str], backward: str
) -> None:
    nodes, length, topology = place
    config = {"backward": backward, "topology": topology, "ranks_per_node": length}
    cases = sent_as(config, "float32", "auto", chunk=8)
    first, second = run_cases(workers, nodes * length, cases)
    assert all(map(torch.equal, first.found, second.found))
    for before, after in zip(first.replies, second.replies, strict=True):
        halved = before.backward[Channel.GRADIENT_WITHIN] // 2
        assert halved and after.backward == {**before.backward, Channel.GRADIENT_WITHIN: halved}


def test_what_is_summed_on_the_way_stays_float32(workers: WorkerPool) -> None:
    """Along a chain, and of two tiles with one block."""
    ways: list[dict[str, Any]] = [
        {"algorithm": "ring"},
        {"algorithm": "ring", "topology": "double", "ranks_per_node": 2},
        {"backward": "query", "topology": "flat", "ranks_per_node": 2},
        {"layout": "segmented-zigzag"},
    ]
    for way in ways:
        first, second = run_cases(workers, 4, sent_as(way, "float32", "auto"))
        assert all(map(torch.equal, first.found, second.found))
        totals = [[reply.sent[1] for reply in each.replies] for each in (first, second)]
        assert totals[0] == totals[1], way


class Staged(Communicator):
    """As if the transport could not reach the tensors: it gets memory of its own for each."""

    def wire(self, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 0xFF)  # the bytes of NaN


def staged(team: Team, config: BurstConfig) -> BurstContext:
    context = team.context(config)
    ranks = dist.get_process_group_ranks(team.group)
    context.communicator = Staged(ranks, team.groups.channels, config.timeout_seconds)
    return context


SCATTERED = "every second process, 2 nodes x 2"


@pytest.mark.parametrize("name", slow_if({SCATTERED}, ["3 on a node", SCATTERED]))
def test_messages_may_pass_through_other_memory(workers: WorkerPool, name: str) -> None:
    place = PLACES[name]
    cases = hard_cases(place)
    answers = run_cases(workers, place.processes, cases, make_context=staged)
    for case, answer in zip(cases, answers, strict=True):
        assert max(errors(answer.found, case.expected(place.ranks)).values()) < FLOAT32_TOLERANCE
        check_bytes(case, place, answer)


@cache
def alone() -> BurstContext:
    return BurstContext.create(BurstConfig())


def test_lse_carries_no_gradient_and_inputs_may_be_strided() -> None:
    base = torch.randn(6, 1, 4, 3 * 8, requires_grad=True)  # Megatron's [s, b, h, 3 x d]
    q, k, v = (x.transpose(0, 1) for x in base.split(8, dim=-1))
    out, lse = ring_attention(q, k, v, alone(), mask=Mask.causal(), return_lse=True)
    assert not lse.requires_grad
    out.sum().backward()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.detach().transpose(1, 2) for x in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(out.detach().transpose(1, 2), expected)
    assert base.grad is not None


def strided_and_dense(team: Team, config: dict[str, Any]) -> list[bool]:
    """Whether Megatron's axis order and strided gradients give bit-equal results."""
    context = team.context(BurstConfig(**config))
    base = torch.randn(6, 2, 4, 3 * 8, generator=torch.Generator().manual_seed(context.rank))
    dout = torch.randn(6, 2, 4, 8, generator=torch.Generator().manual_seed(9 + context.rank))
    found = []
    for dense in (False, True):
        leaf = base.clone().requires_grad_()
        q, k, v = (x.transpose(0, 1) for x in leaf.split(8, dim=-1))
        if dense:
            q, k, v = (x.contiguous() for x in (q, k, v))
        out = ring_attention(q, k, v, context, mask=Mask.causal())
        given = dout.transpose(0, 1)
        out.backward(given.contiguous() if dense else given)
        found.append((out.detach(), leaf.grad))
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("backward", ["kv", "query"])
def test_strided_inputs_are_sent_too(workers: WorkerPool, backward: str) -> None:
    config = {"backward": backward, "ranks_per_node": 2}
    assert workers.run(4, strided_and_dense, config) == [[True, True]] * 4
