"""Which Ulysses degree is taken: by the clock, where all ranks know it, and said. (fast tier)"""

import math
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.attention import context
from megatron_burst.plans.choice import degree
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.degree import choose_degree
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.choice.machine import CPU, H100, MACHINES
from megatron_burst.plans.choice.timing import exchange
from tests.attention.cases import logged
from tests.workers import Team, WorkerPool

AUTO = BurstConfig(head_parallel_size=None)
ANY = Shape(1, 32, 32, 128, 128, 2, 4)
NODE, TWO = "a" * 8, "a" * 8 + "b" * 8


@pytest.mark.parametrize(
    ("nodes", "heads", "sizes"),
    [
        (NODE, (32, 32), (2, 4, 8)),
        (NODE, (32, 4), (2, 4, 8)),  # with copies of kv heads
        (TWO, (32, 32), (2, 4, 8, 16)),  # of both nodes
        (TWO, (8, 8), (2, 4, 8)),
        ("abab" * 2, (6, 6), (2,)),
        ("aaaabb", (32, 32), (2,)),  # of every node; unequal ones are not joined
        ("abcd", (32, 32), (2, 4)),  # nodes of one rank
        ("abcdef", (12, 12), (2, 3, 6)),
        (NODE, (9, 9), ()),
    ],
)
def test_what_divides_the_heads_and_nodes_is_tried(
    nodes: str, heads: tuple[int, int], sizes: tuple[int, ...]
) -> None:
    shape = replace(ANY, query_heads=heads[0], kv_heads=heads[1])
    size, why = choose_degree(AUTO, nodes, shape)
    assert size in (1, *sizes)
    assert ("no other degree" in why) == (not sizes)
    said = {int(found) for found in re.findall(r"ms with (\d+)", why)}
    assert said <= {1, *sizes} and (not sizes or max(sizes) in said)
    for size in sizes:
        assert head_groups(nodes, size).size == size


def test_slow_links_between_nodes_keep_it_within_them() -> None:
    """Copies of kv heads are sent between nodes by a ring, and not by one all-to-all."""
    shape = replace(ANY, tokens=1024, kv_heads=4)
    nodes = [rank // 8 for rank in range(256)]
    of_devices = replace(H100, hop_seconds=(0.0, 0.0))
    assert choose_degree(AUTO, nodes, shape, machine=of_devices)[0] == 32
    assert choose_degree(AUTO, nodes, shape, machine=replace(H100, nic_rate=2.8e9))[0] == 4


@pytest.mark.parametrize(
    ("nic_rate", "heads", "size"), [(H100.nic_rate, (32, 32), 32), (2.8e9, (8, 1), 8)]
)
def test_rings_too_long_to_be_timed_take_longer_and_their_all_to_alls_do_not(
    nic_rate: float, heads: tuple[int, int], size: int
) -> None:
    """As if 1024 ranks took what 256 do, 16 and 4 were chosen, 1.11 and 1.31 times as slow."""
    shape = replace(ANY, tokens=1024, query_heads=heads[0], kv_heads=heads[1], sends_raw=True)
    nodes, machine = [rank // 8 for rank in range(1024)], replace(H100, nic_rate=nic_rate)
    assert choose_degree(AUTO, nodes, shape, machine=machine)[0] == size
    with mock.patch.object(degree, "_RANKS", 1024):
        assert choose_degree(AUTO, nodes, shape, machine=machine)[0] == size


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "mbit", "pace", "by_the_clock", "chosen"),
    [
        (4, 8, 400, 1.58, 1, 4),  # rings took 1.15 to 1.23 of Ulysses' time, not 0.97
        (4, 2, 400, 1.58, 1, 1),
        (8, 2, 200, 0.95, 1, 2),  # a ring of 8 took 0.99 to 1.11 of two of 4, not 0.95
    ],
)
def test_cpus_count_what_rings_hide_less_than_the_clock_says(
    ranks: int, kv_heads: int, mbit: int, pace: float, by_the_clock: int, chosen: int
) -> None:
    shape = Shape(512, 8, kv_heads, 64, 64, 4, 4, sends_raw=True)
    here = replace(CPU.at_pace(pace, of_memory=1.0), nic_rate=0.96e6 / 8 * mbit)
    for machine, size in ((replace(here, hop_slowness=0.0), by_the_clock), (here, chosen)):
        assert choose_degree(AUTO, range(ranks), shape, machine=machine)[0] == size


