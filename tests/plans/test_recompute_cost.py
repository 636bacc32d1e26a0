"""The prediction of what is kept and runs again, on sequences counted by hand. (fast tier)"""

import pytest

from megatron_burst import BurstConfig, Mask
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.layout import Layout
from megatron_burst.plans.planning import make_layout
from megatron_burst.plans.recompute import boundary
from megatron_burst.plans.recompute_cost import Prediction, passes_in_flight, predict
from megatron_burst.plans.topology import Grid, flat_grid


def predicted(
    tokens: int,
    ranks: int,
    fraction: float,
    samples: int = 1,
    mask: Mask | None = None,
    **more: str,
) -> Prediction:
    config = BurstConfig(**{"recompute_fraction": fraction, "topology": "flat", **more})
    layout: Layout = make_layout(config, tokens, ranks)
    shape = Shape(samples * tokens // ranks, 4, 2, 6, 5, 2, 4)
    stop = boundary(layout, fraction)
    nodes = [0] * ranks
    return predict(config, layout, mask or Mask.causal(), flat_grid(ranks), shape, stop, nodes)


def test_one_rank_repeats_a_triangle_and_keeps_rows() -> None:
    found = predicted(100, 1, 0.3, samples=3)
    assert (found.fraction, found.pairs_again, found.pairs) == (0.3, [30 * 31 // 2], [5050])
    assert found.kept == [3 * 70 * 4 * (5 * 2 + 4)]  # samples x rows x heads x (out and lse)
    assert found.bytes_share == 0.0 and found.unevenness == 1.0
    assert "first 0.3 of the sequence" in str(found) and "9.2% of a forward's FLOPs;" in str(found)


def test_zigzag_repeats_unequally_and_says_what_to_change() -> None:
    """Chunks of one token; rank 0 holds 0 and 7, rank 3 holds 3 and 4: at 1/2 one row each."""
    found = predicted(8, 4, 0.5)
    assert found.pairs_again == [1, 2, 3, 4] and found.pairs == [9, 9, 9, 9]
    assert found.flops_share == 4 / 9 and found.unevenness == 4.0
    assert found.bytes_share == 0.5  # of each block one of two rows
    assert str(found).endswith("max/min 4.00: --burst-layout segmented-zigzag spreads it evenly")
    assert "FLOPs and 50.0% of its ring bytes; a layer" in str(found)
    quarter = predicted(8, 4, 0.25)
    assert quarter.pairs_again == [1, 2, 0, 0] and quarter.unevenness == float("inf")
    assert quarter.kept == [4 * 14, 4 * 14, 2 * 4 * 14, 2 * 4 * 14]


def test_segmented_zigzag_repeats_evenly() -> None:
    found = predicted(1024, 4, 0.5, layout="segmented-zigzag")
    assert found.unevenness < 1.01 and "segmented" not in str(found)
    assert found.flops_share == pytest.approx(0.25, abs=0.002)
    assert found.bytes_share <= 0.5


def test_a_share_that_is_rounded_is_what_it_became() -> None:
    assert predicted(8, 4, 0.3).fraction == 0.25
    nothing, everything = predicted(8, 4, 0.0), predicted(8, 4, 1.0)
    assert (nothing.flops_share, nothing.bytes_share, nothing.unevenness) == (0, 0, 1)
    assert (everything.flops_share, everything.bytes_share, sum(everything.kept)) == (1, 1, 0)


def test_under_a_window_as_much_runs_again_as_of_the_sequence() -> None:
    found = predicted(1024, 1, 0.25, mask=Mask.causal(window=16))
    assert found.flops_share == pytest.approx(0.25, abs=0.01)


def test_on_a_double_ring() -> None:
    config = BurstConfig(recompute_fraction=0.5, topology="double", ranks_per_node=2)
    layout, grid = make_layout(config, 16, 4), Grid(((0, 1), (2, 3)))
    shape = Shape(4, 4, 2, 6, 5, 2, 4)
    found = predict(config, layout, Mask.causal(), grid, shape, 8, "aabb")
    # An early block has 2 rows; rank r's is needed by the ranks after it. Ranks 0 and 2 send their
    # own and that of rank 0 to two places in all, 1 and 3 that of rank 1.
    block = 2 * 2 * (6 + 5) * 2
    assert found.sent_again == [2 * block, block, 2 * block, block]
    assert found.sent == [3 * 2 * block] * 4 and found.bytes_share == 1 / 3


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "passes"),
    [(1, 1, 8, 1), (4, 1, 8, 4), (4, 1, 2, 2), (2, 2, 8, 5), (4, 2, 8, 11), (4, 2, 1, 2)],
)
def test_passes_in_flight(stages: int, chunks: int, micro_batches: int, passes: int) -> None:
    assert passes_in_flight(stages, chunks, micro_batches) == passes
