"""A whole Megatron command, taken apart: its flags, its machines, and what makes it ours."""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Any

from megatron_burst.config import Algorithm
from megatron_burst.tools.doctor.launch_line import OUR_RUNNER, STARTS, LaunchLine, Target, split
from megatron_burst.tools.flags import Flags, arguments, heads_of, parsed, whole, without
from megatron_burst.tools.flags import variables as usual_variables
from megatron_burst.tools.plan import memory
from megatron_burst.tools.plan.advice import savings_that_fit
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.own_flags import asked
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.savings import CHUNKED_LOSS
from megatron_burst.tools.plan.usual import A2A, ALL_GATHER, ALONE, P2P, as_trained

_ALGO, _TYPE = "context-parallel-algo", "cp-comm-type"
_HIERARCHY = "hierarchical-context-parallel-sizes"
_THEIRS = (  # of Megatron's attention and loss, which ours stand in for
    *(_TYPE, _HIERARCHY, "attention-backend"),
    *("cross-entropy-loss-fusion", "cross-entropy-fusion-impl", "defer-embedding-wgrad-compute"),
)
_VOCABULARY = {"GPT2BPETokenizer": 50257}  # of tokenizers that need no file to be known
_USUAL_VOCABULARY = 128256  # of Llama 3
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Pasted:
    """A command, taken apart, for machines that the command line or its own words name."""

    words: Sequence[str]
    line: LaunchLine
    flags: dict[str, Any]
    cluster: Cluster
    gpus: int
    assumed: str = ""  # what it does not say

    @property
    def target(self) -> Target:
        """What the doctor judges it for."""
        a_node = (
            self.line.ranks_per_node or self.cluster.gpus_per_host or self.cluster.gpus_per_node
        )
        a_node = min(a_node, self.gpus)
        return Target(-(-self.gpus // a_node), a_node, self.cluster.capability)


def is_command(words: Sequence[str]) -> bool:
    """Whether the words behind `--` are a program's, not flags alone."""
    return bool(words) and not words[0].startswith("--")


def read(words: Sequence[str], given: argparse.Namespace, configs: Configs) -> Pasted:
    """Take a command apart; its own words say how many GPUs, unless --gpus does.

    Raises:
        ValueError: it has no program, or nothing says the machine or how many GPUs.
    """
    if given.run or given.model:
        raise ValueError("--run and --model are not for a whole command, which has a model")
    if not given.cluster:
        raise ValueError("say --cluster: on which GPUs is the command to run?")
    cluster = configs.cluster(given.cluster)
    a_node = cluster.gpus_per_host or cluster.gpus_per_node
    line = split(words, a_node, given.gpus and -(-given.gpus // a_node))
    flags = parsed([*dropwhile(lambda word: not word.startswith("--"), line.flags)])
    started = (line.nodes or 0) * (line.ranks_per_node or 0)
    if not (gpus := given.gpus or started):
        raise ValueError("say --gpus: no torchrun in the command has plain numbers of ranks")
    flags |= asked(given, flags)
    assumed = complete(flags, gpus)
    if started not in (0, gpus):
        assumed.append(f"{gpus} GPUs, as --gpus says: its torchrun starts {started} ranks")
    elif started and line.ranks_per_node != (node := min(a_node, gpus)):
        assumed.append(f"nodes of {node} GPUs: its torchrun starts {line.ranks_per_node} on each")
    if not flags.get("bf16"):
        assumed.append("without --bf16 float32, whose products are timed as bfloat16's")
    keeps = given.documents or given.search is not None or given.ladder  # in what these print
    if not keeps:
        assumed += as_one_document(flags)
    return Pasted(words, line, flags, cluster, gpus, "; ".join(assumed))


def complete(flags: dict[str, Any], gpus: int) -> list[str]:
    """Add what Megatron takes where a command says nothing; return what of it is a guess."""
    sizes = (f"{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context"))
    data = max(1, gpus // math.prod(whole(flags, size) for size in sizes))
    flags.setdefault("global-batch-size", data * whole(flags, "micro-batch-size"))
    if {"vocab-size", "padded-vocab-size"} & flags.keys():
        return []
    tokenizer = str(flags.get("tokenizer-type"))
    flags["vocab-size"] = _VOCABULARY.get(tokenizer, _USUAL_VOCABULARY)
    return [f"--vocab-size {flags['vocab-size']} is assumed: no tokenizer is read here"]


def as_one_document(flags: dict[str, Any]) -> list[str]:
    """Take a sequence for one document; return what is guessed by that."""
    if flags.pop("dataloader-inter-document-masking", False) or flags.get("sft"):
        return ["a sequence is taken for one document: plan --documents N says their mean"]
    return []


def as_it_stands(flags: Flags) -> dict[str, Any]:
    """Return flags of ours that send and compute what Megatron's own attention does.

    Raises:
        ValueError: its layers differ.
    """
    named = flags.get(_TYPE, "p2p")
    names = [named] if isinstance(named, str) else named
    if flags.get(_ALGO, "megatron") != "megatron":
        return {**flags}
    if len({*names}) > 1:
        raise ValueError(f"--{_TYPE} {' '.join(names)}: layers that differ are not predicted")
    sizes = flags.get(_HIERARCHY, [1])
    degree = int(sizes[0] if isinstance(sizes, list) else sizes)
    known: dict[str, Flags] = {
        **{str(name): {_ALGO: name} for name in Algorithm},
        **{"p2p": P2P, "a2a": A2A, "all_gather": ALL_GATHER},
        "a2a+p2p": {**P2P, "burst-head-parallel-size": degree},
    }
    if names[0] not in known:
        raise ValueError(f"--{_TYPE} {names[0]} is not known: {', '.join(known)}")
    ranks = {"a2a": whole(flags, "context-parallel-size"), "a2a+p2p": degree}.get(names[0], 1)
    tensor = whole(flags, "tensor-model-parallel-size")
    if "num-attention-heads" in flags and (why := heads_of(flags).why_no_a2a(tensor, ranks)):
        raise ValueError(f"--{_TYPE} {names[0]}: {why}")
    return {**flags, **known[names[0]]}


@dataclass(frozen=True)
class Change:
    """What makes a command ours: flags to add, Megatron's that they stand in for, variables."""

    add: Flags
    drop: Flags
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: to be unset

    def of(self, flags: Flags) -> dict[str, Any]:
        """Return the flags with it."""
        return {n: value for n, value in flags.items() if n not in self.drop} | {**self.add}

    def of_words(self, words: Sequence[str]) -> list[str]:
        """Return the words of flags with it."""
        gone = {f"--{name}" for name in (*self.drop, *self.add)}
        return [*without(words, gone), *arguments(self.add)]

    def of_command(self, pasted: Pasted) -> list[str]:
        """Return the whole command with it, its script under our runner."""
        line = pasted.line
        before = [*pasted.words[: len(pasted.words) - len(line.flags)]]
        if line.program.endswith(".py") and not line.starts_us:
            before[-1:] = ["-m", OUR_RUNNER, line.program]
        before = [word for word in before if word.partition("=")[0] not in self.environment]
        assigned = [f"{name}={v}" for name, v in self.environment.items() if v is not None]
        starts = (i for i, word in enumerate(before) if STARTS.search(word))
        at = next(starts, 0)
        if assigned and not all("=" in word for word in before[:at]):
            assigned = ["env", *assigned]
        return [*before[:at], *assigned, *before[at:], *self.of_words(line.flags)]

    def of_line(self, line: LaunchLine) -> LaunchLine:
        """Return what the doctor judges of that command."""
        variables = {**line.environment, **self.environment}
        return replace(
            line,
            flags=tuple(self.of_words(line.flags)),
            starts_us=True,
            environment={name: v for name, v in variables.items() if v is not None},
        )


def change(pasted: Pasted) -> Change:
    """Return our flags that the command lacks, with the savings that it takes to fit.

    Raises:
        ValueError: its step cannot be predicted.
    """
    ours = {**ALONE, **CHUNKED_LOSS}
    add = {n: v for n, v in ours.items() if pasted.flags.get(n, "megatron") == "megatron"}
    changed = Change(add, {n: pasted.flags[n] for n in _THEIRS if n in pasted.flags})
    flags = changed.of(pasted.flags)
    if memory.lacks(as_trained(workload_of(flags, pasted.cluster, pasted.gpus))):
        savings = savings_that_fit(flags, pasted.cluster, pasted.gpus)
        changed = Change(add | (savings or {}), changed.drop)
    return replace(changed, environment=variables(pasted, changed.of(pasted.flags)))


def variables(pasted: Pasted, flags: Flags) -> dict[str, str | None]:
    """Return the variable that Megatron refuses to start with, or without, and the allocator's."""
    there = {**os.environ, **pasted.line.environment}
    settings: dict[str, str | None] = {**usual_variables(flags, there)}
    settings.pop(CONNECTIONS, None)
    is_one = there.get(CONNECTIONS) == "1"
    if CONNECTIONS not in usual_variables(flags):
        return settings | ({CONNECTIONS: None} if is_one else {})
    target, sizes = pasted.target, ("tensor-model-parallel-size", "context-parallel-size")
    is_older = target.device.type == "cuda" and (target.capability or (0, 0)) < (10, 0)
    wants_one = is_older and any(whole(flags, name) > 1 for name in sizes)
    return ({CONNECTIONS: "1"} if wants_one and not is_one else {}) | settings


def without_theirs(flags: Flags) -> dict[str, Any]:
    """Return flags without those of Megatron's attention and loss."""
    return {name: value for name, value in flags.items() if name not in _THEIRS}
