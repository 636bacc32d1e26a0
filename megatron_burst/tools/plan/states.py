"""The bytes of weights, gradients and optimizer: on a GPU, whole for a while, and on its host."""

from math import ceil
from typing import NamedTuple

from megatron_burst.tools.flags import cut
from megatron_burst.tools.plan.workload import Workload

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
    # Experts' are spread over the ranks that have the same experts.
    spread = own / load.shards + of_experts / load.expert_shards
    own += of_experts
    numbers, here = spread if load.sharded else own, spread if load.zero3 else own
    weights, gradients = int(here * load.element_bytes), int(here * load.gradient_bytes)
    hosted = load.offload * numbers
    gradients = 0 if load.zero3 and load.offload else gradients
    here = load.optimizer_bytes * (numbers - hosted)
    return States(weights, gradients, int(here), int(_HOSTED_BYTES * hosted))


def gathered(load: Workload) -> int:
    """Return the bytes of other ranks' weights and gradients that are there for a while (ZeRO-3).

    As Megatron-FSDP has them: embedding and head stay; of the layers one at work and those ahead;
    of gradients those of a layer at work, of one that is reduced, and what waits.
    """
    if not load.zero3 or load.shards == 1:
        return 0
    model, experts = load.model, load.expert * load.expert_tensor
    sizes = {
        name: part.of_rank(load.tensor) + part.of_experts // experts
        for name, part in model.parts.items()
    }
    every = sum(model.parts[name].count * size for name, size in sizes.items())
    layer = sizes.pop("attention", 0) + max(sizes.values(), default=0)
    ahead = max(_AHEAD, layer)
    weights = min(every, layer + ceil(ahead / layer) * layer)
    gradients = min(every, (2 * ahead // layer + 2) * layer)
    ends = model.ends // load.tensor + model.positions
    return load.element_bytes * (ends + weights + gradients)


def _own(load: Workload, stage: int) -> tuple[int, int]:
    """The parameters that a rank of a stage has, and beside them those of experts."""
    model, head = load.model, load.model.head_parameters
    experts = int(model.expert_parameters * _experts_of(load, stage))
    ends = model.ends if load.pipeline == 1 else head
    if 0 < stage < load.pipeline - 1:
        ends = 0
    positions = 0 if stage else model.positions
    layers = model.of_rank(load.tensor) // load.pipeline
    return layers + ends // load.tensor + positions, experts // (load.expert * load.expert_tensor)


def _experts_of(load: Workload, stage: int) -> float:
    """The share of all experts that a stage has: fewer where dense layers come first."""
    main = load.model.kinds.partition("/")[0]
    parts = cut(main, load.pipeline * load.virtual)[stage :: load.pipeline]
    return "".join(parts).count("E") / max(1, main.count("E"))
