"""The memory of one GPU in a training step, counted part by part, at its two peaks."""

from dataclasses import dataclass

from megatron_burst.tools.plan import timing
from megatron_burst.tools.plan.workload import Cluster, Workload

GIB = 2**30
_USABLE = 0.92  # of the device: the rest is for CUDA, NCCL and what the allocator cannot use
_MOMENT_BYTES = 8  # of a parameter: two in float32; beside weights of 16 bits also a float32 copy
_LOGIT_BYTES = 6  # of all logits at once: bfloat16 and float32, forward or backward


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # weights of other ranks and their gradients, while they are used (ZeRO-3)
    inputs: int  # what is stored of all layers until their backward
    saved: int  # results of attention that are not recomputed
    layer: int  # the tensors of the layer that is at work, and its fragments
    loss: int  # logits

    @property
    def states(self) -> int:
        """What is there between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The larger of two peaks: the loss, when no layer is at work, or a layer's backward."""
        stored = self.inputs + self.saved
        return self.states + self.gathered + stored + max(self.layer, self.loss)

    def fits(self, cluster: Cluster) -> bool:
        """Say whether it leaves room on a GPU for what is not counted."""
        return self.total <= _USABLE * cluster.memory


def predict(load: Workload, working_set: float) -> Memory:
    """Predict the peak of a step.

    Args:
        load: the step.
        working_set: the memory of a layer at work over the tensors counted here.
    """
    model, tensor, e = load.model, load.tensor, load.element_bytes
    own, ranks = model.parameters // tensor, load.data * load.context
    shards = ranks if load.zero3 else 1
    tokens = load.local_tokens
    stored = tokens * model.hidden * e // tensor if load.recompute else _saved(load)
    fraction = load.config.recompute_fraction
    optimizer = own * (_MOMENT_BYTES + (4 if e == 2 else 0))
    share = 0.0 if fraction is None or not load.recompute else 1 - fraction
    result = tokens * load.heads_of_a_rank * (model.head_dim * e + 4)
    return Memory(
        weights=own * e // shards,
        gradients=0 if load.offload and load.zero3 else own * load.gradient_bytes // shards,
        optimizer=0 if load.offload else optimizer // (ranks if load.sharded else 1),
        gathered=_gathered(load) if load.zero3 and ranks > 1 else 0,
        inputs=model.layers * stored,
        saved=int(model.layers * result * share),
        layer=int(working_set * _working_set(load)),
        loss=load.loss_bytes
        if load.chunked_loss
        else tokens * model.vocabulary // tensor * _LOGIT_BYTES,
    )


def _gathered(load: Workload) -> int:
    """Two layers, one used and one on its way, the embedding and the head; with gradients."""
    model = load.model
    return 2 * load.element_bytes * (2 * model.layer_parameters + 2 * model.head_parameters)


def _saved(load: Workload) -> int:
    """What a layer saves for its backward: inputs of norms, products, rotary, attention, MLP."""
    return load.local_tokens * load.element_bytes * (_around_mlp(load) + _mlp(load)) // load.tensor


def _around_mlp(load: Workload) -> int:
    """Elements of a token: both norms and sums, q and k before and after rotary, v, the output."""
    model = load.model
    attention = model.head_dim * (3 * model.heads + 3 * model.kv_heads)
    return 5 * model.hidden + attention


def _mlp(load: Workload) -> int:
    """Elements of a token: the first product, and what the activation makes of it."""
    return ((2 if load.model.gated else 1) + 1) * load.model.ffn


def _working_set(load: Workload) -> int:
    """The tensors of one layer in its backward: at its MLP or, when that is done, at attention."""
    a_token = load.local_tokens * load.element_bytes
    gathered = a_token * load.model.hidden if load.tensor > 1 else 0
    at_mlp = a_token * (_around_mlp(load) + 2 * _mlp(load)) // load.tensor
    at_attention = a_token * _around_mlp(load) // load.tensor + _attention(load)
    return gathered + max(at_mlp, at_attention)


def _attention(load: Workload) -> int:
    """Of a backward: the buffers of the plan, and float32 sums of dQ, dK and dV."""
    shape = load.shape
    sizes = shape.item_bytes()
    backward = timing.plans(load)[1]
    buffers = max(sum(sizes[kind] for kind, _ in plan.largest_arrivals) for plan in backward)
    heads = shape.query_heads * shape.head_dim
    heads += shape.kv_heads * (shape.head_dim + shape.value_head_dim)
    return buffers + 4 * shape.tokens * heads
