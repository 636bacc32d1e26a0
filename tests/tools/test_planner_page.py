"""The planner's predictions beside what was measured, and the page that says so. (fast tier)"""

import csv
import sys
from functools import cache
from pathlib import Path

import pytest

from megatron_burst.tools.plan.configs import Configs

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "docs"))
import planner  # noqa: E402
import validation  # noqa: E402

CONFIGS = Configs.read()
PAGE = ROOT / "docs" / "planner.md"
FAST = ("e2e/14b/32", "scaling", "ablation", "masks", "kernel/128k", "kernel/node")
BEYOND = {
    "e2e/14b/32/loongtrain_double",
    "e2e/14b/32/loongtrain_double_none",
    "e2e/13b/32/loongtrain_double",
    "kernel/1M/double",
    "kernel/node/32k",
    "kernel/node/64k",
}
TABLES = pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])


@cache
def rows(fast: bool) -> list[validation.Row]:
    return [row for row in validation.rows_of(CONFIGS) if not fast or row.group in FAST]


@cache
def speeds(fast: bool) -> list[validation.Compared]:
    return validation.compare_speed(CONFIGS, rows(fast))


def test_there_are_at_most_six_constants_each_fitted_on_one_row() -> None:
    fitted = CONFIGS.published["fitted"]
    known = {row.id for row in rows(True)}
    assert len(fitted) <= 6 and {each["row"] for each in fitted.values()} <= known
    found = [each for each in speeds(True) if each.fitted]
    assert len(found) == 5
    assert all(abs(each.error) < 0.005 for each in found)


@TABLES
def test_speeds_are_predicted_and_what_misses_is_known(fast: bool) -> None:
    assert validation.median_error(speeds(fast)) < 0.05
    beyond = {each.id for each in speeds(fast) if abs(each.error) > 0.15}
    assert beyond == {name for name in BEYOND if name in {row.id for row in rows(fast)}}


@TABLES
@pytest.mark.parametrize("across_codes", [False, True])
def test_the_order_is_right_but_for_a_baseline_of_half_its_expected_speed(
    fast: bool, across_codes: bool
) -> None:
    count, found = validation.order(speeds(fast), across_codes=across_codes)
    assert count >= (15 if fast else 40)
    assert len(found) == 1 and "e2e/14b/32/loongtrain_double" in found[0]


@TABLES
def test_memory_is_predicted_within_15_percent(fast: bool) -> None:
    found = validation.compare_memory(CONFIGS, rows(fast))
    assert len(found) == (13 if fast else 19)
    assert all(abs(each.error) < 0.15 for each in found)


def test_exposed_shares_on_two_nodes_are_within_10_points() -> None:
    found = validation.compare_two_nodes(CONFIGS)
    apart = sorted(abs(each.predicted - each.measured) for each in found)
    assert len(found) == 118
    assert apart[len(apart) * 9 // 10] < 0.10 and apart[-1] < 0.15, apart[-12:]


@cache
def written() -> list[list[str]]:
    with PAGE.with_suffix(".csv").open() as file:
        return list(csv.reader(file))


@TABLES
def test_the_table_says_what_is_predicted_now(fast: bool) -> None:
    missing = [row for row in map(planner.csv_row, speeds(fast)) if row not in written()]
    assert not missing, planner.BEGIN


def test_the_table_has_the_two_nodes_that_the_benchmark_left() -> None:
    shares = map(planner.csv_row, validation.compare_two_nodes(CONFIGS))
    missing = [row for row in shares if row not in written()]
    assert not missing, planner.BEGIN
