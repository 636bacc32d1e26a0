"""Which Ulysses degree is taken: by bytes, where all ranks know it, and said. (fast tier)"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.degree import choose_degree
from tests.attention.cases import logged
from tests.workers import Team, WorkerPool

AUTO = BurstConfig(head_parallel_size=None)
ANY = Shape(1, 32, 32, 128, 128, 2, 4)
NODE, TWO = "a" * 8, "a" * 8 + "b" * 8
NO_OTHER = "no other degree divides"


@pytest.mark.parametrize(
    ("nodes", "heads", "degree", "shares"),
    [
        (NODE, (32, 32), 8, "0.52 with 2, 0.28 with 4, 0.17 with 8"),
        (NODE, (32, 8), 8, "0.61 with 2, 0.41 with 4, 0.31 with 8"),
        (NODE, (32, 4), 1, "0.75 with 2, 0.62 with 4"),  # not worth it
        (TWO, (32, 4), 4, "0.59 with 2, 0.38 with 4"),
        ("aabb", (8, 8), 2, "0.33 with 2"),
        ("aabb", (8, 2), 1, "0.62 with 2"),
        ("aa", (32, 32), 1, "0.66 with 2"),
        ("aaaabb", (32, 32), 1, "0.80 with 2"),  # of every node; unequal ones make a flat ring
        ("abab" * 2, (6, 6), 2, "0.44 with 2"),
        (TWO, (32, 1), 1, NO_OTHER),  # never copies
        ("abcd", (32, 32), 1, NO_OTHER),
        (NODE, (9, 9), 1, NO_OTHER),
    ],
)
def test_what_a_rank_sends_decides(
    nodes: str, heads: tuple[int, int], degree: int, shares: str
) -> None:
    shape = replace(ANY, query_heads=heads[0], kv_heads=heads[1])
    found, why = choose_degree(AUTO, nodes, shape)
    assert (found, shares in why) == (degree, True), (found, why)


def test_latents_that_are_asked_for_have_no_heads_to_share_out() -> None:
    found, why = choose_degree(replace(AUTO, mla="latent"), NODE, ANY)
    assert (found, "latents are to travel" in why) == (1, True)


def test_the_bytes_are_those_of_the_formulas() -> None:
    """Of a token and head of 128 numbers in bfloat16, one node, float32 gradients."""
    hop = 2 * 128 * 2 + (2 * 128 * 2 + 128 * 4 + 8)  # K and V forward; backward q, dO, dq, 2 a row
    exchange = 2 * 4 * 128 * 2  # q, k, v and the output, both ways
    for times, fraction in ((1, None), (1.5, 0.5)):
        found = choose_degree(replace(AUTO, recompute_fraction=fraction), NODE, ANY)[1]
        expected = {u: (8 / u - 1) * hop + times * exchange * (u - 1) / u for u in (1, 2, 4, 8)}
        shares = {int(u): float(x) for x, u in re.findall(r"(0\.\d+) with (\d)", found)}
        assert shares == {u: round(expected[u] / expected[1], 2) for u in (2, 4, 8)}


def test_heads_stay_where_memory_is_short_or_rings_are_asked_for() -> None:
    shape = replace(ANY, tokens=4096)
    held = 3 * 4096 * 32 * 128 * 2  # of the size of q, in bfloat16
    assert choose_degree(AUTO, NODE, shape, held)[0] == 8
    assert choose_degree(AUTO, NODE, replace(ANY, tokens=32768))[0] == 8
    size, why = choose_degree(AUTO, NODE, replace(ANY, tokens=32769))
    assert size == 1 and "768.02 MiB more, and saves little time with 32769 tokens" in why
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
    assert choose_degree(BurstConfig(), NODE, ANY)[0] == 8, "auto is the default"
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
    given = workers.run(4, attend, [shape] * 4, 2)
    unknown = workers.run(4, attend, ["nobody knows"] * 4)
    assert [{size for size, *_ in each} for each in (chosen, given, unknown)] == [{2}, {2}, {1}]
    for (_, _, found), (_, _, expected) in zip(chosen, given, strict=True):
        assert torch.equal(found, expected)
    said = [[line for line in each[0][1] if "head-parallel" in line] for each in (chosen, unknown)]
    assert "--burst-head-parallel-size 2: of what a rank sends within its" in said[0][0]
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
