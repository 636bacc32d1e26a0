"""Direct exchanges, many intervals of rows in a message, against the dense oracle. (fast tier)"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_burst import Mask
from megatron_burst.plans.choice import planning
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import flat_grid
from megatron_burst.plans.visibility.layout import segmented_zigzag, zigzag_of_each
from tests.attention.cases import Case, Reply, answer, check_results, put_together
from tests.attention.faults import replaced
from tests.attention.test_recompute import twice
from tests.plans.masks import LAYOUTS, hard_maskings
from tests.tier import slow_if, some
from tests.workers import Team, WorkerPool

CHUNK = 8
MASKS = (
    "window of a chunk less 1",
    "documents that end one off",
    "documents with padding",
    "a window in documents",
    "blocks",
    "everything at once",
)
WAYS: list[dict[str, Any]] = [
    {"config": {"backward": "kv"}, "heads": (8, 2), "has_sink": True},
    {"config": {"backward": "query"}, "heads": (8, 2), "batch": 2},
    {"config": {"backward": "kv", "head_chunks": 2}, "heads": (4, 4)},
    {"config": {"backward": "query", "head_chunks": 2}, "heads": (8, 4), "value_dim": 4},
    {"config": {"backward": "query"}, "heads": (4, 1), "has_sink": True},
]


def directly() -> AbstractContextManager[None]:
    """Take nothing else, under masks that are sparse."""
    return replaced(planning._Pass, "offers", lambda _: direct_offers)


def direct_offers(asked: Any) -> Any:
    return [asked._offer(schedule) for schedule in asked._direct()]


def answer_directly(team: Team, cases: Sequence[Case]) -> list[Reply]:
    with directly():
        return answer(team, cases)


def twice_directly(team: Team, *arguments: Any) -> dict[str, Any]:
    with directly():
        return twice(team, *arguments)


def cases_of(ranks: int) -> list[Case]:
    tokens = 2 * ranks * CHUNK
    layouts = [make(tokens, ranks) for make in LAYOUTS.values()]
    layouts += [segmented_zigzag([tokens // 4] * 4, ranks)]
    layouts += [zigzag_of_each([tokens // 4, tokens // 2, tokens // 4], ranks)]
    maskings, ways = hard_maskings(ranks, CHUNK), itertools.cycle(WAYS)
    every = itertools.product(layouts, MASKS)
    return [
        Case(chunk=CHUNK, layout=layout, masking=maskings[name], **way)
        for (layout, name), way in zip(every, ways, strict=False)
    ]


def needed_bytes(case: Case, ranks: int) -> list[tuple[int, int]]:
    """What each rank sends forward and backward, by the rows that others need."""
    layout = head_groups(range(ranks), 1).ring_layout(case.layout_of(ranks))
    tiling, local, shape = Tiling(layout, case.mask), 2 * CHUNK, case.shape
    sent, rows = Kind(case.config["backward"]), tiling.needs.rows
    there, back = (shape.item_bytes(backward=backward) for backward in (False, True))
    leaves = {kind: of.sum(axis=1) - of.diagonal() for kind, of in rows.items()}
    partial, gradient = back[sent.gradient.partial], back[sent.gradient]
    returned = np.where(tiling.needs.once[sent], partial, gradient) * rows[sent]
    forward = leaves[Kind.KV] * there[Kind.KV]
    backward = leaves[sent] * back[sent] + returned.sum(axis=0) - returned.diagonal()
    return [(int(f) // local, int(b) // local) for f, b in zip(forward, backward, strict=True)]


@pytest.mark.parametrize("ranks", slow_if({1, 2, 4, 5, 6, 7, 8}, range(1, 9)))
def test_the_dense_oracle_and_the_bytes_that_are_needed(workers: WorkerPool, ranks: int) -> None:
    cases = some(cases_of(ranks), 4, ranks % 4)
    answers = put_together(cases, workers.run(ranks, answer_directly, cases))
    for case, answered in zip(cases, answers, strict=True):
        check_results(case, answered)
        assert [reply.sent for reply in answered.replies] == needed_bytes(case, ranks), case


@pytest.mark.parametrize("ranks", slow_if({2, 5, 6, 7, 8}, range(2, 9)))
def test_what_a_kernel_returned_goes_home_as_it_is_and_sums_in_float32(
    workers: WorkerPool, ranks: int
) -> None:
    cases = [
        replace(case, dim=16, value_dim=None, dtype=torch.bfloat16)
        for case in some(cases_of(ranks), 7, ranks)
    ]
    wide = [replace(case, config=case.config | {"grad_dtype": "float32"}) for case in cases]
    both = [*cases, *wide]
    answers = put_together(both, workers.run(ranks, answer_directly, both))
    totals = []
    for case, answered in zip(both, answers, strict=True):
        assert [reply.sent for reply in answered.replies] == needed_bytes(case, ranks), case
        totals.append(sum(reply.backward.total() for reply in answered.replies))
    for case, *pair in zip(cases, answers[: len(cases)], answers[len(cases) :], strict=True):
        assert all(map(torch.equal, *(answered.found for answered in pair))), case
    some_less = [a < b for a, b in zip(totals[: len(cases)], totals[len(cases) :], strict=True)]
    assert any(some_less)


@pytest.mark.parametrize("masking", ["window", "documents"])
def test_two_passes_equal_one(workers: WorkerPool, masking: str) -> None:
    """The second forward sends other rows than the first, and than the backward."""
    for backward in ("kv", "query"):
        config = {"backward": backward, "layout": "segmented-zigzag"}
        for reply in workers.run(4, twice_directly, config, masking, 0.5):
            assert reply["apart"] < 2e-6, (config, reply)


@pytest.mark.parametrize("sent", [Kind.KV, Kind.QUERY])
def test_a_pair_of_ranks_has_one_message_each_way(sent: Kind) -> None:
    tokens, ranks = 1024, 8
    mask = Mask.causal(window=7, documents=range(0, tokens + 1, 32))
    direct = Direct(
        Tiling(segmented_zigzag([tokens // 4] * 4, ranks), mask), flat_grid(ranks), sent
    )
    for plan in (direct.forward(1), direct.backward(1)):
        ways = [(send.item.kind, send.peer) for send in plan.sends]
        assert len({*ways}) == len(ways) and max(len(s.item.part) for s in plan.sends) > 3
    assert "intervals" in str(direct.forward(1).sends[0].item)
