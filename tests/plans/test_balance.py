"""A layout for the documents of a batch: equal tokens and work, bytes, the page. (fast tier)"""

import itertools
from collections.abc import Callable, Sequence

import balance as page  # noqa: E402
import pages  # noqa: E402
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.plans.balance.balanced import BOUND, balanced, imbalance
from megatron_burst.plans.balance.dealing import Way, deal
from megatron_burst.plans.balance.document_work import DocumentWork
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.layout import Layout, contiguous, segmented_zigzag, zigzag
from megatron_burst.plans.visibility.mask import Mask
from tests.tier import examples

type Make = Callable[[int, int], Layout]


def by_tiles(layout: Layout, mask: Mask) -> float:
    """What `imbalance` is, by the pairs of all tiles."""
    pairs = Tiling(layout, mask).needs.pairs
    return max(sums.max() / sums.mean() for sums in (pairs.sum(axis=0), pairs.sum(axis=1)))


@examples(120)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    ranks=st.integers(1, 5),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 40),
    make=st.sampled_from([zigzag, contiguous, lambda n, p: segmented_zigzag([n // 2] * 2, p)]),
)
def test_the_imbalance_is_that_of_the_tiles(
    lengths: list[int], ranks: int, causal: bool, window: int | None, make: Make
) -> None:
    borders = list(itertools.accumulate(lengths, initial=0))
    borders[-1] += -borders[-1] % (4 * ranks)
    documents = borders if len(lengths) > 1 else None
    mask = (Mask.causal if causal else Mask.full)(window=window, documents=documents)
    layout = make(borders[-1], ranks)
    assert imbalance(layout, mask) == pytest.approx(by_tiles(layout, mask), rel=1e-12)


def check(mask: Mask, tokens: int, nodes: Sequence[int]) -> float:
    """What holds for every layout; returns its imbalance."""
    found = balanced(mask, tokens, nodes)
    layout, usual = found.layout, zigzag(tokens, len(nodes))
    held = [layout.positions(rank) for rank in range(len(nodes))]
    assert {len(rows) for rows in held} == {tokens // len(nodes)}
    assert torch.equal(torch.cat(held).sort().values, torch.arange(tokens))
    number = torch.searchsorted(torch.tensor(mask.documents), torch.arange(tokens), right=True)
    assert all((rows[number[rows].argsort(stable=True)].diff() > 0).all() for rows in held)
    gaps = [b.start - a.stop for shard in layout.shards for a, b in itertools.pairwise(shard)]
    assert 0 not in gaps or layout == usual, "neighbours are one range"
    assert len(set(nodes)) > 1 or all(gap >= 0 for gap in gaps), "in the order of the sequence"
    assert found.imbalance == imbalance(layout, mask) <= max(BOUND, imbalance(usual, mask))
    assert found == balanced(mask, tokens, [str(node) for node in nodes])
    return found.imbalance


@examples(160)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 8), st.integers(1, 3000)), min_size=1, max_size=60),
    nodes=st.sampled_from(["aa", "aaa", "aaaa", "aabb", "abab", "aaab", "a" * 8, "aabbccdd"]),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 4000),
)
def test_any_documents(lengths: list[int], nodes: str, causal: bool, window: int | None) -> None:
    borders = list(itertools.accumulate(lengths, initial=0))
    borders[-1] += -borders[-1] % (2 * len(nodes))
    mask = (Mask.causal if causal else Mask.full)(window=window, documents=borders)
    found = check(mask, borders[-1], [ord(node) for node in nodes])
    if window is None and borders[-1] >= 1024 * len(nodes):
        assert found <= BOUND


# Bytes between nodes of 16k tokens a rank over those under zigzag: more where a document has more
# work than a node.
MOST = {"mean 1k": 0.2, "mean 2k": 0.1, "mean 8k": 0.1, "mean 30k": 0.9, "lognormal": 0.97}
FAST = ((2**20, 8), (2**20, 64))
SIZES = [(tokens, ranks) for tokens in page.TOKENS for ranks in page.RANKS]


@pytest.mark.parametrize("lengths", page.LENGTHS)
@pytest.mark.parametrize(
    ("tokens", "ranks"),
    [pytest.param(*size, marks=[] if size in FAST else pytest.mark.slow) for size in SIZES],
)
def test_work_is_even_and_documents_that_fit_a_node_hardly_leave_it(
    lengths: str, tokens: int, ranks: int
) -> None:
    row = page.row(lengths, tokens, ranks)
    assert float(row["balanced"]) <= BOUND < float(row["zigzag"])
    for heads in page.HEADS if (tokens, ranks) in FAST else ():
        assert float(row[f"8 a node {heads}"]) <= MOST[lengths], row


