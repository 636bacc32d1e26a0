"""What attention's settings accept and refuse, and the flags of their fields. (fast tier)"""

import dataclasses
import itertools
import math
from typing import Any, get_type_hints

import pytest

from megatron_burst import BurstConfig
from megatron_burst.config import LayoutName
from megatron_burst.plugin.flags import attention_flags
from megatron_burst.plugin.training_config import LayerConfig

FLAGS = {flag.field: flag.name for flag in attention_flags()}
OFFERED = {flag.field: flag.values for flag in attention_flags() if flag.values}
CONFIGS = {
    f.name: config for config in (BurstConfig, LayerConfig) for f in dataclasses.fields(config)
}


def test_every_flag_has_a_name_and_help_that_explains_each_value() -> None:
    for flag in attention_flags():
        assert flag.name.startswith("--") and "_" not in flag.name
        assert len(flag.help) > 40 and "\n" not in flag.help and "  " not in flag.help
        for value in flag.values:
            assert f"{value}:" in flag.help, (flag.name, value)


def test_flags_agree_with_the_fields() -> None:
    names = {name: f"--burst-{name.replace('_', '-')}" for name in CONFIGS}
    names |= {
        "algorithm": "--context-parallel-algo",
        "recompute_fraction": "--recompute-attention-fraction",
        "recompute_offload": "--recompute-offload",
    }
    del names["timeout_seconds"]
    assert names == FLAGS
    for flag in attention_flags():
        assert flag.default == getattr(CONFIGS[flag.field](), flag.field)
        assert not flag.values or flag.default in flag.values


def test_flags_offer_what_is_built() -> None:
    assert OFFERED == {
        "algorithm": ("burst", "ring", "allgather", "ulysses"),
        "backward": ("auto", "query", "kv"),
        "topology": ("auto", "flat", "double", "mesh"),
        "layout": ("auto", "zigzag", "segmented-zigzag", "balanced", "contiguous"),
        "grad_dtype": ("auto", "float32", "model"),
        "mla": ("auto", "latent", "heads"),
        "check": ("off", "nan", "reference"),
    }


@pytest.mark.parametrize("name", OFFERED)
def test_values_become_their_enum_and_an_unknown_one_is_refused_with_all(name: str) -> None:
    config = CONFIGS[name]
    enum = get_type_hints(config)[name]
    for value in OFFERED[name]:
        found = getattr(config(**{name: value}), name)
        assert found is enum(value)
        assert config(**{name: found}) == config(**{name: value})
    with pytest.raises(ValueError) as error:
        config(**{name: "brust"})
    assert str(error.value) == f"{FLAGS[name]} brust is unknown; this version has: " + ", ".join(
        enum
    )


def test_the_library_has_layouts_that_no_flag_offers() -> None:
    for layout in ("contiguous", "striped"):
        assert BurstConfig(layout=layout).layout is LayoutName(layout)


CHOICES = {
    "backward": ("kv", "query"),
    "topology": ("flat", "double"),
    "grad_dtype": ("float32", "model"),
    "head_parallel_size": (None, 1, 2, 4),
    "mla": ("latent", "heads"),
}
# What a preset decides itself; all else may be chosen.
SIZES = {("head_parallel_size", size) for size in (2, 4)}
FIXED = {
    "burst": set[tuple[str, str | int]](),
    "ring": {("backward", "query"), ("mla", "latent")},
    "allgather": {("backward", "query"), ("mla", "latent"), *SIZES},
    "ulysses": {
        *itertools.product(("backward",), ("kv", "query")),
        *itertools.product(("topology",), ("flat", "double")),
        *itertools.product(("grad_dtype",), ("float32", "model")),
        ("mla", "latent"),
        *SIZES,
    },
}


@pytest.mark.parametrize("algorithm", FIXED)
def test_a_preset_refuses_what_has_no_effect(algorithm: str) -> None:
    for name, value in ((name, value) for name, values in CHOICES.items() for value in values):
        settings: dict[str, Any] = {"algorithm": algorithm, name: value}
        if (name, value) not in FIXED[algorithm]:
            assert getattr(BurstConfig(**settings), name) == value
            continue
        with pytest.raises(ValueError) as error:
            BurstConfig(**settings)
        why = f"no effect under --context-parallel-algo {algorithm}: drop it or take burst"
        assert str(error.value) == f"{FLAGS[name]} {value} has {why}"
    defaults = {name: getattr(BurstConfig(), name) for name in CHOICES}
    assert BurstConfig(algorithm=algorithm, **defaults) == BurstConfig(algorithm=algorithm)


@pytest.mark.parametrize(
    ("said", "name", "values"),
    [
        ("--burst-head-parallel-size", "head_parallel_size", (0, -2)),
        ("--burst-ranks-per-node", "ranks_per_node", (0, -4)),
        ("timeout_seconds", "timeout_seconds", (0, -1.5, math.nan, math.inf)),
    ],
)
def test_numbers_are_positive_and_finite(said: str, name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{said} must be positive and finite, got {value}"):
            BurstConfig(**{name: value})


def test_auto_is_what_the_flag_makes_of_it() -> None:
    auto: Any = "auto"
    assert BurstConfig(head_parallel_size=auto, head_chunks=auto) == BurstConfig()


def test_a_configuration_is_frozen_and_hashable_and_takes_keywords_alone() -> None:
    config = BurstConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kernel = "cpu"  # type: ignore[misc]
    assert hash(config) == hash(BurstConfig())
    with pytest.raises(TypeError):
        BurstConfig("burst")  # type: ignore[misc]
