"""What BurstConfig accepts and refuses, and the flags that come from its fields. (fast tier)"""

import dataclasses
from enum import StrEnum

import pytest

from megatron_burst import BurstConfig
from megatron_burst.config import (
    Algorithm,
    Backward,
    GradDtype,
    LayoutName,
    Topology,
    flags,
)

ENUMS: dict[str, type[StrEnum]] = {
    "algorithm": Algorithm,
    "backward": Backward,
    "topology": Topology,
    "layout": LayoutName,
    "grad_dtype": GradDtype,
}
BUILT = {flag.field: flag.values for flag in flags()}
NOT_BUILT = [
    (name, value.value)
    for name, enum in ENUMS.items()
    for value in enum
    if value.value not in BUILT[name]
]


def test_every_flag_has_a_name_and_help_that_explains_each_value() -> None:
    for flag in flags():
        assert flag.name.startswith("--") and "_" not in flag.name
        assert len(flag.help) > 40 and "\n" not in flag.help and "  " not in flag.help
        for value in flag.values:
            assert f"{value}:" in flag.help, (flag.name, value)


def test_flags_agree_with_the_fields() -> None:
    fields = {f.name: f for f in dataclasses.fields(BurstConfig)}
    assert list(fields) == [*(flag.field for flag in flags()), "timeout_seconds"]
    names = {
        "algorithm": "--context-parallel-algo",
        "backward": "--burst-backward",
        "topology": "--burst-topology",
        "layout": "--burst-layout",
        "kernel": "--burst-kernel",
        "grad_dtype": "--burst-grad-dtype",
    }
    assert {flag.field: flag.name for flag in flags()} == names
    for flag in flags():
        assert flag.default == fields[flag.field].default == getattr(BurstConfig(), flag.field)
        assert not flag.values or flag.default in flag.values


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BUILT.items() for value in values]
)
def test_every_offered_value_is_accepted_as_a_string_and_becomes_its_enum(
    name: str, value: str
) -> None:
    found = getattr(BurstConfig(**{name: value}), name)
    assert found is ENUMS[name](value)
    assert BurstConfig(**{name: found}) == BurstConfig(**{name: value})


def test_there_are_values_that_are_not_built_yet() -> None:
    assert ("backward", "query") in NOT_BUILT and ("topology", "double") in NOT_BUILT


@pytest.mark.parametrize(("name", "value"), NOT_BUILT)
def test_a_value_that_is_not_built_is_refused_with_those_that_are(name: str, value: str) -> None:
    (flag,) = (flag for flag in flags() if flag.field == name)
    expected = f"{flag.name} {value} is not built yet; this version has: {', '.join(flag.values)}"
    for given in (value, ENUMS[name](value)):
        with pytest.raises(ValueError) as error:
            BurstConfig(**{name: given})
        assert str(error.value) == expected


@pytest.mark.parametrize("name", ENUMS)
def test_an_unknown_value_is_refused_with_those_that_are_built(name: str) -> None:
    (flag,) = (flag for flag in flags() if flag.field == name)
    with pytest.raises(ValueError) as error:
        BurstConfig(**{name: "brust"})
    assert str(error.value) == (
        f"{flag.name} brust is unknown; this version has: {', '.join(flag.values)}"
    )


@pytest.mark.parametrize("seconds", [0, -1.5])
def test_a_time_limit_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"timeout_seconds must be positive, got {seconds}"):
        BurstConfig(timeout_seconds=seconds)


def test_a_configuration_is_frozen_and_hashable_and_takes_keywords_alone() -> None:
    config = BurstConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kernel = "cpu"  # type: ignore[misc]
    assert hash(config) == hash(BurstConfig())
    with pytest.raises(TypeError):
        BurstConfig("burst")  # type: ignore[misc]
