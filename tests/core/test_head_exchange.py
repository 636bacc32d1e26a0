"""The all-to-all over the heads: whole sequences of some heads, and back. (fast tier)"""

import pytest
import torch

from megatron_burst import BurstConfig
from megatron_burst.layout import Interval
from megatron_burst.plan import Channel, Item, Kind
from megatron_burst.ring_attention.head_exchange import HeadExchange, exchange_plan
from tests.workers import Team, WorkerPool

CONFIG = BurstConfig(algorithm="ulysses")


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_every_pair_of_ranks_exchanges_one_part_in_one_step(ranks: int) -> None:
    plans = [exchange_plan(rank, ranks) for rank in range(ranks)]
    sent = [(plan.rank, s.peer, s.item) for plan in plans for s in plan.sends]
    received = [(r.peer, plan.rank, r.item) for plan in plans for r in plan.receives]
    everything = {
        (s, t, Item(Kind.HEADS, s, Interval(t, t + 1)))
        for s in range(ranks)
        for t in range(ranks)
        if s != t
    }
    assert len(sent) == len(received) == len(everything)
    assert set(sent) == set(received) == everything
    for plan in plans:
        (step,) = plan.steps
        assert len({receive.buffer for receive in step.receives}) == ranks - 1
        assert {s.channel for s in plan.sends} == {Channel.READ_WITHIN}


def exchange_there_and_back(team: Team, heads: int) -> dict[str, bool]:
    context = team.context(CONFIG)
    tokens, dim, layout = 6 * context.ranks, 3, context.layout(6 * context.ranks)
    exchange = HeadExchange(context.rank, layout, context.communicator)
    whole = torch.randn(2, tokens, heads, dim, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
    share = slice(
        heads // context.ranks * context.rank, heads // context.ranks * (context.rank + 1)
    )
    x = context.shard(whole, dim=1).requires_grad_()
    by_heads, twice = exchange.to_heads(x, 2 * x)
    (back,) = exchange.to_tokens(by_heads)
    (there,) = torch.autograd.grad((by_heads * weights[:, :, share]).sum(), x, retain_graph=True)
    (round_trip,) = torch.autograd.grad(back, x, context.shard(weights, dim=1))
    mine = context.shard(weights, dim=1)
    return {
        "heads": torch.equal(by_heads, whole[:, :, share]),
        "heads of another": torch.equal(twice, 2 * whole[:, :, share]),
        "there and back": torch.equal(back, x),
        "gradient": torch.equal(there, mine),
        "gradient there and back": torch.equal(round_trip, mine),
    }


@pytest.mark.parametrize(("ranks", "heads"), [(2, 2), (3, 6), (8, 8)])
def test_heads_are_whole_and_come_back(workers: WorkerPool, ranks: int, heads: int) -> None:
    for reply in workers.run(ranks, exchange_there_and_back, heads):
        assert all(reply.values()), reply
