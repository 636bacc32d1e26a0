"""Which of the common flags a variant goes without, asked of the check that would refuse them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.plugin.flags import Flag, attention_flags, flags
from megatron_burst.plugin.limits import MEGATRON
from megatron_burst.tools.compare.variants import Variant, refusal
from megatron_burst.tools.flags import flags_in, names, without

_MASK = "--burst-block-mask"


def fitted(variants: Sequence[Variant], common: Sequence[str]) -> list[Variant]:
    """Return the variants with what each drops of the common flags; with the rest some cannot run.

    Raises:
        ValueError: not even ours takes the flags.
    """
    BurstConfig(**_settings(common))
    return [_fitted(variant, common) for variant in variants]


def _fitted(variant: Variant, common: Sequence[str]) -> Variant:
    given = names(common)
    named = [flag for flag in attention_flags() if flag.name.removeprefix("--") in given]
    if variant.algorithm == MEGATRON:
        dropped = [flag.name for flag in named]
        why_not = f"{_MASK}: Megatron's attention has none" if _MASK in dropped else ""
    else:
        dropped = [flag.name for flag in named if _is_idle(flag, variant.algorithm, common)]
        rest = _settings([*without(common, dropped), *variant.flags])
        why_not = refusal(BurstConfig, **rest)
    return replace(variant, dropped=tuple(dropped), why_not=variant.why_not or why_not)


def _is_idle(flag: Flag, algorithm: str, common: Sequence[str]) -> bool:
    """Whether an algorithm refuses a flag, whatever the others are."""
    value = {name: x for name, x in _settings(common).items() if name == flag.field}
    return bool(refusal(BurstConfig, algorithm=algorithm, **value))


def _settings(words: Sequence[str]) -> Mapping[str, Any]:
    """Read a command line's fields of BurstConfig.

    Raises:
        ValueError: a value that is no number.
    """
    given, found = flags_in(words), dict[str, Any]()
    for flag in flags(BurstConfig):
        if (value := given.get(flag.name.removeprefix("--"))) is not None:
            try:
                found[flag.field] = flag.type(str(value))
            except ValueError as error:
                raise ValueError(f"{flag.name} {value}: {error}") from None
    return found
