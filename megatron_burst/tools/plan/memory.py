"""The memory of one GPU in a training step, counted part by part, at its two peaks."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from megatron_burst.tools.plan import timing
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.communicators import uses
from megatron_burst.tools.plan.states import gathered, states
from megatron_burst.tools.plan.working_set import (
    between_projections,
    from_others,
    of_all_ranks,
    working_set,
)
from megatron_burst.tools.plan.workload import Ring, Workload
from megatron_burst.transport.host import pinned_bytes

GIB = 2**30
_USABLE = 0.92  # of the device: the rest is CUDA's, other NCCL groups' and the allocator's gaps
_LOGIT_BYTES = 6  # of all logits at once: bfloat16 and float32, forward or backward
_SOFTMAX_BYTES = 4  # of those of each of MTP's heads, which wait for their backward


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU, of the pipeline stage that needs most."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # weights of other ranks and their gradients, while they are used (ZeRO-3)
    inputs: int  # what is stored of all layers until their backward
    saved: int  # results of attention that are not recomputed
    layer: int  # the tensors of the layer that is at work, and its fragments
    loss: int  # logits
    nccl: int  # buffers of the communicators of attention

    @property
    def total(self) -> int:
        """The larger of two peaks: the loss, when no layer is at work, or a layer's backward."""
        states = self.weights + self.gradients + self.optimizer + self.gathered
        return states + self.inputs + self.saved + self.nccl + max(self.layer, self.loss)


def usable(cluster: Cluster) -> float:
    """Return the bytes of a GPU that may be counted."""
    return _USABLE * cluster.memory


def predict(load: Workload) -> Memory:
    """Predict the peak."""
    stages = {0, load.pipeline - 1}
    return max((_of_stage(load, stage) for stage in stages), key=lambda m: m.total)


def least(load: Workload) -> int:
    """Return the bytes of weights, gradients and optimizer, the least that a way needs."""
    return sum(states(load, load.pipeline - 1)[:3])


def host_bytes(load: Workload) -> int:
    """Return what the GPUs of one host have in its memory: inputs of layers, results, optimizer.

    Of inputs and results the slabs that `HostMemory` pins.
    """
    stages = {0, load.pipeline - 1}
    most = max(states(load, stage).hosted + _pinned(load, stage) for stage in stages)
    return int(most * load.ranks_per_host)


def usable_host(cluster: Cluster) -> float:
    """Return the bytes of a host that may be counted."""
    return _USABLE * cluster.host_memory


def lacks(load: Workload) -> str:
    """Return whose memory is too small: "GPU", "host" or, where both have room, ""."""
    if predict(load).total > usable(load.cluster):
        return "GPU"
    return "host" if host_bytes(load) > usable_host(load.cluster) else ""


def _of_stage(load: Workload, stage: int) -> Memory:
    model, tensor, waiting = load.model, load.tensor, _in_flight(load, stage)
    weights, gradients, optimizer, _ = states(load, stage)
    logits = load.local_tokens * model.vocabulary // tensor
    logits *= _LOGIT_BYTES + _SOFTMAX_BYTES * model.mtp
    # The last layer's output and its norm, and with the loss's chunks their gradient.
    hidden = (3 if load.chunked_loss else 2) * load.hidden_bytes
    if tensor > 1 and load.sequence_parallel:
        hidden = hidden // tensor + load.hidden_bytes  # gathered for the head
    of_loss = hidden + (load.loss_bytes if load.chunked_loss else logits)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered(load),
        inputs=_stored(load, waiting),
        saved=0 if load.recompute_offload else int(_results(load) * waiting),
        layer=working_set(load),
        loss=of_loss if stage == load.pipeline - 1 else 0,
        nccl=_communicators(load.ring) if model.layers else 0,
    )


@lru_cache(maxsize=64)
def _communicators(ring: Ring) -> int:
    choice, shape = timing.chosen(ring)
    schedules = choice.forward[0].schedule, choice.backward[0].schedule
    return sum(use.buffers for use in uses(ring, schedules, shape).values())