def test_a_host_that_is_slower_than_its_gpu_has_few_hops_and_few_peers() -> None:
    """16 ring hops and 15 peers of two all-to-alls, where devices alone want 8 and 31."""
    nodes = [rank // 8 for rank in range(256)]
    for tokens, found in ((1024, 16), (16384, 32)):
        shape = replace(ANY, tokens=tokens, kv_heads=4)
        assert choose_degree(AUTO, nodes, shape)[0] == found


def test_of_a_thousand_ranks_it_is_chosen_at_once() -> None:
    """Some 0.2 s, where no degree is so good that others need not be timed."""
    nodes, slow = [rank // 8 for rank in range(1024)], replace(H100, nic_rate=2.8e9)
    begun = time.process_time()
    shape = replace(ANY, tokens=1024, kv_heads=4)
    assert choose_degree(AUTO, nodes, shape, machine=slow)[0] == 4
    assert time.process_time() - begun < 1
    alone = replace(shape, tokens=8192, query_heads=8, kv_heads=1, sends_raw=True)
    assert choose_degree(AUTO, nodes, alone, machine=slow)[0] == 1, "by a quarter of its ranks"


def test_sequences_of_a_micro_batch_do_not_see_each_other() -> None:
    """Four of 1024 tokens take what four times the heads of one do, not 4096 tokens' time."""
    shape = replace(ANY, tokens=4096, kv_heads=4)
    for nodes in (NODE, [rank // 8 for rank in range(64)]):
        one, four = (
            degree._Timed(AUTO, nodes, x, 4, math.inf, H100)
            for x in (shape, replace(shape, batch=4))
        )
        assert four.seconds < 0.6 * one.seconds and four.at_least < one.at_least


@pytest.mark.parametrize("ranks", [[3, 5, 7, 9], [3, 7, 11, 15]])
def test_tensor_parallel_ranks_share_a_nic(
    ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group between whose ranks others lie, that send at the same time."""
    group: Any = SimpleNamespace(rank=lambda: 1)
    stand_ins = {
        "rate_between": lambda *_: None,
        "machine_here": lambda _: MACHINES["A800"],
        "of_first_rank": lambda group, what, make, seconds: make(),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(context, name, value)
    monkeypatch.setattr(context.dist, "get_process_group_ranks", lambda _: ranks)
    machine, _ = context._chosen_degree(AUTO, group, "aabb", "no shape", math.inf)
    assert machine == MACHINES["A800"].shared_by(ranks[1] - ranks[0])
    assert (machine.nic_rate, machine.gpus_per_nic) == (11e9, 1), "two GPUs a NIC"


def test_an_all_to_all_over_nodes_waits_for_the_slower_link() -> None:
    """Of 15 other ranks 8 are on the other node; all is packed and unpacked in memory."""
    shape = replace(ANY, tokens=16 * 4096, query_heads=2, kv_heads=2)
    sent = 4096 * 4 * 32 * 128 * 2 * 15 // 16
    repacked = 4 * sent / 15 * 16 / H100.memory_rate
    for nic_rate, rate, part in ((45e9, 45e9, 8 / 15), (1e15, H100.within_rate, 7 / 15)):
        found = exchange(shape, 16, 8, replace(H100, nic_rate=nic_rate))
        assert (found.sent, found.between) == (sent, sent * 8 // 15)
        assert found.device == pytest.approx(sent * part / rate + repacked)


def test_latents_that_are_asked_for_have_no_heads_to_share_out() -> None:
    found, why = choose_degree(replace(AUTO, mla="latent"), NODE, ANY)
    assert (found, "latents are to travel" in why) == (1, True)


def test_heads_stay_where_memory_is_short_or_rings_are_asked_for() -> None:
    shape = replace(ANY, tokens=4096)
    held = 3 * 4096 * 32 * 128 * 2  # of the size of q, in bfloat16
    assert choose_degree(AUTO, NODE, shape, held)[0] == 8
    assert choose_degree(AUTO, NODE, replace(ANY, tokens=65536))[0] == 8
    assert choose_degree(AUTO, NODE, shape, held - 1) == (
        1,
        "another would hold 96.00 MiB more, and --burst-memory-mb allows 96.00 MiB",
    )
    for name, value in (("topology", "flat"), ("backward", "kv")):
        asked: dict[str, Any] = {name: value}
        size, why = choose_degree(replace(AUTO, **asked), NODE, shape)
        assert size == 1 and "rings are asked for" in why


def test_what_is_given_is_not_chosen_and_baselines_have_one() -> None:
    assert choose_degree(BurstConfig(head_parallel_size=4), NODE, ANY) == (4, "")
    shape = replace(ANY, tokens=4096)
    assert choose_degree(BurstConfig(), NODE, shape)[0] == 8, "auto is the default"
    for algorithm in ("ring", "allgather", "ulysses"):
        assert choose_degree(BurstConfig(algorithm=algorithm), NODE, ANY) == (1, "")
    assert choose_degree(AUTO, NODE, "nobody knows") == (1, "nobody knows")


def attend(
    team: Team, of_rank: list[Shape | str], size: int | None = None
) -> tuple[int, list[str], Tensor]:
    """Return the degree, what is logged when the context is made, and an output."""
    with logged() as lines:
        context = BurstContext.create(
            BurstConfig(ranks_per_node=2, head_parallel_size=size),
            team.group,
            groups=team.groups,
            shape=of_rank[team.rank],
        )
    generator = torch.Generator().manual_seed(team.rank)
    q, k, v = (torch.randn(1, 8, 4, 8, generator=generator) for _ in range(3))
    return context.heads.size, lines, ring_attention(q, k, v, context, mask=Mask.causal())


def test_a_context_takes_it_and_says_why(workers: WorkerPool) -> None:
    shape = Shape(1, 4, 4, 8, 8, 4, 4)
    chosen = workers.run(4, attend, [shape] * 4)
    given = workers.run(4, attend, [shape] * 4, 4)
    unknown = workers.run(4, attend, ["nobody knows"] * 4)
    assert [{size for size, *_ in each} for each in (chosen, given, unknown)] == [{4}, {4}, {1}]
    for (_, _, found), (_, _, expected) in zip(chosen, given, strict=True):
        assert torch.equal(found, expected)
    said = [[line for line in each[0][1] if "head-parallel" in line] for each in (chosen, unknown)]
    assert "--burst-head-parallel-size 4: reckoned for a layer's attention: " in said[0][0]
    assert "--burst-head-parallel-size 1: nobody knows" in said[1][0]
    assert not any("head-parallel" in line for each in (given, chosen[1:]) for line in each[0][1])


def refused(team: Team, of_rank: list[Shape | str]) -> str:
    try:
        attend(team, of_rank)
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_expect_other_heads_do_not_begin(workers: WorkerPool) -> None:
    shape = Shape(1, 4, 4, 8, 8, 4, 4)
    for said in workers.run(4, refused, [shape, shape, shape, replace(shape, kv_heads=2)]):
        assert "the configuration" in said and "kv_heads=2" in said
