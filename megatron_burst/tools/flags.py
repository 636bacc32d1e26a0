"""Flags of a training, Megatron's and ours: read from a command line, written, and what they say.

All tools have them as a mapping by their names without dashes in front.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_burst.tools.options import LARGEST

type Flags = Mapping[str, Any]

DOCUMENTS = "--dataloader-inter-document-masking"
# Megatron takes tokens from one place: any of these takes that of a run's mock data.
_DATA = {"data-path", "data-args-path", "train-data-path", "per-split-data-args-path"}
_FSDP = {"use-megatron-fsdp", "use-torch-fsdp2"}
# Beside these and CUDA graphs Megatron refuses expandable segments, or wants more to be set.
_FIXED_SEGMENTS = {"use-nccl-ub", "enable-cuda-graph", "external-cuda-graph"}
# Flags of one's own before which those of a run give way.
_REPLACED = {
    "accumulate-allreduce-grads-in-fp32": ("grad-reduce-in-bf16",),
    "lm-head-loss": ("lm-head-memory-mb", "lm-head-chunk-size"),
    "lm-head-chunk-size": ("lm-head-memory-mb",),
}


# ---- command lines


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Undo `arguments`.

    Raises:
        ValueError: a word that belongs to no flag, or flags are in a file.
    """
    if words and not words[0].startswith("--"):
        raise ValueError(f"{words[0]} belongs to no flag")
    if "yaml-cfg" in (flags := flags_in(words)):
        raise ValueError("--yaml-cfg is not read here: pass what the file says as flags")
    if flags.pop("recompute-activations", False):  # Megatron's short form
        flags["recompute-granularity"] = "selective"
    return flags


