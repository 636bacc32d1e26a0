"""The time of a training step: attention by its plans, all else by FLOPs and bytes."""

import math
from typing import NamedTuple

from megatron_burst.plans.choice.cost import visible_pairs
from megatron_burst.tools.flops import step_flops
from megatron_burst.tools.model import Part
from megatron_burst.tools.plan.memory import hosted_activations, hosted_inputs
from megatron_burst.tools.plan.timing import Pass, attention_passes, together
from megatron_burst.tools.plan.workload import Workload

_BLOCK = 128  # rows of a tile of a grouped matrix product
_UPDATE_BYTES = 32  # read and written of a parameter by the optimizer
_MODULES = {"mlp": "mlp", "experts": "moe"}  # --recompute-modules by kinds of layers


class Copies(NamedTuple):
    """Seconds of a step's copies to the host's memory and back."""

    seconds: float = 0.0
    exposed: float = 0.0  # of them, those in which nothing is computed


class Prediction(NamedTuple):
    """Of a step."""

    attention: Pass  # all passes of a layer
    copies: Copies
    seconds: float
    tokens_per_gpu: float  # a second
    mfu: float


def predict(load: Workload) -> Prediction:
    """Predict a step; see the fields of the result."""
    attention = together(*attention_passes(load))
    computed = computing_seconds(load, attention.seconds)
    copies = host_copies(load, _of_stage(load, attention.seconds), computed)
    seconds = computed + weights_seconds(load, computed) + copies.exposed
    rate = load.sequences * load.tokens / load.gpus / seconds
    mfu = rate * model_flops(load) / load.tokens / load.cluster.peak
    return Prediction(attention, copies, seconds, rate, mfu)


def computing_seconds(load: Workload, attention: float) -> float:
    """Return the seconds of all micro-batches, given those of one layer's attention."""
    stage = _of_stage(load, attention)
    # One forward and one backward at a time: the others wait while the first fills the stages.
    filling = (load.pipeline - 1) / load.virtual
    of_stages = (load.micro_batches + filling) * (stage + _handed_on(load))
    return of_stages + load.micro_batches * head_seconds(load)


def _of_stage(load: Workload, attention: float) -> float:
    """A micro-batch's seconds in the layers of a pipeline stage."""
    return (load.model.layers * attention + layers_seconds(load)) / load.pipeline


def host_copies(load: Workload, stage: float, computed: float) -> Copies:
    """Return the copies of a step, given the seconds of a micro-batch and of all computing.

    What is saved leaves behind the forward, a quarter of a recomputed layer's time. Inputs come
    back beside the projections behind attention's backward, its results ahead of the rest of a
    layer. Megatron's optimizer waits for its gradients and is waited for; DeepSpeed's copies go
    along with the backward.
    """
    rate = load.cluster.host_rate
    one_way, inputs = hosted_activations(load) / rate, hosted_inputs(load) / rate
    exposed = max(0.0, one_way - stage / 4) + max(0.0, one_way - inputs - stage * 3 / 4)
    exposed += max(0.0, inputs - min(stage * 3 / 4, _behind_attention(load)))
    states = load.offload * _own(load) / load.shards * (load.gradient_bytes + load.element_bytes)
    waited = max(0.0, states / rate - computed) if load.zero3 else states / rate
    batches = load.micro_batches
    return Copies(2 * one_way * batches + states / rate, exposed * batches + waited)


def _behind_attention(load: Workload) -> float:
    """A micro-batch's seconds in a stage's gradients of the projections before attention."""
    model, part = load.model, load.model.parts.get("attention")
    if part is None:
        return math.inf  # inputs come back at once
    before = part.parameters - model.hidden * model.heads * model.value_head_dim
    rate = load.cluster.linear_rate * (load.cluster.fp8_speedup if load.fp8 else 1)
    return part.count / load.pipeline * 4 * before * load.local_tokens / load.tensor / rate


def model_flops(load: Workload) -> float:
    """Return the FLOPs of a sequence that MFU counts: 3 x forward, visible pairs, no recompute."""
    return step_flops(load.model, load.tokens, visible_pairs(load.ring.mask, load.tokens))


def head_seconds(load: Workload) -> float:
    """Return the seconds of a micro-batch's losses."""
    of_head = load.head_products if load.chunked_loss else 3
    heads = 2 * (1 + load.model.mtp) * load.model.head_parameters
    return load.local_tokens / load.tensor * heads * of_head / load.cluster.linear_rate


