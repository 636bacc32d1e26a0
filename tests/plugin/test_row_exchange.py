"""Rows that move between layouts, or on to the token before, in one all-to-all. (fast tier)"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst.plans.visibility.layout import (
    Layout,
    contiguous,
    segmented_zigzag,
    striped,
    zigzag,
)
from tests.plugin.contexts import Copies
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.core.packed_seq_params")
from megatron_burst.plugin.hooks.row_exchange import Moves, RowExchange, find_moves  # noqa: E402

BOUNDS = (0, 1, 6, 7, 13, 16)
LAYOUTS = {
    "zigzag": zigzag(16, 2),
    "two segments": segmented_zigzag((8, 8), 2),
    "uneven segments": segmented_zigzag((4, 12), 2),
    "contiguous": contiguous(16, 2),
    "striped": striped(16, 2),
    "pieces": Layout(((range(3), range(5, 10)), (range(3, 5), range(10, 16)))),
}


def carried(moves: Sequence[Moves], shards: Sequence[Tensor]) -> list[Tensor]:
    """What the ranks have after an all-to-all; -1 where nothing comes."""
    sent = [x[m.leave].split(m.sent) for m, x in zip(moves, shards, strict=True)]
    found = []
    for rank, move in enumerate(moves):
        arrived = [parts[rank] for parts in sent]
        assert [*map(len, arrived)] == move.received
        found.append(torch.full_like(shards[0], -1).index_copy(0, move.arrive, torch.cat(arrived)))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_get_what_comes_next_in_their_document(name: str) -> None:
    x, layout = torch.arange(16), LAYOUTS[name]
    expected = torch.where(torch.isin(x + 1, torch.tensor(BOUNDS)), -1, x + 1)
    moves = [find_moves(layout, layout, rank, BOUNDS) for rank in range(2)]
    for rank, found in enumerate(carried(moves, [layout.shard(x, rank, 0) for rank in range(2)])):
        assert torch.equal(found, layout.shard(expected, rank, 0))


def _exchange(team: Team) -> None:
    ranks, rank = team.group.size(), team.rank
    whole = torch.arange(2.0 * 8 * ranks).view(2, -1)
    megatrons, ours = zigzag(8 * ranks, ranks), segmented_zigzag((4 * ranks,) * 2, ranks)
    exchange = RowExchange(team.group, megatrons, ours, (0, 3, 8 * ranks), whole.device)
    theirs, there = (layout.shard(whole, rank, 1) for layout in (megatrons, ours))
    kinds = {"float": lambda x: x, "long": Tensor.long, "bool": lambda x: x % 3 == 1}
    found = exchange.to_ours({name: kind(theirs) for name, kind in kinds.items()})
    for name, kind in kinds.items():
        assert torch.equal(found[name], kind(there)), name
        assert torch.equal(exchange.to_callers(kind(there).float()), kind(theirs).float())
        following = torch.cat([whole[:, 1:], torch.zeros(2, 1)], 1)
        following[:, 2] = 0
        expected = ours.shard(following, rank, 1)
        assert torch.equal(exchange.next(kind(there)), kind(expected)), name
    # A gradient goes the way back of its row; logits have more than one number a row.
    rows = torch.stack([there, -there], -1).requires_grad_()
    weights = torch.stack([theirs, theirs**2], -1)
    (exchange.to_callers(rows) * weights).sum().backward()
    assert torch.equal(rows.grad, torch.stack([there, there**2], -1))
    with pytest.raises(ValueError, match="moves tensors of 8 tokens a rank, not .2, 4.: a padding"):
        exchange.next(there[:, :4])


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_exchange_between_ranks_and_its_gradient(workers: WorkerPool, ranks: int) -> None:
    workers.run(ranks, _exchange)


def test_equal_layouts_exchange_nothing() -> None:
    layout, tokens = zigzag(16, 2), torch.zeros(1, 8)
    exchange = RowExchange(SimpleNamespace(), layout, zigzag(16, 2), BOUNDS, tokens.device)
    assert exchange.to_ours({"labels": tokens}) == {"labels": tokens}
    assert exchange.to_callers(tokens) is tokens and not exchange.is_needed


def test_rows_go_to_the_device_once_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *_, **__: None)
    group: Any = SimpleNamespace(rank=lambda: 0)
    layouts = LAYOUTS["zigzag"], LAYOUTS["pieces"]
    exchange = RowExchange(group, *layouts, BOUNDS, torch.device("meta"))
    with Copies() as copies:
        for _ in range(3):
            there = exchange.to_ours({"labels": torch.zeros(1, 8, device="meta")})["labels"]
            assert exchange.to_callers(there).shape == (1, 8)
    assert copies.count == 2, "what leaves and what arrives"
