"""Heads in chunks, one after the other, against the float64 dense oracle. (few fast, all slow)"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from rows import attention_alone  # noqa: E402

from megatron_burst import BurstConfig
from megatron_burst.plans.choice.head_chunks import choose_head_chunks
from megatron_burst.tools.plan import memory, timing
from megatron_burst.tools.plan.configs import Configs
from tests.attention import test_latent_ring as latents
from tests.attention.cases import FLOAT32_TOLERANCE, Case, answer, errors, logged, run_cases
from tests.attention.test_latent_ring import Case as LatentCase
from tests.attention.test_recompute import twice
from tests.plans.masks import Masking
from tests.tier import slow_if
from tests.workers import Team, WorkerPool

PLACES = [*product(range(1, 9), (8,)), (4, 2), (8, 2), (8, 4)]
AUTO = BurstConfig()
WAYS: list[dict[str, Any]] = [
    {"config": {"backward": "kv"}, "heads": (4, 2), "has_sink": True},
    {"config": {"backward": "query", "kernel": "reference"}, "soft_cap": 2.0, "batch": 2},
    {"config": {"backward": "kv", "head_chunks": 4}, "heads": (8, 4), "value_dim": 4},
    {"config": {"backward": "query"}, "heads": (8, 2), "masking": Masking(window=5)},
    {"config": {"backward": "kv"}, "masking": Masking(documents=(0, 2, 6)), "has_sink": True},
    {"config": {"backward": "query", "layout": "contiguous"}, "masking": Masking(False)},
]
MESH: dict[str, Any] = {"config": {"topology": "mesh"}, "heads": (4, 4)}


def cases_of(ranks: int, on_a_node: int) -> list[Case]:
    ways = WAYS + [MESH] * ((ranks, on_a_node) in ((4, 8), (6, 8), (8, 8), (8, 2)))
    found = []
    for way in ways:
        case = Case(**way)
        config = {"head_chunks": 2, "ranks_per_node": min(on_a_node, ranks), **case.config}
        documents = case.masking.documents and (0, 2, 5, 6 * ranks)
        masking = replace(case.masking, documents=documents)
        found.append(replace(case, config=config, masking=masking))
    return found


@pytest.mark.parametrize("place", slow_if({*PLACES} - {(4, 2)}, PLACES), ids=str)
def test_float32_equals_the_dense_oracle_and_sends_the_same(
    workers: WorkerPool, place: tuple[int, int]
) -> None:
    ranks, cases = place[0], cases_of(*place)
    whole = [replace(c, config=c.config | {"head_chunks": 1}) for c in cases]
    answers = run_cases(workers, ranks, cases + whole)
    for case, chunked, usual in zip(cases, answers, answers[len(cases) :], strict=False):
        worst = errors(chunked.found, case.expected(ranks))
        assert max(worst.values()) < FLOAT32_TOLERANCE, (case, worst)
        for one, other in zip(chunked.replies, usual.replies, strict=True):
            assert one.forward == other.forward and one.backward == other.backward


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_what_a_second_pass_takes_over_is_of_all_heads(
    workers: WorkerPool, fraction: float
) -> None:
    config = {"head_chunks": 2}
    for found in workers.run(2, twice, config, "causal", fraction, True):
        assert found["apart"] < FLOAT32_TOLERANCE, found


def test_heads_travel_where_they_are_cut(workers: WorkerPool) -> None:
    case = LatentCase(config={"head_chunks": 2, "mla": "auto"})
    ((found, _),) = latents.run(workers, 2, [case])
    assert max(latents.errors(found, case.expected(2)).values()) < FLOAT32_TOLERANCE
    with pytest.raises(ValueError, match="no heads for --burst-head-chunks 2: drop one"):
        BurstConfig(mla="latent", head_chunks=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "heads", "chunks"),
    [
        (8192, (32, 32), 1),
        (16384, (32, 32), 2),
        (32768, (32, 8), 4),
        (32768, (32, 2), 2),
        (32768, (32, 1), 1),
        (32768, (8, 8), 1),
        (262144, (6, 6), 2),
    ],
)
def test_auto_cuts_what_fills_a_gpu_all_the_same(
    tokens: int, heads: tuple[int, int], chunks: int
) -> None:
    assert choose_head_chunks(AUTO, tokens, *heads) == chunks


def logs_a_call(team: Team, chunks: int | None) -> list[str]:
    with logged() as lines:
        answer(team, [Case(config={"head_chunks": chunks}, heads=(4, 4))])
    return [line for line in lines if "head-chunks" in line]


def test_a_cpu_cuts_what_is_asked_for_and_says_so(workers: WorkerPool) -> None:
    for chunks, expected in ((None, 0), (1, 0), (2, 1)):
        first, second = workers.run(2, logs_a_call, chunks)
        assert (len(first), second) == (expected, [])


def test_a_number_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="--burst-head-chunks 3 does not divide the 2 kv heads"):
        choose_head_chunks(BurstConfig(head_chunks=3), 1, 4, 2)
    with pytest.raises(ValueError, match="--burst-head-chunks must be positive and finite, got 0"):
        BurstConfig(head_chunks=0)
    with pytest.raises(ValueError, match="--burst-head-chunks 2 has no effect under .* ring"):
        BurstConfig(head_chunks=2, algorithm="ring")  # type: ignore[arg-type]


def test_the_planner_counts_one_chunk_and_the_same_time() -> None:
    machine = replace(Configs.read().cluster("h100"), working_set=1.0)
    alone = attention_alone(machine, 64, 2**14, BurstConfig(head_chunks=1), (32, 32, 128))
    load = replace(alone, recompute=True)
    whole, auto = load, replace(load, config=AUTO)
    assert (whole.head_chunks, auto.head_chunks) == (1, 2)
    times = [sum(each.seconds for each in timing.attention_passes(x)) for x in (whole, auto)]
    assert times[0] < times[1] < 1.003 * times[0]
    saved = memory.predict(whole).layer - memory.predict(auto).layer
    q = load.local_tokens * 32 * 128 * 2
    assert 8 * q < saved < 15 * q
