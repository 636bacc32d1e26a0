"""What a named run is: its size, the memory and time that are predicted, and published figures."""

from collections.abc import Iterator

from megatron_burst.tools.plan import memory, timing
from megatron_burst.tools.plan.configs import Configs, Run
from megatron_burst.tools.plan.memory import GIB
from megatron_burst.tools.plan.validation import Row, rows_of
from megatron_burst.tools.plan.workload import Workload, loss_chunking

_KEPT = {None: "runs again", 0.0: "all results kept"}


def lines(configs: Configs, run: Run) -> Iterator[str]:
    """Say what the run is."""
    yield f"{run.name}: {run.gpus} GPUs of {run.cluster}"
    if run.note:
        yield f"note: {run.note}"
    yield _loss(run)
    try:
        load = run.workload(configs)
    except ValueError as error:
        yield f"not predicted: {error}"
    else:
        yield from _size(load)
        yield from _memory(load, configs.constant("working_set"))
        yield from _time(load)
    rows = {row.id: row for row in rows_of(configs)}
    for name in run.published:
        yield _published(rows[name])


def kept(load: Workload) -> str:
    """Say what happens with attention when layers run again."""
    fraction = load.config.recompute_fraction
    if not load.recompute:
        return "nothing runs again"
    if fraction in _KEPT:
        return _KEPT[fraction]
    return f"the first {fraction:g} runs again"


def _size(load: Workload) -> Iterator[str]:
    of_rank, billions = load.local_tokens, load.model.parameters / 1e9
    yield (
        f"{billions:.2f} billion parameters; tensor {load.tensor} x context {load.context} x data "
        f"{load.data}; {load.tokens} tokens, {of_rank} a context-parallel rank, "
        f"{of_rank // load.tensor} a GPU; attention: {kept(load)}"
    )


def _loss(run: Run) -> str:
    chunking = loss_chunking(run.flags)
    if chunking is None:
        return "loss: Megatron's, from all logits at once; 3 products with the LM head a token"
    return f"loss: {chunking}; {chunking.products} products with the LM head a token"


def _memory(load: Workload, working_set: float) -> Iterator[str]:
    found = memory.predict(load, working_set)
    parts = {
        "weights": found.weights,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "inputs of layers": found.inputs,
        "kept attention": found.kept,
        "a layer at work": found.layer,
        "loss": found.loss,
    }
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    share = found.total / load.cluster.memory
    yield (
        f"predicted memory: {found.total / GIB:.1f} of {load.cluster.memory / GIB:.0f} GiB "
        f"({share:.0%}; {'fits' if found.fits(load.cluster) else 'DOES NOT FIT'}): {listed}"
    )


def _time(load: Workload) -> Iterator[str]:
    found = timing.predict(load)
    yield (
        f"predicted time: {found.seconds:.1f} s a step, {found.tokens_per_gpu:.1f} tokens/s/GPU, "
        f"MFU {found.mfu:.1%}, {found.exposed_share:.1%} of attention waits for messages"
    )


def _published(row: Row) -> str:
    text = f"published {row.id}: {row.speed:g} {row.unit}"
    if row.mfu is not None:
        text += f", MFU {row.mfu:.1%}"
    if row.mfu_published is not None:
        right = row.mfu_published / 1.024
        text += (
            f" (published as {row.mfu_published:g} %; {right:.1f} % without 1.024 times too much)"
        )
    if row.gib is not None:
        text += f", {row.gib:g} GiB"
    whose = f"; by {row.code}" if row.code else ""
    return f"{text}; attention: {kept(row.load)}, all ranks context-parallel, ZeRO-3{whose}"
