"""The time of a training step: attention by its plans, all else by FLOPs and bytes."""

import math
from dataclasses import replace
from typing import NamedTuple

from megatron_burst.plans.choice.cost import visible_pairs
from megatron_burst.tools.flops import step_flops
from megatron_burst.tools.model import Part
from megatron_burst.tools.plan.memory import hosted_activations
from megatron_burst.tools.plan.scans import taken_by_scans
from megatron_burst.tools.plan.timing import Pass, attention_passes, together
from megatron_burst.tools.plan.working_set import of_all_ranks
from megatron_burst.tools.plan.workload import Workload

_BLOCK = 128  # rows of a tile of a grouped matrix product
_UPDATE_BYTES = 32  # read and written of a parameter by the optimizer
_MODULES = {"mlp": "mlp", "experts": "moe"}  # --recompute-modules by kinds of layers


class Copies(NamedTuple):
    """Seconds of a step's copies to the host's memory and back, and of updates there."""

    seconds: float = 0.0
    exposed: float = 0.0  # in which no GPU computes


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
    computed = computing_seconds(load, attention.device, attention.host)
    copies = host_copies(load, _of_stage(load, attention.device, attention.host), computed)
    seconds = computed + weights_seconds(load, computed) + copies.exposed
    rate = load.sequences * load.tokens / load.gpus / seconds
    mfu = rate * model_flops(load) / load.tokens / load.cluster.peak
    return Prediction(attention, copies, seconds, rate, mfu)


def bounds(load: Workload, time: Prediction) -> dict[str, float]:
    """Return what a step waits for, as shares of its time that add up to 1."""
    free = replace(load, cluster=replace(load.cluster, within_rate=math.inf, nic_rate=math.inf))
    computing = computing_seconds(free, time.attention.kernels + time.attention.sums)
    idle = (load.pipeline - 1) / load.virtual / load.micro_batches
    bubble = (computing - load.micro_batches * head_seconds(load)) * idle / (1 + idle)
    attention = time.attention
    launched = computing_seconds(load, attention.device, attention.host)
    host = time.copies.exposed + launched - computing_seconds(load, attention.device)
    seconds = {"computing": computing - bubble, "pipeline bubble": bubble}
    seconds |= {"host": host, "optimizer": _update_seconds(load)}
    seconds["messages"] = time.seconds - sum(seconds.values())
    return {name: value / time.seconds for name, value in seconds.items()}


def computing_seconds(load: Workload, attention: float, host: float = 0.0) -> float:
    """Return the seconds of all micro-batches, given the GPU's and host's of attention."""
    stage = _of_stage(load, attention, host)
    # One forward and one backward at a time: the others wait while the first fills the stages.
    filling = (load.pipeline - 1) / load.virtual
    of_stages = (load.micro_batches + filling) * (stage + _handed_on(load))
    return of_stages + load.micro_batches * head_seconds(load)


def _of_stage(load: Workload, attention: float, host: float) -> float:
    """A micro-batch's seconds in the layers of a pipeline stage.

    The host runs ahead from layer to layer: what it launches of attention is waited for where that
    takes longer than all that the GPU has to do. Its other calls are not counted.
    """
    of_gpu = load.model.layers * attention + layers_seconds(load)
    return max(of_gpu, load.model.layers * host) / load.pipeline


def host_copies(load: Workload, stage: float, computed: float) -> Copies:
    """Return the copies of a step, given the seconds of a micro-batch and of all computing.

    What is saved leaves behind the forward, a quarter of a recomputed layer's time. Inputs come
    back beside the projections behind attention's backward, its results ahead of the rest of a
    layer. Megatron's optimizer waits for its gradients and is waited for; DeepSpeed's copies go
    along with the backward. The host's processors share out the updates of its GPUs.
    """
    rate = load.cluster.host_rate
    inputs, results = (size / rate for size in hosted_activations(load))
    exposed = max(0.0, inputs + results - stage / 4) + max(0.0, results - stage * 3 / 4)
    exposed += max(0.0, inputs - min(stage * 3 / 4, _behind_attention(load)))
    hosted, batches = load.offload * _updated(load), load.micro_batches
    states = hosted * (load.gradient_bytes + load.element_bytes) / rate
    waited = max(0.0, states - computed) if load.zero3 else states
    updated = load.cluster.update_seconds * hosted * load.ranks_per_host
    copied = 2 * (inputs + results) * batches + states
    return Copies(copied, exposed * batches + waited + updated)


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
    wait for each other. Before the host launches a layer's experts, it waits to hear how many
    tokens came to each.
    """
    machine, tokens = load.cluster, load.local_tokens / load.tensor
    rate = machine.linear_rate * (machine.fp8_speedup if load.fp8 else 1)
    seconds, waited = 0.0, 0.0
    if taken := taken_by_scans(load) if load.context > 1 else 0:
        whole = taken * load.context / (load.context - 1)
        again = 3 if load.recompute else 2  # the backward sends as much as a forward
        seconds += again * _all_to_all(load, whole, load.context, load.tensor)
    for name, part in load.model.parts.items():
        # In forwards, of which the backward counts for two.
        again = _MODULES.get(name) in load.selective or (name == "mlp" and load.mlp_chunks > 1)
        times = 4 if load.recompute or again else 3
        times += name == "mlp" and load.recompute and load.mlp_chunks > 1 and load.replays_mlps
        filled = _filled(load, part) if name == "experts" else 1.0
        products = part.forward_flops / filled / rate
        moved = 2 * part.saved * load.element_bytes / machine.memory_rate
        seconds += part.count * times * tokens * (products + moved)
        if name == "experts":
            waited = part.count * (times - 1) * _exchanged(load, part)
            waited += part.count * times * machine.experts_seconds
    # Experts take tokens as they are spread.
    shared = sum(p.count for n, p in load.model.parts.items() if n not in ("experts", "mtp"))
    seconds += shared * _tensor_parallel(load)
    seconds += load.model.layers * (3 if load.recompute else 2) * _whole_projections(load)
    return max(seconds, waited) if load.hides_experts else seconds + waited


def _filled(load: Workload, part: Part) -> float:
    """The share of the rows of experts' products that are tokens: each has whole tiles of rows."""
    ranks = load.expert * load.expert_tensor / load.tensor
    rows = load.local_tokens * ranks * part.chosen / part.experts
    return rows / (math.ceil(rows / _BLOCK) * _BLOCK)