def hosted_activations(load: Workload) -> tuple[float, float]:
    """Return a micro-batch's bytes on the host: inputs of layers, results of attention."""
    if not load.recompute_offload:
        return 0.0, 0.0
    return _inputs(load) / load.pipeline if load.recompute else 0.0, _results(load)


def _results(load: Workload) -> float:
    """A micro-batch's bytes of what attention returned in the rows that are not recomputed."""
    fraction, layers = load.config.recompute_fraction, load.model.layers / load.pipeline
    if fraction is None or not load.repeats_attention:
        return 0.0
    a_token = load.heads[0] * (load.model.value_head_dim * load.element_bytes + 4)
    return (1 - fraction) * layers * load.local_tokens * a_token


def _pinned(load: Workload, stage: int) -> int:
    (inputs, results), waiting, pinned = hosted_activations(load), _in_flight(load, stage), 0
    if inputs:
        size = load.hidden_bytes // load.row_shards
        pinned += pinned_bytes(size, ceil(waiting * inputs / size))
    if results:
        layers = load.model.layers / load.pipeline
        wide = load.model.value_head_dim * load.element_bytes
        for part in (wide, 4):
            pinned += pinned_bytes(results / layers * part / (wide + 4), ceil(waiting * layers))
    return pinned


def _in_flight(load: Workload, stage: int) -> float:
    """How many micro-batches wait for their backward on a stage, under 1F1B or interleaved."""
    waiting = float(load.pipeline - stage)
    if load.virtual > 1:  # as many as a warm-up has, in parts of a stage
        warm_up = (load.virtual - 1) * max(load.group, load.pipeline)
        warm_up += 2 * (load.pipeline - stage) - 1
        waiting = warm_up / load.virtual
    return min(waiting, load.micro_batches)


def _stored(load: Workload, waiting: float) -> int:
    """Of all layers until their backward: the input where they are recomputed, or what they save.

    Attention and the MLP after it are one layer there, other kinds one each.
    """
    if load.recompute and load.recompute_offload:
        # The next is on its way when the layer's own attention is over.
        return load.hidden_bytes // load.row_shards
    if load.recompute:
        stored: float = _inputs(load)
    else:
        a_token = sum(_saved(load, name) * part.count for name, part in load.model.parts.items())
        stored = load.local_tokens * load.element_bytes * a_token
    return int(stored * waiting / load.pipeline)


def _inputs(load: Workload) -> int:
    """Of recomputed layers, two letters of the pattern one: as a rule attention and an MLP."""
    model, parts = load.model, load.pipeline * load.virtual
    letters = len(model.kinds.replace("/", ""))
    layers = parts * ceil(letters / parts / 2) + model.mtp
    return layers * load.hidden_bytes // load.row_shards


def _saved(load: Workload, name: str) -> float:
    """Numbers of a token that a rank saves of a layer that is not recomputed whole."""
    model, part, modules = load.model, load.model.parts[name], load.selective
    # Without sequence parallelism every rank has all of what norms and sums see.
    around = 2 * model.hidden
    inside = part.saved - around + from_others(load, name)
    if name == "attention":
        inside = between_projections(load)
    if name == "attention" and "core_attn" in modules:
        # Its second pass needs the tensor that q, k and v lie in, as norms of heads do, and no v.
        kv_heads, whole = max(model.kv_heads, load.tensor), of_all_ranks(load) * load.tensor
        more = whole or (model.heads + kv_heads) * model.head_dim
        inside += -kv_heads * model.head_dim if model.norms_heads else more
    if name == "mlp" and "mlp" in modules or name == "experts" and "moe" in modules:
        inside = 0
    elif name == "experts" and "moe_act" in modules:
        inside -= part.activated
    if "layernorm" in modules:
        around -= model.hidden
    return around / load.row_shards + inside / load.tensor
