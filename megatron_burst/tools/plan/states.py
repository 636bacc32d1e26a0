"""The bytes of weights, gradients and optimizer: on a GPU, whole for a while, and on its host."""

from math import ceil
from typing import NamedTuple

from megatron_burst.tools.plan.workload import Workload

_MOMENT_BYTES = 8  # of a parameter: two in float32; beside weights of 16 bits also a float32 copy
_HOSTED_BYTES = 16  # of a parameter whose optimizer is there: copy, moments, gradient, in float32
# Megatron-FSDP gathers so many weights ahead, and lets gradients wait, whole, for twice as many.
_AHEAD = 500_000_000


class States(NamedTuple):
    """Bytes of a GPU."""

    weights: int
    gradients: int
    optimizer: int
    hosted: int  # of its host


def states(load: Workload, stage: int) -> States:
    """Count those of a rank of a pipeline stage.

    Where weights are sharded their owner also has a float32 copy. Offloading leaves the gradients
    on the GPU, but for DeepSpeed, which shards weights and offloads them, too.
    """
    own, of_experts = _own(load, stage)
    ranks = load.shards if load.zero3 else 1
    weights, gradients = own * load.element_bytes // ranks, own * load.gradient_bytes // ranks
    wide = _MOMENT_BYTES + (4 if load.element_bytes == 2 else 0)
    spread = load.shards if load.sharded else 1
    # Experts' are spread over the ranks that have the same experts.
    numbers = (own - of_experts) / spread + of_experts / max(1, spread // load.expert)
    hosted = load.offload * numbers
    gradients = 0 if load.zero3 and load.offload else gradients
    return States(weights, gradients, int(wide * (numbers - hosted)), int(_HOSTED_BYTES * hosted))


def gathered(load: Workload) -> int:
    """Return the bytes of other ranks' weights and gradients that are there for a while (ZeRO-3).

    As Megatron-FSDP has them: embedding and head stay; of the layers one at work and those ahead;
    of gradients those of a layer at work, of one that is reduced, and what waits.
    """
    if not load.zero3 or load.shards == 1:
        return 0
    model, sizes = load.model, {name: p.parameters for name, p in load.model.parts.items()}
    attention = sizes.pop("attention", 0)
    layer = (attention + max(sizes.values(), default=0)) // load.tensor
    every = layer * max(model.layers, 1) // load.pipeline
    ahead = max(_AHEAD, layer)
    weights = min(every, layer + ceil(ahead / layer) * layer)
    gradients = min(every, (2 * ahead // layer + 2) * layer)
    ends = model.head_parameters * (1 if model.tied else 2) // load.tensor
    return load.element_bytes * (ends + weights + gradients)


def _own(load: Workload, stage: int) -> tuple[int, int]:
    """The parameters that a rank of a stage has, and of them those of experts."""
    model, head = load.model, load.model.head_parameters
    experts = model.expert_parameters // (load.pipeline * load.expert)
    embeddings = model.parameters - sum(p.count * p.parameters for p in model.parts.values())
    layers = model.parameters - embeddings - model.expert_parameters
    ends = embeddings if load.pipeline == 1 else head
    if 0 < stage < load.pipeline - 1:
        ends = 0
    return (layers // load.pipeline + ends + experts) // load.tensor, experts // load.tensor
