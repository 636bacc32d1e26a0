"""What lives in a training step, rung by rung, does not grow. (one fast, all slow)

An 8B-shaped model, a rank of eight, 131072 tokens, in units of its hidden states, 1 GiB.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core.models.gpt")

from step_memory import PHASES, SAVINGS, Settings, measure, shares  # noqa: E402

from tests.tier import slow_if  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "recompute.md"
TABLE = PAGE.read_text().partition("## What lives in a step")[2].splitlines()
ROWS = [line.strip("| ").split(" | ") for line in TABLE if line.startswith("| ")][1:]


def peaks(**settings: Any) -> list[str]:
    found = measure(Settings(**settings))
    return [f"{found.in_x(phase):.1f}" for phase in PHASES]


def said(row: int) -> list[str]:
    return [cell.strip("*") for cell in ROWS[row][1 : 1 + len(PHASES)]]


@pytest.mark.parametrize("rung", slow_if(range(4), range(5)))
def test_the_peaks_are_those_on_the_page(rung: int) -> None:
    layers = 3 if rung == 4 else 4  # with inputs on the host, one in the middle is as good as two
    assert peaks(layers=layers, savings=frozenset(SAVINGS[:rung])) == said(rung)


@pytest.mark.slow
def test_the_peaks_with_what_transformer_engine_fuses() -> None:
    assert peaks(savings=frozenset(SAVINGS), fused=True) == said(5)


@pytest.mark.slow
def test_five_million_tokens_on_eight_ranks() -> None:
    five_million = Settings(layers=2, tokens=655360, savings=frozenset(SAVINGS))
    assert measure(five_million).peak < 12 * five_million.x


@pytest.mark.slow
@pytest.mark.parametrize(("rung", "share"), [(0, 1), (2, 0)])
def test_what_a_layer_more_adds(rung: int, share: int) -> None:
    """Its input, unless that is in the host's memory."""
    found, more = shares(Settings(savings=frozenset(SAVINGS[:rung])))
    assert {*more.values()} == {share * found.settings.x}
