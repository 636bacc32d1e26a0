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
    def total(self) -> int:
        """The larger of two peaks: the loss, when no layer is at work, or a layer's backward."""
        states = self.weights + self.gradients + self.optimizer + self.gathered
        return states + self.inputs + self.saved + max(self.layer, self.loss)

    def fits(self, cluster: Cluster) -> bool:
        """Say whether it leaves room on a GPU for what is not counted."""
        return self.total <= _USABLE * cluster.memory


def predict(load: Workload, working_set: float) -> Memory:
    """Predict the peak of a step.

    Args:
        load: the step.
        working_set: the memory of a layer at work over the tensors counted here.
    """
    model, tensor, e, tokens = load.model, load.tensor, load.element_bytes, load.local_tokens
    own, ranks = model.parameters // tensor, load.data * load.context
    shards = ranks if load.zero3 else 1
    fraction, (heads, _) = load.config.recompute_fraction, load.heads
    saved = 0.0 if fraction is None or not load.recompute else 1 - fraction
    # Of ZeRO-3, with gradients: a layer that is used, one on its way, the embedding and the head.
    others = 2 * e * (2 * model.layer_parameters + 2 * model.head_parameters)
    all_logits = tokens * model.vocabulary // tensor * _LOGIT_BYTES
    return Memory(
        weights=own * e // shards,
        gradients=0 if load.offload and load.zero3 else own * load.gradient_bytes // shards,
        optimizer=0
        if load.offload
        else own * (_MOMENT_BYTES + (4 if e == 2 else 0)) // (ranks if load.sharded else 1),
        gathered=others if load.zero3 and ranks > 1 else 0,
        inputs=model.layers * _stored(load),
        saved=int(model.layers * tokens * heads * (model.head_dim * e + 4) * saved),
        layer=int(working_set * _working_set(load)),
        loss=load.loss_bytes if load.chunked_loss else all_logits,
    )


def _elements(load: Workload) -> tuple[int, int]:
    """What a layer saves of a token for its backward: around its MLP, and in it.

    Both norms and sums, q and k before and after rotary, v, the output; the MLP's first product,
    and what the activation makes of it.
    """
    model = load.model
    attention = model.head_dim * (3 * model.heads + 3 * model.kv_heads)
    return 5 * model.hidden + attention, (3 if model.gated else 2) * model.ffn


def _stored(load: Workload) -> int:
    """Of a layer until its backward: its input where it is recomputed, or all that it saves."""
    elements = load.model.hidden if load.recompute else sum(_elements(load))
    return load.local_tokens * load.element_bytes * elements // load.tensor


def _working_set(load: Workload) -> int:
    """The tensors of one layer in its backward: at its MLP or, when that is done, at attention.

    There they are the buffers of its plan, and float32 sums of dQ, dK and dV.
    """
    a_token, shape = load.local_tokens * load.element_bytes, load.ring.shape
    around, mlp = _elements(load)
    sizes = shape.item_bytes()
    buffers = max(sum(map(sizes.__getitem__, each)) for each in timing.buffers(load.ring))
    sums = shape.query_heads * shape.head_dim
    sums += shape.kv_heads * (shape.head_dim + shape.value_head_dim)
    at_attention = a_token * around // load.tensor + buffers + 4 * shape.tokens * sums
    gathered = a_token * load.model.hidden if load.tensor > 1 else 0
    return gathered + max(a_token * (around + 2 * mlp) // load.tensor, at_attention)
