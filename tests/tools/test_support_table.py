"""The page of what runs with what: all that it has to say. (fast tier)"""

from collections.abc import Mapping
from itertools import chain, product, starmap

import pytest
import support_table  # noqa: E402
import tables  # noqa: E402

from megatron_burst.kernels import KERNELS
from megatron_burst.plugin.limits import LIMITS, LM_HEAD_LIMITS, flag_of
from megatron_burst.plugin.refusals import pattern_refusals
from tests.plans.simulator import simulate


@pytest.fixture(scope="module")
def page() -> str:
    return (tables.DOCS / "support.md").read_text()  # up to date, says test_tables.py


def test_every_mask_runs_on_every_ring_and_layout(page: str) -> None:
    layouts = "zigzag, segmented-zigzag, contiguous, striped"
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {layouts} | ")]
    assert f"| {', '.join(support_table.MASKS)} |" in row and row.count("| yes ") == 4


def test_the_plans_of_every_cell_are_right() -> None:
    axes = support_table.Algorithm, support_table.LayoutName, support_table.MASKS.values()
    for choice in chain.from_iterable(starmap(support_table.choices, product(*axes))):
        plans = [choice.plans(rank) for rank in range(support_table.RANKS)]
        pairs = int(choice.tiling.needs.pairs.sum())
        simulate([forward for forward, _ in plans], backward=False, pairs=pairs)
        simulate([backward for _, backward in plans], backward=True, pairs=pairs)


def test_what_a_kernel_lacks_is_said_and_not_what_this_machine_lacks(page: str) -> None:
    lines = [line.strip("| ").split(" | ") for line in page.splitlines()]
    (head,) = [line for line in lines if line[0] == "request"]
    assert ", ".join(head[1:]).split(", ") == [*KERNELS, "why"]
    (soft_cap,) = [line for line in lines if line[0] == "soft cap"]
    cells = dict(zip(head, soft_cap, strict=True))
    assert cells["reference"] == cells["flash2"] == "yes" and cells["cudnn"] == "no"
    assert cells["why"] == "it has no soft cap"
    assert "not installed" not in page and "tensors are on" not in page


def test_every_layer_of_a_hybrid_model_has_a_row() -> None:
    pattern = pytest.importorskip("megatron.core.models.hybrid.hybrid_layer_allocation")
    rows = [line for line in (tables.DOCS / "hybrid.md").read_text().splitlines() if "| `" in line]
    named = {name.strip("` ") for row in rows for name in row.split("|")[1].split(",")}
    assert named >= pattern.Symbols.VALID_LAYERS
    refused = [name for name in pattern.Symbols.VALID_LAYERS if [*pattern_refusals(name, None)]]
    assert refused == ["D"] and any("`D`" in row and "refused" in row for row in rows)


@pytest.mark.parametrize("limits", [LIMITS, LM_HEAD_LIMITS])
def test_every_limit_has_a_row_with_its_reason(page: str, limits: Mapping[str, str]) -> None:
    rows = [line.strip("| ").split(" | ") for line in page.splitlines()]
    said = [(name, row[1]) for row in rows if len(row) == 2 for name in row[0].split(", ")]
    for name, reason in limits.items():
        why, _, remedy = reason.partition(": ")
        (found,) = {text for each, text in said if each == f"`{name}`" and text.startswith(why)}
        assert found != why or remedy in (f"drop {flag_of(name)}", f"leave {name} off")
