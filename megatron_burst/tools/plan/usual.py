"""What `--context-parallel-algo burst` alone takes; Megatron's own attention as flags of ours."""

from dataclasses import replace

from megatron_burst.config import Mla
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.degree import choose_degree
from megatron_burst.plans.choice.machine import H100, MACHINES, Machine
from megatron_burst.tools.flags import Flags
from megatron_burst.tools.plan.workload import Workload

ALONE: Flags = {"context-parallel-algo": "burst"}
_ZIGZAG = {"burst-layout": "zigzag"}  # of layers with a state, too
# TransformerEngine sends gradients in the dtype of K and V.
_NARROW = {"burst-grad-dtype": "model", **_ZIGZAG}
ALL_GATHER: Flags = {"context-parallel-algo": "allgather", **_NARROW}
P2P: Flags = {
    **_NARROW,
    "context-parallel-algo": "ring",
    "burst-topology": "flat",
    "burst-head-parallel-size": 1,
}
A2A: Flags = {"context-parallel-algo": "ulysses", **_ZIGZAG}


def as_trained(load: Workload) -> Workload:
    """Return it with the Ulysses degree that training chooses, where that is left to it."""
    config = load.config
    if load.context == 1 or config.head_parallel_size is not None:
        return load
    limit = config.memory_limit(load.cluster.memory)
    size, _ = choose_degree(config, load.nodes, _common(load), limit, _known(load))
    return load if size == 1 else replace(load, config=replace(config, head_parallel_size=size))


def _common(load: Workload) -> Shape | str:
    """The tensors of all layers; or that no choice goes by them, as in training."""
    if load.window is not None or load.documents:
        return "messages of some layers are fewer"
    if load.model.latents and load.config.mla is not Mla.HEADS:
        return "latents may travel"
    return replace(load.shape, latents=None, batch=load.micro)


def _known(load: Workload) -> Machine:
    """The machine that training takes it for, by the name of its GPU and its ports."""
    gpu, nic, gpus = load.cluster.gpu, load.cluster.nic_rate, load.cluster.gpus_per_nic
    machine = next((each for word, each in MACHINES.items() if word in gpu), H100)
    return replace(machine, nic_rate=nic, gpus_per_nic=gpus).shared_by(load.tensor)
