"""The all-to-all over the heads: whole sequences of some heads, and back. (fast tier)"""

from collections import Counter

import pytest
import torch

from megatron_burst import BurstConfig
from megatron_burst.attention import head_exchange
from megatron_burst.attention.head_exchange import HeadExchange, exchange_plan
from megatron_burst.plans.schedules.plan import Channel, Item, Kind
from tests.tier import one_in
from tests.workers import Team, WorkerPool

CONFIG = BurstConfig(algorithm="ulysses")


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_every_pair_of_ranks_exchanges_one_part_in_one_step(ranks: int) -> None:
    plans = [exchange_plan(rank, ranks) for rank in range(ranks)]
    sent = [(plan.rank, s.peer, s.item) for plan in plans for s in plan.sends]
    received = [(r.peer, plan.rank, r.item) for plan in plans for r in plan.receives]
    everything = {
        (s, t, Item(Kind.HEADS, s, target=t)) for s in range(ranks) for t in range(ranks) if s != t
    }
    assert len(sent) == len(received) == len(everything)
    assert set(sent) == set(received) == everything
    for plan in plans:
        (step,) = plan.steps
        assert len(step.receives) == ranks - 1
        assert {s.channel for s in plan.sends} == {Channel.HEADS}


@pytest.mark.parametrize("ranks", [64, 127, 128, 260])
def test_no_group_has_more_operations_than_nccl_bears(ranks: int) -> None:
    groups: dict[int, set[tuple[str, int, int]]] = {}
    for rank in range(ranks):
        plan = exchange_plan(rank, ranks)
        together = Counter(t.lands for step in plan.steps for t in (*step.receives, *step.sends))
        assert max(together.values()) <= 256
        assert not any(step.sends or step.receives for step in plan.steps[1:]), "posted at once"
        for send in plan.sends:
            groups.setdefault(send.lands, set()).add(("sent", rank, send.peer))
        for receive in plan.receives:
            groups.setdefault(receive.lands, set()).add(("received", receive.peer, rank))
    # A group that waits for one of another rank's next groups would wait for ever.
    for messages in groups.values():
        sent, received = ({m[1:] for m in messages if m[0] == w} for w in ("sent", "received"))
        assert sent == received


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


@pytest.mark.parametrize(("ranks", "heads"), one_in(2, [(2, 2), (8, 8), (3, 6)]))
def test_heads_are_whole_and_come_back(workers: WorkerPool, ranks: int, heads: int) -> None:
    for reply in workers.run(ranks, exchange_there_and_back, heads):
        assert all(reply.values()), reply


def in_groups_of_two_peers(team: Team, heads: int) -> dict[str, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_exchange, "MOST_PEERS", 2)
        return exchange_there_and_back(team, heads)


def test_in_several_groups_it_is_the_same(workers: WorkerPool) -> None:
    for reply in workers.run(8, in_groups_of_two_peers, 8):
        assert all(reply.values()), reply
