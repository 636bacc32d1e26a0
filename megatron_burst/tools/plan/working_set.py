"""The tensors of one layer in its backward, as scripts/bench/step_memory.py counts them."""

from megatron_burst.plans.choice.cost import workspace_bytes
from megatron_burst.tools.plan import timing
from megatron_burst.tools.plan.workload import Workload

_HIDDEN = 5  # norms' outputs and gradients as wide as the hidden states, beside the layer's input
_SUM_BYTES = 6  # of a weight of an MLP in chunks: its gradients, summed in float32
_ROTARY_BYTES = 12  # of a number of a head's position embedding


def working_set(load: Workload) -> int:
    """Return the bytes at the layer's MLP, at attention or, under tensor parallelism, between."""
    model, a_token = load.model, load.local_tokens * load.element_bytes
    hidden, around = load.hidden_bytes, load.hidden_bytes // load.row_shards
    kept = a_token * between_projections(load)
    at_mlp = _HIDDEN * around + (kept + _inside_others(load)) // load.tensor
    # In chunks, the MLP's output is not made again.
    at_attention = (_HIDDEN - (load.mlp_chunks > 1)) * around + kept // load.tensor
    most = max(at_mlp, at_attention + _attention(load))
    most += load.local_tokens * model.head_dim * _ROTARY_BYTES
    if load.tensor == 1:
        return int(most)
    gathered = hidden if load.sequence_parallel else 0
    # A product that is not summed over the ranks yet, and q, k and v twice, or those of all ranks.
    fused = a_token * (2 * model.heads + model.kv_heads) * model.head_dim
    whole = a_token * of_all_ranks(load)
    is_kept = whole * model.norms_heads
    summed = max(hidden + max(fused // load.tensor, whole - is_kept), 2 * whole - is_kept)
    summed += (_HIDDEN - 1) * around + kept // load.tensor
    return int(gathered + max(most, summed))


def of_all_ranks(load: Workload) -> int:
    """Numbers of a token: q, k and v of all tensor-parallel ranks, where kv heads are fewer."""
    model = load.model
    is_gathered = model.kv_heads < load.tensor and not model.latents
    return (model.heads + 2 * model.kv_heads) * model.head_dim * is_gathered


def between_projections(load: Workload) -> int:
    """Numbers of a token in attention: q, k, v and the output."""
    model = load.model
    if model.latents:
        return model.parts["attention"].saved - 3 * model.hidden if model.layers else 0
    kv_heads, whole = max(model.kv_heads, load.tensor), of_all_ranks(load) * load.tensor
    numbers = (model.heads + kv_heads) * (model.head_dim + model.value_head_dim)
    if model.norms_heads:  # of the tensor that q, k and v lie in, and of q apart for grouped heads
        apart = model.heads * (model.kv_heads < model.heads)
        numbers += whole or (model.heads + 2 * kv_heads) * model.head_dim
        numbers += apart * model.head_dim
    return numbers


def _inside_others(load: Workload) -> int:
    """Bytes inside the MLP, experts or recurrence that has most."""
    a_token, most = load.local_tokens * load.element_bytes, 0.0
    for name, part in load.model.parts.items():
        if name == "attention":
            continue
        within = part.saved - 2 * load.model.hidden + from_others(load, name)
        inside = part.at_work * within * a_token
        if name == "mlp" and load.row_shards > 1:  # its output's gradient is gathered
            at_second = part.at_second * within * a_token + load.tensor * load.hidden_bytes
            inside = max(inside, at_second)
        if name == "experts" and load.gathers_tokens:
            inside += load.expert * load.expert_tensor * load.hidden_bytes
        if name == "mlp" and load.mlp_chunks > 1:
            inside = inside / load.mlp_chunks + _SUM_BYTES * part.parameters
        most = max(most, inside)
    return int(most)


def from_others(load: Workload, name: str) -> int:
    """Numbers of a token that the ranks of one expert have beside their own, of what it takes."""
    return (load.expert_tensor - 1) * load.model.parts[name].exchanged if name == "experts" else 0


def _attention(load: Workload) -> int:
    """The buffers of its plan, tiles' sums of dQ, dK and dV, a kernel's results and workspace.

    Of a chunk of heads; where there are several, the gradients of all, and half of a chunk's dO.
    """
    shape, buffers = load.ring.shape, timing.buffer_bytes(load.ring)
    queries = shape.query_heads * shape.head_dim
    kv = shape.kv_heads * (shape.head_dim + shape.value_head_dim)
    is_one_tile = len(load.ring.nodes) == 1 and not (
        load.documents or load.config.cuts_for_recompute
    )
    of_sums = 0 if is_one_tile else 4 * (queries + kv)
    of_tile = shape.element_bytes * (queries + 1.5 * kv)
    of_tile += workspace_bytes(shape.query_heads, shape.kv_heads, shape.head_dim)
    total = load.cluster.working_set * (buffers + shape.tokens * (of_sums + of_tile))
    if (chunks := load.head_chunks) > 1:
        gradients = chunks * (queries + kv) + shape.query_heads * shape.value_head_dim / 2
        total += shape.tokens * shape.element_bytes * gradients
    return int(total)
