"""The flags behind `--`: all of them known, and those among them that take a default back."""

import argparse
import warnings
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from typing import Any

from megatron_burst.plugin.flags import ENDED, all_flags
from megatron_burst.tools.flags import Flags, whole
from megatron_burst.tools.plan.configs import Configs


def checked(configs: Configs, given: Flags) -> dict[str, Any]:
    """Return the flags; those that `--no-NAME` takes back, and what hangs on them, as False.

    Raises:
        ValueError: neither Megatron nor this package has one of them.
    """
    usual, flags = _usual(configs), dict[str, Any]()
    for name, value in given.items():
        of = name.removeprefix("no-")
        if name in usual:
            flags[name] = value
        elif of in usual:
            flags[of] = False
            if of == "recompute-granularity":  # without it the rest has no effect
                flags |= dict.fromkeys(
                    (each for each in usual if each.startswith("recompute-")), False
                )
        else:
            _refuse_unknown(name, usual)
            flags[name] = value
    if given.get("recompute-granularity") == "selective":  # beside which Megatron refuses these
        flags = {"recompute-method": False, "recompute-num-layers": False, **flags}
    return flags


def asked(given: argparse.Namespace, behind: Flags) -> dict[str, Any]:
    """Return what --seq-length and --documents say ahead of `--`, as flags.

    Raises:
        ValueError: another length is behind it.
    """
    said = dict[str, Any]()
    if tokens := given.seq_length:
        if (other := whole(behind, "seq-length", tokens)) != tokens:
            raise ValueError(f"--seq-length is {tokens} ahead of --, and {other} behind it")
        said["seq-length"] = tokens
    if given.documents:
        said |= {"dataloader-inter-document-masking": True, "documents-mean": given.documents}
    return said


def _usual(configs: Configs) -> set[str]:
    """Flags of ours, and of the models and runs, which need no look at Megatron's parser."""
    tables = [*configs.models.values(), *(run.get("flags", {}) for run in configs.tables.values())]
    ours = (flag.name.removeprefix("--") for flag in all_flags())
    savings = "use-megatron-fsdp", "optimizer-cpu-offload", "optimizer-offload-fraction"
    return {*ours, *savings, *(name for table in tables for name in table)}


def _refuse_unknown(name: str, usual: Collection[str]) -> None:
    if remedy := ENDED.get(f"--{name}"):
        raise ValueError(f"there is no flag --{name} any more: {remedy}")
    theirs = _of_megatron()
    near = get_close_matches(name, [*usual, *theirs], n=1)
    if name not in theirs and (theirs or near):
        meant = f"; the nearest is --{near[0]}" if near else ""
        raise ValueError(f"neither Megatron nor this package has a flag --{name}{meant}")


@cache
def _of_megatron() -> frozenset[str]:
    """All that Megatron's parser knows; none where it is not installed."""
    try:
        with warnings.catch_warnings(action="ignore"):
            from megatron.training.arguments import add_megatron_arguments
    except ModuleNotFoundError:
        return frozenset()
    parser = add_megatron_arguments(argparse.ArgumentParser())
    return frozenset(name.removeprefix("--") for name in parser._option_string_actions)
