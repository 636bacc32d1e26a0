"""The layout that the documents of a micro-batch decide, and what is said of it. (fast tier)"""

import pytest
import torch

from megatron_burst import BurstConfig
from tests.plugin.contexts import Context

pytest.importorskip("megatron.training.models.gpt")
from megatron_burst.plugin.attention.layouts import Layouts  # noqa: E402

SEGMENTED, BALANCED = (BurstConfig(layout=layout) for layout in ("segmented-zigzag", "balanced"))


def test_what_balancing_makes_of_documents_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    uneven, even = (0, 20, 32), (0, 32)
    layouts = Layouts(Context(BALANCED, 2, 0))
    found = [layouts.of(bounds) for bounds in (uneven, (0, 21, 32), uneven)]
    assert found[0] is found[2] and found[0] != found[1]
    (said,) = caplog.messages
    assert "32 tokens in documents are balanced over 2 ranks" in said and "zigzag 1." in said
    caplog.clear()
    for config, ranks, rank in ((BurstConfig(), 2, 0), (BurstConfig(), 2, 1), (SEGMENTED, 2, 0)):
        layouts = Layouts(Context(config, ranks, rank))
        assert [layouts.of(bounds) for bounds in (even, uneven, (0, 21, 32))] == [None] * 3
    (said,) = caplog.messages
    assert "--burst-layout balanced would make it 1." in said


def test_a_part_is_recomputed_of_rows_in_the_order_of_the_sequence() -> None:
    bounds, held = (0, 300, 1000, 1300, 2000, 2100, 2160), []
    for fraction in (None, 1.0, 0.5):
        context = Context(BurstConfig(layout="balanced", recompute_fraction=fraction), 6, 0)
        context.nodes = [0, 0, 1, 1, 2, 2]
        layout = Layouts(context).of(bounds)
        assert layout
        held.append([layout.positions(rank) for rank in range(6)])
    usual, whole, part = held
    assert all(map(torch.equal, usual, whole))
    assert all(torch.equal(rows, x.sort().values) for rows, x in zip(part, usual, strict=True))
    assert not all(map(torch.equal, part, usual))


def test_balancing_looks_at_no_block_mask() -> None:
    with pytest.raises(ValueError, match="balanced looks at documents alone: drop --burst-block-m"):
        BurstConfig(layout="balanced", block_mask="blocks.npy")
