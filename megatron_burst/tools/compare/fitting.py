"""Which of the common flags a variant goes without, asked of the check that would refuse them."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_burst.config import BurstConfig
from megatron_burst.plugin.flags import Flag, attention_flags
from megatron_burst.plugin.limits import MEGATRON
from megatron_burst.tools.compare.variants import Variant, refusal
from megatron_burst.tools.flags import flags_in, names, without
from megatron_burst.tools.plan.reading import config_of

_MASK = "--burst-block-mask"


def fitted(variants: Sequence[Variant], common: Sequence[str]) -> list[Variant]:
    """Return the variants with what each drops of the common flags; with the rest some cannot run.

    Raises:
        ValueError: not even ours takes the flags.
    """
    config_of(BurstConfig, flags_in(common))
    return [_fitted(variant, common) for variant in variants]


def _fitted(variant: Variant, common: Sequence[str]) -> Variant:
    given = names(common)
    named = [flag for flag in attention_flags() if flag.name.removeprefix("--") in given]
    if variant.algorithm == MEGATRON:
        dropped = [flag.name for flag in named]
        why_not = f"{_MASK}: Megatron's attention has none" if _MASK in dropped else ""
    else:
        dropped = [flag.name for flag in named if _is_idle(flag, variant.algorithm, common)]
        rest = flags_in([*without(common, dropped), *variant.flags])
        why_not = refusal(config_of, BurstConfig, rest)
    return replace(variant, dropped=tuple(dropped), why_not=variant.why_not or why_not)


def _is_idle(flag: Flag, algorithm: str, common: Sequence[str]) -> bool:
    """Whether an algorithm refuses a flag, whatever the others are."""
    name = flag.name.removeprefix("--")
    alone = {"context-parallel-algo": algorithm, name: flags_in(common)[name]}
    return bool(refusal(config_of, BurstConfig, alone))
