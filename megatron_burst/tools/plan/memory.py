"""The memory of one GPU in a training step, counted part by part, at its two peaks."""

from dataclasses import dataclass
from math import ceil

from megatron_burst.tools.plan import timing
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.workload import Workload

GIB = 2**30
_USABLE = 0.92  # of the device: the rest is for CUDA, NCCL and what the allocator cannot use
_MOMENT_BYTES = 8  # of a parameter: two in float32; beside weights of 16 bits also a float32 copy
_LOGIT_BYTES = 6  # of all logits at once: bfloat16 and float32, forward or backward


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

    @property
    def total(self) -> int:
        """The larger of two peaks: the loss, when no layer is at work, or a layer's backward."""
        states = self.weights + self.gradients + self.optimizer + self.gathered
        return states + self.inputs + self.saved + max(self.layer, self.loss)


def usable(cluster: Cluster) -> float:
    """Return the bytes of a GPU that may be counted."""
    return _USABLE * cluster.memory


def predict(load: Workload) -> Memory:
    """Predict the peak."""
    stages = {0, load.pipeline - 1}
    return max((_of_stage(load, stage) for stage in stages), key=lambda m: m.total)


def states(load: Workload) -> int:
    """Return the bytes of weights, gradients and optimizer, the least that a way needs."""
    return sum(_states(load, load.pipeline - 1))


def _states(load: Workload, stage: int) -> tuple[int, int, int]:
    """Of weights, gradients and optimizer, each."""
    own, of_experts = _own(load, stage)
    ranks = load.shards if load.zero3 else 1
    weights, gradients = own * load.element_bytes // ranks, own * load.gradient_bytes // ranks
    if load.offload:
        return weights, 0 if load.zero3 else gradients, 0
    wide = _MOMENT_BYTES + (4 if load.element_bytes == 2 else 0)
    spread = load.shards if load.sharded else 1
    # Experts' are spread over the ranks that have the same experts.
    numbers = (own - of_experts) / spread + of_experts / max(1, spread // load.expert)
    return weights, gradients, int(wide * numbers)


def _of_stage(load: Workload, stage: int) -> Memory:
    model, tensor, e, tokens = load.model, load.tensor, load.element_bytes, load.local_tokens
    weights, gradients, optimizer = _states(load, stage)
    fraction, (heads, _) = load.config.recompute_fraction, load.heads
    saved = 0.0 if fraction is None or not load.recompute else 1 - fraction
    kept = 0.0 if load.config.recompute_offload else saved / load.pipeline * _in_flight(load, stage)
    logits = tokens * model.vocabulary // tensor * _LOGIT_BYTES
    of_loss = load.loss_bytes if load.chunked_loss else logits
    sizes = {name: part.parameters for name, part in model.parts.items()}
    used = max(sizes.values()) + sizes.get("attention", 0)
    # Of ZeRO-3, with gradients: a layer that is used, one on its way, the embedding and the head.
    others = 2 * e * (2 * used + 2 * model.head_parameters)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=others if load.zero3 and load.shards > 1 else 0,
        inputs=int(_stored(load) * _in_flight(load, stage) / load.pipeline),
        saved=int(model.layers * tokens * heads * (model.value_head_dim * e + 4) * kept),
        layer=_working_set(load),
        loss=of_loss if stage == load.pipeline - 1 else 0,
    )


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


def _in_flight(load: Workload, stage: int) -> float:
    """How many micro-batches wait for their backward on a stage, under 1F1B or interleaved."""
    waiting = float(load.pipeline - stage)
    if load.virtual > 1:  # as many as a warm-up has, in parts of a stage
        warm_up = (load.virtual - 1) * load.pipeline + 2 * (load.pipeline - stage) - 1
        waiting = warm_up / load.virtual
    return min(waiting, load.micro_batches)


def _stored(load: Workload) -> int:
    """Of all layers until their backward: the input where they are recomputed, or what they save.

    Attention and the MLP after it are one layer there, other kinds one each.
    """
    model, a_token = load.model, load.local_tokens * load.element_bytes
    if load.offload_inputs:
        return 2 * a_token * model.hidden // load.tensor  # one that is used, one on its way
    if load.recompute:
        layers = max(model.layers, sum(p.count for p in model.parts.values()) - model.layers)
        return layers * a_token * model.hidden // (load.tensor if load.sequence_parallel else 1)
    return int(a_token * sum(_saved(load, name) * p.count for name, p in model.parts.items()))


def _saved(load: Workload, name: str) -> float:
    """Numbers of a token that a rank saves of a layer that is not recomputed whole."""
    model, part, modules = load.model, load.model.parts[name], load.selective
    # Without sequence parallelism every rank has all of what norms and sums see.
    around = (3 if name == "attention" else 2) * model.hidden
    inside = part.saved - around
    if name == "attention" and "core_attn" in modules:
        inside -= model.heads * model.value_head_dim
    if name == "mlp" and "mlp" in modules or name == "experts" and "moe" in modules:
        inside = 0
    elif name == "experts" and "moe_act" in modules:
        inside -= inside // (3 if model.gated else 2)
    if "layernorm" in modules:
        around -= model.hidden
    return around / (load.tensor if load.sequence_parallel else 1) + inside / load.tensor


def _working_set(load: Workload) -> int:
    """The tensors of one layer in its backward: at its MLP or, when that is done, at attention.

    There they are the buffers of its plan, and float32 sums of dQ, dK and dV; where it cuts its
    heads in chunks, those of one, with copies of what it reads, and what the sums before became.
    """
    a_token, shape = load.local_tokens * load.element_bytes, load.ring.shape
    parts = load.model.parts
    around = parts["attention"].saved + 2 * load.model.hidden if "attention" in parts else 0
    sizes = shape.item_bytes()
    buffers = max(sum(map(sizes.__getitem__, each)) for each in timing.buffers(load.ring))
    sums = shape.query_heads * shape.head_dim
    sums += shape.kv_heads * (shape.head_dim + shape.value_head_dim)
    at_attention = a_token * around // load.tensor + buffers + 4 * shape.tokens * sums
    if load.head_chunks > 1:
        read = sums + 2 * shape.query_heads * shape.value_head_dim
        joined = (load.head_chunks - 1) * sums
        at_attention += shape.tokens * shape.element_bytes * (read + joined)
    gathered = a_token * load.model.hidden if load.tensor > 1 else 0
    others = {
        n: 2 * (p.saved - 2 * load.model.hidden) for n, p in parts.items() if n != "attention"
    }
    if "mlp" in others:
        others["mlp"] = ceil(others["mlp"] / load.mlp_chunks)
    at_mlp = a_token * (around + max(others.values(), default=0)) // load.tensor
    return gathered + max(at_mlp, int(load.cluster.working_set * at_attention))
