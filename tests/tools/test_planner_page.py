"""The planner's predictions beside what was measured, and the page that says so. (fast tier)"""

import csv
from functools import cache
from pathlib import Path

import planner
import pytest
import rows as published
import validation

from megatron_burst.tools.plan.configs import Configs

ROOT = Path(__file__).parents[2]

CONFIGS = Configs.read()
PAGE = ROOT / "docs" / "planner.md"
FAST = ("scaling", "ablation", "masks", "kernel/node", "memo", "trl")
FAST_ROWS = (
    *(
        "e2e/14b/32/loongtrain_usp",
        "e2e/14b/32/loongtrain_double",
        "e2e/14b/32/loongtrain_usp_none",
    ),
    *("magi/h100/full/16/ring/forward", "magi/h100/causal/8/ring/forward", "nemo/32k", "nemo/128k"),
    *("magi/b200/causal/16/usp/forward", "magi/b200/causal/16/usp/backward", "alst/8b"),
)
BEYOND = {
    *("e2e/14b/32/loongtrain_double", "e2e/14b/32/loongtrain_double_none"),
    *("e2e/13b/32/loongtrain_double", "kernel/1M/double", "kernel/node/32k"),
    *(f"magi/b200/causal/{gpus}/allgather/backward" for gpus in (8, 16, 32, 64)),
    *(
        "magi/b200/causal/64/ulysses/forward",
        "alst/70b/both",
        *(f"bridge/{row}" for row in ("h100/30b_a3b", "h100/235b_a22b", "b200/30b_a3b")),
        "bridge/gb200/235b_a22b",
    ),
}
WRONG_ORDER = {
    *("e2e/14b/32/loongtrain_double", "alst/70b/both"),
    *(f"magi/b200/causal/{gpus}/allgather/backward" for gpus in (16, 32, 64)),
    *(f"magi/b200/causal/{gpus}/ulysses/forward" for gpus in (16, 32, 64)),
}
TABLES = pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])


@cache
def rows(fast: bool) -> list[published.Row]:
    every = published.rows_of(CONFIGS)
    return [
        row
        for row in every
        if not fast or row.group in FAST or row.id in FAST_ROWS or row.table == "bridge"
    ]


@cache
def speeds(fast: bool) -> list[published.Row]:
    return [row for row in rows(fast) if row.unit != "GiB"]


def test_there_are_at_most_eleven_constants_each_fitted_on_one_row() -> None:
    fitted = CONFIGS.published["fitted"]
    known = {row.id for row in rows(True)}
    assert len(fitted) <= 11 and {each["row"] for each in fitted.values()} <= known
    found = [each for each in rows(True) if each.fitted]
    assert sum(each.unit == "GiB" for each in found) == 1
    assert len(found) == 1 + len({each["row"] for each in fitted.values()})
    assert all(abs(each.error) < 0.005 for each in found)


def test_every_rate_says_its_source() -> None:
    for name, table in CONFIGS.clusters.items():
        for value, how, source in table.get("rates", {}).values():
            assert how in ("data sheet", "measured", "fitted", "estimate") and source, name
            assert isinstance(value, str) == (how == "fitted"), name
            assert how != "fitted" or value in CONFIGS.published["fitted"]


@TABLES
def test_speeds_are_predicted_and_what_misses_is_known(fast: bool) -> None:
    found = speeds(fast)
    assert validation.median_error(rows(fast)) < 0.10
    for table in {each.table for each in found}:
        assert validation.median_error([e for e in found if e.table == table]) < 0.16, table
    beyond = {each.id for each in found if not each.fitted and abs(each.error) > 0.15}
    assert beyond == {name for name in BEYOND if name in {row.id for row in rows(fast)}}


@TABLES
@pytest.mark.parametrize("across_codes", [False, True])
def test_the_order_is_right_but_for_what_is_named(fast: bool, across_codes: bool) -> None:
    count, found = validation.order(speeds(fast), across_codes=across_codes)
    assert count >= (10 if fast else 40) or across_codes
    assert all(set(pair) & WRONG_ORDER for pair in found), found


@TABLES
def test_memory_is_predicted_within_15_percent(fast: bool) -> None:
    found = [row for row in rows(fast) if row.unit == "GiB"]
    assert len(found) == (15 if fast else 23)
    assert validation.median_error(found) < 0.10
    beyond = {row.id for row in found if abs(row.error) > 0.15}
    assert beyond == {"trl/0.6b/4M", "trl/32b"}, "its 69 and 57 GiB are 81 and 66 here"


def test_what_experts_and_hosts_take_is_that_of_measured_steps() -> None:
    """Rows once 164, 91 and 26 per cent too fast, and those with the optimizer on hosts."""
    errors = {row.id: row.error for row in speeds(True)}
    assert abs(errors["bridge/b200/235b_a22b"]) < 0.15 > abs(errors["bridge/b200/deepseek_v3"])
    assert errors["bridge/h100/30b_a3b"] < 0.95 and errors["bridge/h100/30b_a3b/26.02"] < 0
    assert all(abs(errors[f"scaling/{gpus}"]) < 0.02 for gpus in (1, 2, 4, 8, 16))
    assert abs(errors["nemo/32k"]) < 0.03


def test_exposed_shares_on_two_to_eight_nodes_are_within_10_points() -> None:
    found = validation.two_nodes(CONFIGS)
    eight = [each for each in found if each.id.startswith("8 ranks")]
    assert len({each.id for each in found}) == len(found) == 118 + 24 + len(eight) == 142 + 66
    for some in (found, eight):
        apart = sorted(abs(each.predicted - each.value) for each in some)
        assert apart[int(0.97 * len(apart))] < 0.10 and apart[-1] < 0.12, apart[-12:]


@cache
def written() -> list[dict[str, str]]:
    with PAGE.with_suffix(".csv").open() as file:
        return list(csv.DictReader(file))


@TABLES
def test_the_table_says_what_is_predicted_now(fast: bool) -> None:
    missing = [row for row in map(planner.csv_row, rows(fast)) if row not in written()]
    assert not missing, "python scripts/docs/planner.py --write docs/planner.md"


def test_the_table_has_the_two_nodes_that_the_benchmark_left() -> None:
    shares = map(planner.csv_row, validation.two_nodes(CONFIGS))
    missing = [row for row in shares if row not in written()]
    assert not missing, "python scripts/docs/planner.py --write docs/planner.md"
