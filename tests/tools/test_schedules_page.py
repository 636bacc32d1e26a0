"""Which schedule wins where: the page, what it says of `auto`, and the clock. (fast tier)"""

from pathlib import Path

import pages  # noqa: E402
import pytest
import schedules  # noqa: E402

ROWS = pages.read_csv(schedules.PAGE)


def test_auto_is_within_2_percent_of_the_best_forced_setting_by_the_clock() -> None:
    """Of more ranks than are timed within 2.5: what a quarter takes says it of them."""
    sizes = [(row["cluster"], row["gpus"], row["kv_heads"], row["tokens"]) for row in ROWS]
    assert len(set(sizes)) == len(ROWS) == 3 * 3 * 2 * 4
    for row in ROWS:
        forced = [row[name] for name in schedules.settings() if name not in schedules.FORCED]
        assert len(forced) == 3 * 2
        over = float(row["auto"]) / min(float(each) for each in forced if each)
        assert over == pytest.approx(float(row["auto_over_best"]), abs=1e-3)
        assert over <= (1.02 if int(row["gpus"]) <= schedules.TIMED else 1.025), row


@pytest.mark.parametrize(
    ("kv_heads", "tokens"),
    [(32, 1024), (32, 4096), (4, 16384), pytest.param(32, 65536, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("cluster", schedules.CLUSTERS)
def test_the_table_is_what_the_clock_says_now(cluster: str, kv_heads: int, tokens: int) -> None:
    assert schedules.row(cluster, 64, kv_heads, tokens) in ROWS, "python scripts/docs/schedules.py"


def test_the_page_is_made_of_the_table(tmp_path: Path) -> None:
    page, file = schedules.PAGE.read_text(), tmp_path / "schedules.svg"
    assert pages.filled(page, schedules.parts(ROWS)) == page
    schedules.draw(ROWS, file)
    picture = file.read_text()
    assert all(f">{way}<" in picture for way in {schedules.fastest(row)[0] for row in ROWS})