def layers_seconds(load: Workload) -> float:
    """Return the seconds of a micro-batch in all layers, without attention's plans.

    Products, the numbers that are saved, written and read again in every pass, and messages, which
    wait for each other.
    """
    machine, tokens = load.cluster, load.local_tokens / load.tensor
    rate = machine.linear_rate * (machine.fp8_speedup if load.fp8 else 1)
    seconds = 0.0
    for name, part in load.model.parts.items():
        # In forwards, of which the backward counts for two.
        again = _MODULES.get(name) in load.selective or (name == "mlp" and load.mlp_chunks > 1)
        times = 4 if load.recompute or again else 3
        times += name == "mlp" and load.recompute and load.mlp_chunks > 1 and load.replays_mlps
        filled = _filled(load, part) if name == "experts" else 1.0
        products = part.forward_flops / filled / rate
        moved = 2 * part.saved * load.element_bytes / machine.memory_rate
        seconds += part.count * times * tokens * (products + moved)
        seconds += part.count * (times - 1) * _exchanged(load, name, part)
    return seconds + load.model.layers * _tensor_parallel(load)


def _filled(load: Workload, part: Part) -> float:
    """The share of the rows of experts' products that are tokens: each has whole tiles of rows."""
    rows = load.local_tokens * load.expert * part.chosen / part.experts
    return rows / (math.ceil(rows / _BLOCK) * _BLOCK)


def _exchanged(load: Workload, name: str, part: Part) -> float:
    """Seconds of the all-to-alls of one layer in a pass: of experts, or of heads for tokens."""
    machine, ranks = load.cluster, load.expert if name == "experts" else load.context
    if ranks == 1 or not part.exchanged:
        return 0.0
    sent = load.local_tokens / load.tensor * part.exchanged * load.element_bytes
    in_node = min(ranks, max(1, machine.gpus_per_node // load.tensor))
    across = sent * (ranks - in_node) / ranks
    within = sent * (in_node - 1) / ranks / machine.within_rate
    return max(within, across * machine.gpus_per_nic / machine.nic_rate)


def _tensor_parallel(load: Workload) -> float:
    """Gathers and scatters of activations in one layer, which wait for each other.

    Four forward, as many when it is recomputed, and six backward, of n·hidden·(T-1)/T each; without
    sequence parallelism four sums of twice the bytes, and two for what is recomputed.
    """
    count = 4 + (4 if load.recompute else 0) + (6 if load.sequence_parallel else 4)
    size = load.local_tokens * load.model.hidden * load.element_bytes
    return count * size * (load.tensor - 1) / load.tensor / load.cluster.within_rate


def _handed_on(load: Workload) -> float:
    """Seconds in which a micro-batch goes to the next stage and its gradient comes back."""
    if load.pipeline == 1:
        return 0.0
    machine, shared = load.cluster, load.tensor if load.sequence_parallel else 1
    size = load.local_tokens * load.model.hidden * load.element_bytes / shared
    near = load.gpus <= machine.gpus_per_node
    rate = machine.within_rate if near else machine.nic_rate / machine.gpus_per_nic
    return 2 * load.virtual * size / rate


def weights_seconds(load: Workload, hidden_behind: float) -> float:
    """Gradients and weights on the links as far as computing does not hide them; the optimizer."""
    machine, ranks, own = load.cluster, load.shards, _own(load)
    if ranks == 1:
        return 0.0
    gathers = (3 if load.recompute else 2) if load.zero3 else 1
    # Gradients are scattered and weights gathered; otherwise gradients are scattered and gathered.
    returning = gathers * load.element_bytes if load.sharded else load.gradient_bytes
    moved = own * (load.gradient_bytes + returning) * (ranks - 1) / ranks
    within = load.gpus <= machine.gpus_per_node
    rate = machine.within_rate if within else machine.nic_rate / machine.gpus_per_nic
    updated = (1 - load.offload) * own / (ranks if load.sharded else 1)
    return max(0.0, moved / rate - hidden_behind) + _UPDATE_BYTES * updated / machine.memory_rate


def _own(load: Workload) -> float:
    """The parameters of a rank, as if stages had as many."""
    experts = load.model.expert_parameters
    return (load.model.parameters - experts + experts / load.expert) / (load.tensor * load.pipeline)
