"""Whether a command line fits on the cards of a cluster, and which saving it lacks where not."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from math import ceil

import torch

from megatron_burst.tools.doctor.launch_line import Target
from megatron_burst.tools.doctor.report import Finding, Level
from megatron_burst.tools.flags import arguments, parsed
from megatron_burst.tools.plan import memory, step
from megatron_burst.tools.plan.advice import remedies, savings_that_fit
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.memory import GIB
from megatron_burst.tools.plan.pasted import as_it_stands, as_one_document, complete
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.workload import Workload


def findings(
    args: Namespace, words: Sequence[str], target: Target, cluster: str | None
) -> Iterator[Finding]:
    """Compare what the planner predicts with the cards of a cluster, given or found here."""
    configs = Configs.read()
    if torch.cuda.is_available():
        cluster = cluster or configs.with_gpu(torch.cuda.get_device_name())
    if cluster is None:
        return
    machine, gpus = configs.cluster(cluster), target.nodes * target.ranks_per_node
    given = parsed(words)
    assumed = [*complete(given, gpus), *(packed := as_one_document(given))]
    try:
        given = as_it_stands(given)
        load = workload_of(given, machine, gpus)
        lacks = memory.lacks(load)
    except ValueError as reason:  # what is not modelled is no fault of the command line
        yield Finding("memory", Level.NOTE, f"its memory was not predicted: {reason}")
        return
    if not lacks:
        yield from _slow_steps(args, load) if not packed else ()  # which take less time
        return
    text = "; ".join((f"{_told(load, lacks)} on {machine.name}", *assumed))
    if lacks == "host":
        remedy = "more nodes, or fewer tokens"
    elif added := savings_that_fit(given, machine, gpus):
        remedy = " ".join(arguments(added))
        if "lm-head-loss" in added and "cross-entropy-loss-fusion" in given:
            remedy += ", without --cross-entropy-loss-fusion"
    else:
        if load.recompute:
            text += ", nor with all savings"
        remedy = ", or ".join((*remedies(load), "a look at megatron-burst plan --ladder"))
    yield Finding("memory", Level.WARNING, text, remedy)


def _slow_steps(args: Namespace, load: Workload) -> Iterator[Finding]:
    """A first step that outlasts NCCL's patience ends as if a machine had failed."""
    minutes, limit = step.predict(load).seconds / 60, args.distributed_timeout_minutes
    if 2 * minutes > limit:
        flag = "--distributed-timeout-minutes"
        text = f"a step takes {minutes:.0f} minutes on {load.cluster.name}, the first one longer"
        text += f": {flag} {limit} may end it"
        yield Finding("timeout", Level.WARNING, text, f"{flag} {ceil(4 * minutes)}")


def _told(load: Workload, lacks: str) -> str:
    if lacks == "host":
        needed, there = memory.host_bytes(load), memory.usable_host(load.cluster)
        return f"a host needs {needed / GIB:.0f} GiB of {there / GIB:.0f} that may be counted"
    needed, there = memory.predict(load).total, memory.usable(load.cluster)
    return f"a GPU needs {needed / GIB:.1f} GiB of {there / GIB:.1f} that may be counted"
