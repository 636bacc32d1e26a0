"""What a named run is: its size, the memory and time that are predicted, and published figures."""

from collections.abc import Iterator

from megatron_burst.tools.plan import memory, timing
from megatron_burst.tools.plan.configs import Configs, Run, Table
from megatron_burst.tools.plan.memory import GIB
from megatron_burst.tools.plan.workload import Workload, loss_chunking


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
        yield _size(load)
        yield _memory(load, configs.constant("working_set"))
        yield _time(load)
    published = configs.published_rows()
    for name in run.published:
        yield _published(name, published[name])


def recomputed(load: Workload) -> str:
    """Say what of attention is computed again where layers are recomputed."""
    fraction = load.config.recompute_fraction
    if not load.recompute:
        return "nothing is recomputed"
    if fraction in (None, 0):
        return "recomputed" if fraction is None else "all results saved"
    return f"the first {fraction:g} recomputed"


def _size(load: Workload) -> str:
    of_rank, billions = load.local_tokens, load.model.parameters / 1e9
    return (
        f"{billions:.2f} billion parameters; tensor {load.tensor} x context {load.context} x data "
        f"{load.data}; {load.tokens} tokens, {of_rank} a context-parallel rank, "
        f"{of_rank // load.tensor} a GPU; attention: {recomputed(load)}"
    )


def _loss(run: Run) -> str:
    chunking = loss_chunking(run.flags)
    if chunking is None:
        return "loss: Megatron's, from all logits at once; 3 products with the LM head a token"
    return f"loss: {chunking}; {chunking.products} products with the LM head a token"


def _memory(load: Workload, working_set: float) -> str:
    found = memory.predict(load, working_set)
    parts = {
        "weights": found.weights,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "inputs of layers": found.inputs,
        "saved attention": found.saved,
        "a layer at work": found.layer,
        "loss": found.loss,
    }
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    share = found.total / load.cluster.memory
    return (
        f"predicted memory: {found.total / GIB:.1f} of {load.cluster.memory / GIB:.0f} GiB "
        f"({share:.0%}; {'fits' if found.fits(load.cluster) else 'DOES NOT FIT'}): {listed}"
    )


def _time(load: Workload) -> str:
    found = timing.predict(load)
    return (
        f"predicted time: {found.seconds:.1f} s a step, {found.tokens_per_gpu:.1f} tokens/s/GPU, "
        f"MFU {found.mfu:.1%}, {found.exposed_share:.1%} of attention waits for messages"
    )


def _published(name: str, row: Table) -> str:
    speed = f"{row['tgs']:g} tokens/s/GPU" if "tgs" in row else f"{row['tflops']:g} TFLOP/s"
    parts = [f"published {name}: {speed}"]
    if mfu := row.get("mfu_published"):
        parts.append(f"MFU {mfu / 1.024:.1f} % (published as {mfu:g} %, 1.024 times too much)")
    if gib := row.get("gib"):
        parts.append(f"{gib:g} GiB")
    code = f"; by {row['code']}" if "code" in row else ""
    return f"{', '.join(parts)}; all ranks context-parallel, ZeRO-3{code}"