def _exchanged(load: Workload, part: Part) -> float:
    """Seconds of the all-to-alls of one layer of experts in a pass.

    All ranks of an expert gather what came to each. Without all-to-alls the ranks of all experts
    gather every token, and sums of their results are scattered.
    """
    ranks, beside = load.expert, load.expert_tensor
    if load.gathers_tokens:
        moved = 2 * load.hidden_bytes / load.tensor * (ranks * beside - 1)
        return moved / _ring_rate(load, ranks * beside, 1)
    sent = load.local_tokens / load.tensor * load.element_bytes * part.exchanged
    gathered = (beside - 1) * sent / load.cluster.within_rate
    return _all_to_all(load, sent, ranks, beside) + gathered


def _all_to_all(load: Workload, sent: float, ranks: int, beside: int) -> float:
    """Seconds in which each rank has bytes for all, itself among them; `beside` ranks do alike."""
    machine, in_node = load.cluster, min(ranks, max(1, load.cluster.gpus_per_node // beside))
    across = sent * (ranks - in_node) / ranks
    within = sent * (in_node - 1) / ranks / machine.within_rate
    return max(within, across * machine.gpus_per_nic / machine.nic_rate)


def _tensor_parallel(load: Workload) -> float:
    """Gathers and scatters of activations in attention or an MLP, which wait for each other.

    Two forward, as many when it is recomputed, and three backward, of n·hidden·(T-1)/T each;
    without sequence parallelism two sums of twice the bytes, and one for what is recomputed.
    """
    count = 2 + (2 if load.recompute else 0) + (3 if load.sequence_parallel else 2)
    moved = count * load.hidden_bytes * (load.tensor - 1) / load.tensor
    return moved / load.cluster.within_rate


def _whole_projections(load: Workload) -> float:
    """Seconds in which ranks that share kv heads gather all q, k and v, or scatter gradients."""
    moved = load.local_tokens * load.element_bytes * of_all_ranks(load)
    return moved * (load.tensor - 1) / load.tensor / load.cluster.within_rate


def _handed_on(load: Workload) -> float:
    """Seconds in which a micro-batch goes to the next stage and its gradient comes back."""
    if load.pipeline == 1:
        return 0.0
    machine, near = load.cluster, load.gpus <= load.cluster.gpus_per_node
    rate = machine.within_rate if near else machine.nic_rate / machine.gpus_per_nic
    return 2 * load.virtual * load.hidden_bytes / load.row_shards / rate


def weights_seconds(load: Workload, hidden_behind: float) -> float:
    """Gradients and weights on the links as far as computing does not hide them; the optimizer.

    Those of experts go around the ranks that have the same experts.
    """
    dense, experts = _own(load)
    a_byte = _around(load, dense, load.shards, load.tensor)
    a_byte += _around(load, experts, load.expert_shards, load.expert * load.expert_tensor)
    # Gradients are scattered and weights gathered, or gradients scattered and gathered.
    gathers = (3 if load.recompute else 2) if load.zero3 else 1
    weights = a_byte * gathers * load.element_bytes * load.sharded
    gradients = a_byte * load.gradient_bytes * (1 if load.sharded else 2)
    hidden = gradients * load.hides_gradients + weights * load.hides_weights
    exposed = gradients + weights - min(hidden, hidden_behind)
    return exposed + _update_seconds(load)


def _update_seconds(load: Workload) -> float:
    updated = (1 - load.offload) * _updated(load)
    return _UPDATE_BYTES * updated / load.cluster.memory_rate


def _around(load: Workload, parameters: float, ranks: int, apart: int) -> float:
    """Seconds in which a byte of each goes around so many ranks, each `apart` from the next.

    Once a step, or for every micro-batch where a rank keeps no weights but its own.
    """
    if ranks == 1:
        return 0.0
    moved = parameters * (ranks - 1) / ranks * (load.micro_batches if load.zero3 else 1)
    return moved / _ring_rate(load, ranks, apart)


def _ring_rate(load: Workload, ranks: int, apart: int) -> float:
    """Bytes/s of a ring: a node's ranks of it send on all NICs that are theirs."""
    machine, in_node = load.cluster, max(1, load.cluster.gpus_per_node // apart)
    if ranks <= in_node:
        return machine.within_rate
    return min(machine.within_rate, in_node * machine.nic_rate / machine.gpus_per_nic)


def _own(load: Workload) -> tuple[float, float]:
    """The parameters of a rank, and beside them those of experts, as if stages had as many."""
    model, tensor = load.model, load.tensor
    dense = (model.of_rank(tensor) + model.ends / tensor) / load.pipeline + model.positions
    return dense, model.expert_parameters / (load.expert * load.expert_tensor) / load.pipeline


def _updated(load: Workload) -> float:
    """Of them, those whose optimizer a rank has, on the GPU or on the host."""
    dense, experts = _own(load)
    return dense / load.shards + experts / load.expert_shards if load.sharded else dense + experts
