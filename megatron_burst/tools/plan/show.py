"""What a named run is: its size, and the memory and time that are predicted."""

from collections.abc import Iterator

from megatron_burst.tools.plan import memory, timing
from megatron_burst.tools.plan.configs import Configs, Run
from megatron_burst.tools.plan.memory import GIB
from megatron_burst.tools.plan.workload import Workload, loss_chunking


def lines(configs: Configs, run: Run) -> Iterator[str]:
    """Say what the run is."""
    yield f"{run.name}: {run.gpus} GPUs of {run.cluster}"
    if run.note:
        yield f"note: {run.note}"
    chunking = loss_chunking(run.flags)
    way = chunking or "Megatron's, from all logits at once"
    products = chunking.products if chunking else 3
    yield f"loss: {way}; {products} products with the LM head a token"
    try:
        load = run.workload(configs)
    except ValueError as error:
        yield f"not predicted: {error}"
    else:
        yield from _predicted(load, configs.constant("working_set"))


def sizes(load: Workload) -> str:
    """Say how the ranks are spread and how much they train."""
    return (
        f"tensor {load.tensor} x context {load.context} x data {load.data}; {load.tokens} tokens, "
        f"{load.model.parameters / 1e9:.2f} billion parameters"
    )


def _predicted(load: Workload, working_set: float) -> Iterator[str]:
    fraction = load.config.recompute_fraction if load.recompute else 0
    share = "all" if fraction is None else "none" if not fraction else f"the first {fraction:g}"
    tokens = load.local_tokens // load.tensor
    yield f"{sizes(load)}; {tokens} tokens a GPU; of attention recomputed: {share}"
    found = memory.predict(load, working_set)
    parts = ", ".join(
        f"{name} {getattr(found, name) / GIB:.1f}"
        for name in ("weights", "gradients", "optimizer", "inputs", "saved", "layer", "loss")
        if getattr(found, name)
    )
    yield (
        f"predicted memory: {found.total / GIB:.1f} of {load.cluster.memory / GIB:.0f} GiB "
        f"({'fits' if found.fits(load.cluster) else 'DOES NOT FIT'}): {parts}"
    )
    time = timing.predict(load)
    yield (
        f"predicted time: {time.seconds:.1f} s a step, {time.tokens_per_gpu:.1f} tokens/s/GPU, "
        f"MFU {time.mfu:.1%}, {time.attention.exposed_share:.1%} of attention waits for messages"
    )
