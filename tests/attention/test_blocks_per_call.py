"""Several key blocks in one kernel call, against the dense oracle in float64. (fast tier)

All ranks are threads of one process, in which a buffer holds NaN until its message has landed; in
the last test they are processes.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from megatron_burst import BurstConfig
from megatron_burst.tools.gpu_check.one_process import Post, ThreadedCommunicator, run_all
from megatron_burst.tools.one_rank import OneRank, context_of
from tests import oracle
from tests.attention.cases import FLOAT32_TOLERANCE, Case, errors, logged, run_cases
from tests.plans.masks import Masking
from tests.tier import slow_if
from tests.workers import WorkerPool

PLACES = {
    **{f"{ranks} on a node": (ranks, ranks) for ranks in range(1, 9)},
    **{"2 nodes x 2": (4, 2), "2 nodes x 4": (8, 4), "4 nodes x 2": (8, 2), "2 nodes x 3": (6, 3)},
}
MESHES = {
    **{f"{ranks} on a node": (ranks, ranks) for ranks in (4, 6, 8)},
    **{"8 nodes x 1": (8, 1), "4 nodes x 2": (8, 2), "4 nodes x 3": (12, 3)},
    **{"8 nodes x 3": (24, 3), "4 nodes x 5": (20, 5)},
}
SLOW_MESHES = {*MESHES} - {"8 on a node", "4 nodes x 3"}
TURNS = [
    {"mask": Masking(), "layout": "zigzag"},
    {"mask": Masking(), "layout": "segmented-zigzag"},
    {"mask": Masking(False), "layout": "zigzag"},
]
HEADS = ((4, 4), (4, 2), (8, 1))
TABLE = ((True, False, True, True),) * 4


def run(case: Case, ranks: int, on_a_node: int) -> tuple[oracle.Result, list[int], int]:
    """Return the results, how many calls a rank makes in both passes, and the bytes they send."""
    config, layout, whole = BurstConfig(**case.config), case.layout_of(ranks), case.inputs(ranks)
    nodes, post = [rank // on_a_node for rank in range(ranks)], Post(60)
    sent, calls = [], [0, 0]

    def both(rank: int) -> list[torch.Tensor]:
        communicator = ThreadedCommunicator(rank, ranks, post)
        context = context_of(rank, nodes, config, communicator)
        q, k, v, dout = (layout.shard(x, rank, 1).contiguous() for x in whole)
        one = OneRank(context, (q, k, v, dout), case.mask)
        (out, lse), (dq, dk, dv, _) = one.forward(), one.backward()
        sent.append(communicator.bytes_sent)
        for way, steps in enumerate((one.call.forward_calls, one.call.backward_calls)):
            calls[way] = max(calls[way], sum(map(len, steps)))
        return [out, lse.transpose(1, 2), dq, dk, dv]

    shards = run_all(post, [partial(both, rank) for rank in range(ranks)])
    found = [layout.unshard(list(parts), 1) for parts in zip(*shards, strict=True)]
    result = oracle.Result(found[0], found[1].transpose(1, 2), *found[2:], torch.zeros(0))
    return result, calls, sum(sent)


def case_of(blocks: int, mask: Masking, heads: tuple[int, int] = (4, 2), **config: Any) -> Case:
    usual = {"backward": "kv", "topology": "double", "kernel": "cpu"}
    config = usual | config | {"blocks_per_call": blocks}
    return Case(config=config, heads=heads, masking=mask, chunk=4)


@pytest.mark.parametrize("place", slow_if({"6 on a node", "7 on a node"}, PLACES))
def test_float32_equals_the_dense_oracle(place: str) -> None:
    for number, (turn, blocks) in enumerate(product(TURNS, (2, 4))):
        case = case_of(blocks, **turn, heads=HEADS[number % 3])
        found, *_ = run(case, *PLACES[place])
        worst = errors(found, case.expected(PLACES[place][0]))
        assert max(worst.values()) < FLOAT32_TOLERANCE, (case, worst)


@pytest.mark.parametrize("place", slow_if(SLOW_MESHES, MESHES))
def test_a_mesh_equals_the_dense_oracle(place: str) -> None:
    for number, (turn, blocks) in enumerate(product(TURNS, (2, 4))):
        case = case_of(blocks, **turn, heads=HEADS[number % 3], topology="mesh")
        found, *_ = run(case, *MESHES[place])
        worst = errors(found, case.expected(MESHES[place][0]))
        assert max(worst.values()) < FLOAT32_TOLERANCE, (case, worst)


@pytest.mark.parametrize(
    "mask", [Masking(window=9), Masking(documents=(0, 5, 13, 32)), Masking(table=TABLE)], ids=str
)
def test_under_sparse_masks_a_call_takes_one(mask: Masking) -> None:
    found, calls, sent = run(case_of(4, mask), 4, 4)
    assert max(errors(found, case_of(4, mask).expected(4)).values()) < FLOAT32_TOLERANCE
    assert (calls, sent) == run(case_of(1, mask), 4, 4)[1:]


def test_calls_of_two_and_four_blocks() -> None:
    found = {blocks: run(case_of(blocks, Masking(False)), 8, 8)[1] for blocks in (1, 2, 4)}
    assert found == {1: [8, 10], 2: [5, 7], 4: [3, 5]}


def test_calls_of_a_mesh_send_no_byte_more() -> None:
    """On 4 nodes x 5: 4 passes of 5 calls each, of 3 or of 2; the own tile is of three parts."""
    runs = {n: run(case_of(n, Masking(False), topology="mesh"), 20, 5) for n in (1, 2, 4)}
    found = {blocks: calls for blocks, (_, calls, _) in runs.items()}
    assert found == {1: [20, 22], 2: [12, 14], 4: [8, 10]}
    assert len({sent for _, _, sent in runs.values()}) == 1


@pytest.mark.parametrize("place", slow_if({"2 nodes x 4"}, ["5 on a node", "2 nodes x 4"]))
def test_processes_compute_the_same_and_say_so(workers: WorkerPool, place: str) -> None:
    ranks, on_a_node = PLACES[place]
    several, usual = (case_of(n, Masking(), ranks_per_node=on_a_node) for n in (2, 1))
    answers = run_cases(workers, ranks, [several, usual])
    for case, answer in zip((several, usual), answers, strict=True):
        assert max(errors(answer.found, case.expected(ranks)).values()) < FLOAT32_TOLERANCE
    for reply, other in zip(*(answer.replies for answer in answers), strict=True):
        assert reply.forward == other.forward and reply.backward == other.backward


def test_the_log_says_so() -> None:
    with logged() as lines:
        run(case_of(4, Masking()), 5, 5)
    assert any("by the kv ring of 4 blocks a call" in line for line in lines)
