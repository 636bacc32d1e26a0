"""The verb compare: which of the common flags a variant goes without. (fast tier)

Every variant that can run is given to the check that trainings go through.
"""

import argparse
import functools
import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_burst.plugin.arguments import add_burst_arguments, configure
from megatron_burst.plugin.flags import attention_flags
from megatron_burst.tools.arguments.compare import parser
from megatron_burst.tools.compare import command as compare
from megatron_burst.tools.compare.running import Series
from megatron_burst.tools.compare.variants import Variant
from megatron_burst.tools.flags import DOCUMENTS, names
from megatron_burst.tools.plan.configs import Configs

RUNS = Configs.read().listed()["runs"]
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Every flag of attention that users may give, not as it is by itself.
GIVEN = (
    "--burst-grad-dtype model",
    "--burst-grad-dtype=float32 --burst-kernel reference",
    "--burst-memory-mb 64 --burst-mla heads --burst-check nan",
    "--burst-head-chunks 2",
    "--burst-layout contiguous",
    f"{DOCUMENTS} --burst-layout balanced",
    f"--burst-layout segmented-zigzag --recompute-attention-fraction 0.5 {FULL}",
    f"--recompute-offload {FULL}",
    "--burst-block-mask mask.npy",
)


def compared(*words: str) -> tuple[Series, list[Variant]]:
    args = parser().parse_args(["--launcher", "srun torchrun", *words])
    compare._fill(args)
    return compare._series_and_variants(args)


@pytest.fixture(scope="module")
def training_parser() -> argparse.ArgumentParser:
    arguments = pytest.importorskip("megatron.training.arguments")
    made = argparse.ArgumentParser(allow_abbrev=False)
    with pytest.MonkeyPatch.context() as patch:  # Megatron reads it for every flag
        patch.setattr(inspect, "getsource", functools.cache(inspect.getsource))
        return add_burst_arguments(arguments.add_megatron_arguments(made))


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_BURST_CPU", "1")
    find = importlib.util.find_spec
    for place in (importlib.util, compare):
        monkeypatch.setattr(place, "find_spec", lambda name: "transformer" in name or find(name))


def refusals(
    training_parser: argparse.ArgumentParser, series: Series, chosen: Sequence[Variant]
) -> dict[str, str]:
    """What trainings refuse of the variants that can run, by their names."""
    found = {}
    for variant in (each for each in chosen if not each.why_not):
        command = series.command(variant)
        words = command[command.index("megatron_burst.pretrain") + 1 :]
        try:
            configure(training_parser.parse_args(words))
        except ValueError as error:
            found[variant.name] = str(error)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_no_variant_of_a_run_is_refused(
    name: str, training_parser: argparse.ArgumentParser
) -> None:
    series, chosen = compared("--run", name)
    assert refusals(training_parser, series, chosen) == {}
    can_run = {variant.name for variant in chosen if not variant.why_not}
    assert {"CP=1 megatron", "CP=1 burst", "burst", "ring flat", "allgather"} <= can_run


@pytest.mark.parametrize("given", GIVEN)
def test_a_flag_of_attention_is_given_to_whom_it_concerns(
    given: str,
    training_parser: argparse.ArgumentParser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("mask.npy", np.tri(8, dtype=bool))
    words = given.split()
    series, chosen = compared("--run", "toy", "--gpt", "--", *words)
    assert refusals(training_parser, series, chosen) == {}
    by_name = {variant.name: variant for variant in chosen}
    assert set(words) <= set(series.command(by_name["burst"])), "burst has all"
    ours = {flag.name.removeprefix("--") for flag in attention_flags()} & names(words)
    assert names(by_name["CP=1 megatron"].dropped) == ours, "Megatron's own has none"


def test_every_flag_of_attention_is_tried() -> None:
    tried = names(" ".join(GIVEN).split())
    ours = {flag.name.removeprefix("--") for flag in attention_flags()}
    assert ours - tried == ours & {*compare._OURS}


def test_a_flag_that_has_an_effect_stays() -> None:
    _, chosen = compared("--run", "toy", "--", "--burst-grad-dtype", "model")
    found = {variant.name: variant.dropped for variant in chosen}
    assert {found["ring flat"], found["allgather"], found["burst heads 2"]} == {()}
    assert {found["ulysses"], found["CP=1 megatron"]} == {("--burst-grad-dtype",)}


@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        ("--burst-block-mask m.npy", "CP=1 megatron", "Megatron's attention has none"),
        (f"{DOCUMENTS} --burst-block-mask m.npy", "burst balanced", "looks at documents alone"),
        ("--burst-mla latent", "burst heads 2", "latents have no heads"),
        ("--burst-head-chunks 4", "burst heads 2", "does not divide the 2 kv heads of a rank"),
    ],
)
def test_what_would_be_another_model_or_goes_with_nothing_is_left_out(
    given: str, name: str, reason: str
) -> None:
    _, chosen = compared("--run", "toy", "--", *given.split())
    why_not = {variant.name: variant.why_not for variant in chosen}
    assert reason in why_not[name] and not why_not["burst"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--burst-layout zigzags", "--burst-layout zigzags is unknown"),
        ("--burst-memory-mb many", "--burst-memory-mb many: invalid literal"),
        ("--burst-memory-mb 0", "--burst-memory-mb must be positive"),
    ],
)
def test_a_value_that_none_takes_is_refused_at_once(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compared("--run", "toy", "--", *given.split())


def test_the_nodes_of_a_run_are_those_of_its_cluster_unless_given() -> None:
    name = "14b_1m_32gpu_a800"
    (double,) = (v for v in compared("--run", name)[1] if v.name == "ring double")
    assert not double.why_not and "--burst-ranks-per-node 8" in " ".join(double.flags)
    (double,) = (
        v for v in compared("--run", name, "--gpus-per-node", "32")[1] if v.name == "ring double"
    )
    assert "all context-parallel ranks are on one node" in double.why_not


def test_one_context_parallel_rank_has_the_batch_and_the_experts_of_all() -> None:
    sizes = "--tensor-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 3"
    experts = "--num-experts 4 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    series, chosen = compared("--ranks", "8", "--", *f"{sizes} {experts}".split())
    assert series.flags[-2:] == ["--global-batch-size", "6"]
    ranks = {variant.name: variant.ranks for variant in chosen}
    assert ranks["CP=1 megatron"] == ranks["CP=1 burst"] == 4 and ranks["burst"] == 8