def flags_in(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of a command; what stands before the first belongs to none.

    Values stay strings, several are a list; a flag without one is True.
    """
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            flags[name] = [value] if value else []
        elif flags:
            flags[name].append(word)
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in flags.items()
    }


def arguments(flags: Flags) -> list[str]:
    """Write flags as a command line has them; those that are False are left out."""
    words = []
    for name, value in kept(flags).items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def names(words: Sequence[str]) -> set[str]:
    """Return the flags that a command line names, and its other words."""
    return {word.removeprefix("--").partition("=")[0] for word in words}


def without(words: Sequence[str], dropped: Collection[str]) -> list[str]:
    """Return a command line without some flags, as `--name`, and their values."""
    left, is_left = list[str](), True
    for word in words:
        if word.startswith("--"):
            is_left = word.partition("=")[0] not in dropped
        left += [word] * is_left
    return left


def variables(flags: Flags, there: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what the environment of a training on GPUs should say, and does not in `there`."""
    settings, given, there = dict[str, str](), kept(flags), there or {}
    # One queue to the GPU, so that a message starts before the computation that hides it. Before
    # Blackwell Megatron asserts it under tensor or context parallelism, its layers advise it under
    # sequence parallelism on any GPU, and under FSDP it is refused.
    if not _FSDP & given.keys():
        settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # Tensors of many sizes, as documents and chunks are, leave holes in segments of a fixed size:
    # 11 to 30 % of what was allocated (scripts/bench/results/h200_first_run.md). This is the name
    # that Megatron looks at.
    captures = given.get("cuda-graph-impl", "none") != "none" or _FIXED_SEGMENTS & given.keys()
    if not (captures or there.get("PYTORCH_ALLOC_CONF")):
        settings["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return {name: value for name, value in settings.items() if not there.get(name)}


def flags_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags behind Megatron's arguments, as it keeps or logs them; unset ones left out.

    Their names have underscores there.
    """
    given = {n: v for n, v in arguments.items() if str(v) not in ("None", "False")}
    return {name.replace("_", "-"): value for name, value in given.items()}


def kept(flags: Flags) -> dict[str, Any]:
    """Those that are not taken back by False."""
    return {name: value for name, value in flags.items() if value is not False}


# ---- what they say


def whole(given: Flags, name: str, default: int = 1) -> int:
    """Return the number that is given, or the default.

    Raises:
        ValueError: it is no whole number, too large, or 0 where the default is not.
    """
    value = given.get(name)
    text = str(default if value is None or value is False else value)
    if not text.isdecimal() or (default and not int(text)):
        kind = "positive whole" if default else "whole"
        raise ValueError(f"--{name} {text} is not a {kind} number")
    if int(text) > LARGEST:
        raise ValueError(f"--{name} {text} is more than {LARGEST}")
    return int(text)


class Heads(NamedTuple):
    """Of a layer's attention, over all tensor-parallel ranks."""

    query: int
    kv: int
    size: int  # of queries and keys; 0 where nothing says it
    value_size: int

    def of_rank(self, tensor: int) -> tuple[int, int]:
        """Return the query and kv heads of one of so many tensor-parallel ranks."""
        return self.query // tensor, max(self.kv // tensor, 1)

    def why_no_a2a(self, tensor: int, ranks: int) -> str:
        """Say why Megatron's all-to-all over so many ranks cannot have them; it copies none."""
        query, kv = self.of_rank(tensor)
        if query % ranks == kv % ranks == 0:
            return ""
        return f"{query} query and {kv} kv heads of a tensor-parallel rank do not divide by {ranks}"


def heads_of(given: Flags) -> Heads:
    """Read the heads of attention from Megatron's flags."""
    number, heads = partial(whole, given), whole(given, "num-attention-heads")
    if given.get("multi-latent-attention"):
        size = number("qk-head-dim", 128) + number("qk-pos-emb-head-dim", 64)
        return Heads(heads, heads, size, number("v-head-dim", 128))
    size = number("kv-channels", number("hidden-size", 0) // heads)
    kv_heads = number("num-query-groups") if given.get("group-query-attention") else heads
    return Heads(heads, kv_heads, size, size)


def window_of(given: Flags) -> int | None:
    """Return how many keys to the left of itself a query sees, as in `Mask`; None: all."""
    text = str(given.get("window-size", "-1,0"))
    match = re.fullmatch(r"\(?(-1|\d+),\s*(0|-1)\)?", text)
    if not match:
        raise ValueError(f"--window-size {text} is not LEFT,0, as 4096,0 or -1,0")
    return None if match[1] == "-1" else int(match[1])


# ---- the layers of a HybridModel, by its pattern


def hybrid_pattern(given: Flags) -> str:
    """Return the layers of a GPTModel as a HybridModel's, by --num-layers and --moe-layer-freq.

    Raises:
        ValueError: the frequency is neither a number nor a list as '[0]*1+[1]*26'.
    """
    layers = whole(given, "num-layers")
    if not given.get("num-experts"):
        return "*-" * layers
    text = str(given.get("moe-layer-freq", 1)).strip("()").replace(" ", "")
    if text.isdigit():
        every = whole({"moe-layer-freq": text}, "moe-layer-freq")
        kinds = "".join("0" if layer % every else "1" for layer in range(layers))
    else:
        groups = re.findall(r"\[([01,]+)\](?:\*(\d+))?", text)
        kinds = "".join(part.replace(",", "") * int(times or 1) for part, times in groups)
    if len(kinds) != layers:
        raise ValueError(
            f"--moe-layer-freq {text} says of {len(kinds)} layers what they are, but there are "
            f"{layers}: give a number or [0]*a+[1]*b"
        )
    return kinds.replace("0", "*-").replace("1", "*E")


def adapt_flags(flags: Flags, own: Collection[str], *, gpt: bool) -> dict[str, Any]:
    """Return the flags of a run as `gpt` and the names of one's own ask for its model.

    Raises:
        ValueError: the layers of a HybridModel are counted.
    """
    pattern, given = "hybrid-layer-pattern", dict(flags)
    for name, others in _REPLACED.items():
        for other in others if name in own else ():
            given.pop(other, None)
    if not _DATA.isdisjoint(own):
        given.pop("mock-data", None)
    if pattern in (*given, *own) or ("num-layers" in given and not gpt):
        given = hybrid_form(given)
    if "num-layers" in own and pattern in (*given, *own):
        raise ValueError("--num-layers: a HybridModel has --hybrid-layer-pattern; or give --gpt")
    return given


def hybrid_form(flags: Flags) -> dict[str, Any]:
    """Return the flags of a GPTModel as those of the same HybridModel.

    Attention, `*`, and the MLP, `-`, or experts, `E`, are layers of their own there; recompute
    counts both. With latents or MTP's heads it stays a GPTModel.
    """
    given = dict(flags)
    if any(map(given.get, ("multi-latent-attention", "mtp-num-layers"))):
        return given
    if "recompute-num-layers" in given:
        given["recompute-num-layers"] = 2 * whole(given, "recompute-num-layers")
    if "num-layers" in given:
        given["hybrid-layer-pattern"] = hybrid_pattern(given)
        for name in ("num-layers", "moe-layer-freq"):
            given.pop(name, None)
    return given


def staged(flags: Flags, segments: int) -> dict[str, Any]:
    """Return the flags of a HybridModel with a `|` between the segments of its pipeline.

    Megatron wants so many times the pipeline stages as a stage has parts, and no flag for parts.
    """
    given, name = dict(flags), "hybrid-layer-pattern"
    main, *heads = str(given.get(name, "")).split("/")
    if name not in given:
        return given
    given.pop("num-virtual-stages-per-pipeline-rank", None)
    if "|" not in main:
        given[name] = "/".join(("|".join(cut(main, segments)), *heads))
    return given


def cut(pattern: str, parts: int) -> list[str]:
    """Cut the layers of a pattern into parts of about equal length."""
    ends = [len(pattern) * end // parts for end in range(parts + 1)]
    return [pattern[start:stop] for start, stop in pairwise(ends)]
