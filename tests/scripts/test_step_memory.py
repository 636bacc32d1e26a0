"""What lives in a training step, rung by rung, does not grow. (fast tier)

An 8B-shaped model, a rank of eight, 131072 tokens, in units of its hidden states, 1 GiB.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core.models.gpt")
sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

from step_memory import PHASES, SAVINGS, Settings, measure, shares  # noqa: E402

RUNGS = {  # savings, in order: at four layers
    0: (20.06, 100.00, 36.20, 17.97),
    1: (20.06, 8.72, 36.20, 17.97),
    2: (19.06, 5.72, 33.20, 14.97),
    3: (12.09, 5.72, 11.22, 13.97),
    4: (10.21, 5.72, 11.01, 10.91),
}
FUSED = (9.21, 5.72, 9.60, 10.78)


@pytest.mark.parametrize("rung", [0, 4])
def test_the_peaks_of_a_step(rung: int) -> None:
    found = measure(Settings(savings=frozenset(SAVINGS[:rung])))
    assert [round(found.in_x(phase), 2) for phase in PHASES] == [*RUNGS[rung]]


def test_the_peaks_with_what_transformer_engine_fuses() -> None:
    found = measure(Settings(savings=frozenset(SAVINGS), fused=True))
    assert [round(found.in_x(phase), 2) for phase in PHASES] == [*FUSED]


@pytest.mark.slow
@pytest.mark.parametrize("rung", [1, 2, 3])
def test_the_peaks_of_every_rung(rung: int) -> None:
    test_the_peaks_of_a_step(rung)


@pytest.mark.parametrize(("savings", "share"), [((), 1.0), (("chunked_loss", "offload"), 0.0)])
def test_what_a_layer_more_adds(savings: tuple[str, ...], share: float) -> None:
    """Its input, unless that is in the host's memory."""
    _, more = shares(Settings(savings=frozenset(savings)))
    assert {*more.values()} == {share * Settings.x.fget(Settings())}  # type: ignore[attr-defined]


def test_a_saving_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no such savings: magic"):
        measure(Settings(savings=frozenset({"magic"})))