def test_documents_stay_whole_and_a_long_one_is_shared_from_both_ends() -> None:
    mask = Mask.causal(documents=(0, 16, 20, 24, 28, 32))
    found = balanced(mask, 32, "aa")
    inside = range(4, 12), range(16, 24)
    outside = range(0, 4), range(12, 16), range(24, 32)
    assert found.layout == Layout((inside, outside))
    assert (found.chunk, found.imbalance) == (32 // 5, 1.0)


def test_documents_that_fit_the_ranks_are_not_cut() -> None:
    mask = Mask.causal(documents=list(itertools.accumulate([9, 4, 9, 4, 2, 1, 2, 1], initial=0)))
    found, usual = balanced(mask, 32, "aa"), Tiling(zigzag(32, 2), mask).needs
    assert found.imbalance == 1.0 and usual.users(Kind.KV).any()
    assert not Tiling(found.layout, mask).needs.users(Kind.KV).any()


def test_of_several_layouts_the_one_with_the_fewest_bytes_is_taken() -> None:
    row = page.row("mean 8k", 2**17, 8)  # the last has 1.08
    assert float(row["one node 32:32"]) < 0.95


def test_where_all_have_more_bytes_than_zigzag_others_are_tried() -> None:
    row = page.row("mean 2k", 2**18, 16, draw=2)  # the best of the first has 1.11
    assert float(row["8 a node 32:32"]) < 0.02, row


def test_what_is_on_two_nodes_is_spread_evenly_over_the_ranks_of_each() -> None:
    row = page.row("mean 30k", 2**20, 64)  # dealt like documents of one node: 1.4
    assert float(row["8 a node 32:4"]) < 0.9, row
    mask, nodes = Mask.causal(documents=(0, 3072, 3584, 4096)), [0] * 4 + [1] * 4
    layout = deal(DocumentWork.of(mask, 4096), nodes, Way(40, 4))
    held = [int((layout.positions(rank) < 3072).sum()) for rank in range(8)]
    assert all(max(of) - min(of) < 4 for of in (held[:4], held[4:])), held


def test_the_middle_is_of_the_rank_with_the_fewest_tokens() -> None:
    row = page.row("mean 30k", 2**17, 16)  # of the rank that sends the least: 1.15
    assert float(row["8 a node 32:4"]) < 0.95, row


def test_the_heads_decide_which_has_the_fewest_bytes() -> None:
    mask, nodes = page.documents("mean 8k", 2**18, 3), [0] * 16
    many, few = (balanced(mask, 2**18, nodes, queries).layout for queries in (1, 8))
    for kv_heads, better, worse in ((32, many, few), (4, few, many)):
        sent = [page.bottleneck(layout, mask, nodes, kv_heads) for layout in (better, worse)]
        assert sent[0] < 0.98 * sent[1]


def test_documents_on_the_same_nodes_lie_side_by_side() -> None:
    """Those on the next node first, then on the next two, on the one after, on the rank's own."""
    lengths = [600, 800, 400, 300, 60]
    mask = Mask.causal(documents=list(itertools.accumulate(lengths, initial=0)))
    node = [0, 0, 1, 1, 2, 2]
    layout = deal(DocumentWork.of(mask, 2160), node, Way(0, 0))
    number = torch.repeat_interleave(torch.tensor(lengths))
    held = [number[layout.positions(r)].unique_consecutive().tolist() for r in range(6)]
    on = [{node[rank] for rank in range(6) if each in held[rank]} for each in range(len(lengths))]
    found = [
        [tuple((node[rank] + step) % 3 in on[each] for step in (1, 2)) for each in held[rank]]
        for rank in range(6)
    ]
    code = (True, False), (True, True), (False, True), (False, False)
    assert all(order == sorted(order, key=code.index) for order in found)
    assert {ways for order in found for ways in order} == set(code)


def test_what_zigzag_balances_stays_zigzag() -> None:
    for mask in (Mask.causal(), Mask.causal(window=3), Mask.full(documents=(0, 32, 64))):
        found = balanced(mask, 64, "aabb")
        assert found.layout == zigzag(64, 4) and found.imbalance <= BOUND
    assert balanced(Mask.causal(documents=(0, 1, 8)), 8, "a").layout == zigzag(8, 1)


def test_where_the_bound_is_out_of_reach_the_imbalance_says_so() -> None:
    found = balanced(Mask.causal(documents=(0, 3, 4)), 4, "ab")
    assert found.imbalance > BOUND


def test_what_cannot_be_dealt_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="2 x 3 ranks = 6, got 16 tokens; change --seq-length"):
        balanced(Mask.causal(documents=(0, 3, 16)), 16, "aaa")
    with pytest.raises(ValueError, match="documents end at 12, the sequence has 16"):
        balanced(Mask.causal(documents=(0, 3, 12)), 16, "aa")
    blocks = Mask.causal(block_table=torch.ones(2, 2, dtype=torch.bool))
    for mask in blocks, Mask.causal(documents=(0, 8, 16), lengths=(7, 8)):
        with pytest.raises(ValueError, match="not for a block mask or padding"):
            balanced(mask, 16, "aa")


def test_the_page_is_made_of_the_table() -> None:
    rows, text = pages.read_csv(page.ALL), page.PAGE.read_text()
    assert pages.filled(text, page.parts(rows)) == text
    assert len(rows) == len(page.LENGTHS) * len(SIZES) * len(page.DRAWS)
    assert all(float(row["balanced"]) <= BOUND for row in rows)
    ratios = page.ratios([row for row in rows if row["draw"] == "1"])
    assert sum(ratio > 1 for ratio in ratios) <= 13 and max(ratios) <= 1.63
    assert sum(ratio > 1 for ratio in page.ratios(rows)) <= 100 and max(page.ratios(rows)) <= 1.63
