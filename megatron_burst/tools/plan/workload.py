"""What is predicted: a model, the machines it runs on and how it is spread over them, as values."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_burst.config import Algorithm, BurstConfig, LayoutName
from megatron_burst.plans.balance.balanced import balanced
from megatron_burst.plans.choice.cost import LatentShape, Shape
from megatron_burst.plans.choice.degree import degrees
from megatron_burst.plans.choice.head_chunks import choose_head_chunks
from megatron_burst.plans.choice.head_parallel import exchanged
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.schedules.topology import Grid, choose_grid
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.model import Model
from megatron_burst.tools.plan.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What the plans of a layer's attention follow from."""

    config: BurstConfig
    tokens: int  # of a sequence
    mask: Mask
    nodes: tuple[int, ...]  # of each rank
    shape: Shape  # of a rank's tensors
    machine: Cluster
    beside: int  # GPUs of a node that are in the same place of their rings
    local: int  # context-parallel ranks of a node, of all rings
    heads: int  # ranks of an all-to-all over heads

    @property
    def grid(self) -> Grid:
        """Of the ranks."""
        return choose_grid(self.config.shape_of_rings, self.nodes)[0]

    @cached_property
    def layout(self) -> Layout:
        """Which tokens the ranks hold."""
        if self.config.layout is LayoutName.BALANCED and self.mask.documents:
            queries_a_key = self.shape.query_heads // self.shape.kv_heads
            return balanced(self.mask, self.tokens, self.nodes, queries_a_key).layout
        return make_layout(self.config, self.tokens, len(self.nodes))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of training."""

    model: Model
    cluster: Cluster
    gpus: int
    tensor: int  # tensor-parallel size
    tokens: int  # of a sequence
    config: BurstConfig
    context: int
    pipeline: int = 1  # stages
    virtual: int = 1  # parts of a stage, interleaved
    group: int = 1  # micro-batches that a part takes in turn, as many as stages at the least
    expert: int = 1  # ranks that the experts are spread over
    expert_tensor: int = 1  # ranks that share out each expert
    gathers_tokens: bool = False  # experts' dispatcher: all tokens to all their ranks
    hides_experts: bool = False  # messages of experts, behind another micro-batch's computing
    sequences: int = 1  # of a step, over all data-parallel ranks
    micro: int = 1  # sequences of a micro-batch
    causal: bool = True
    window: int | None = None  # keys that a query sees to the left of itself
    documents: tuple[int, ...] | None = None  # their borders
    recompute: bool = True  # every layer is recomputed in the backward
    selective: frozenset[str] = frozenset()  # or these parts of it
    chunked_loss: bool = True
    loss_bytes: int = 512 * 2**20  # what the chunked loss takes
    head_products: int = 4  # of a token with the LM head, under the chunked loss
    zero3: bool = False  # parameters and gradients are sharded over all ranks
    sharded: bool = True  # the optimizer's states are, by the distributed optimizer
    gradient_bytes: int = 4  # of an element of the gradients that are summed
    hides_gradients: bool = True  # their messages, behind computing
    hides_weights: bool = True  # and those of weights
    optimizer_bytes: int = 12  # of a parameter on the GPU: moments, and a float32 copy of 16 bits
    offload: float = 0.0  # the share of the optimizer that is in the host's memory
    recompute_offload: bool = False  # what recompute saves is: layers' inputs, attention's results
    mlp_chunks: int = 1  # pieces of the tokens that the MLP computes one after the other
    replays_mlps: bool = False  # in chunks, because layers are behind them in checkpoints
    sequence_parallel: bool = True  # norms and sums are spread over the tensor-parallel ranks
    fp8: bool = False  # matrix products of the layers, not of the LM head or of attention
    element_bytes: int = 2

    def __post_init__(self) -> None:
        """Check that the ranks fit on the nodes, and that everything divides."""
        sizes = (
            f"--tensor-model-parallel-size {self.tensor} x --context-parallel-size {self.context}"
        )
        if self.pipeline > 1:
            sizes += f" x --pipeline-model-parallel-size {self.pipeline}"
        ranks, node = self.context * self.tensor, min(self.cluster.gpus_per_node, self.gpus)
        if self.gpus % (ranks * self.pipeline):
            raise ValueError(f"{self.gpus} GPUs do not divide over {sizes}; {_of(self.gpus)}")
        if node % self.tensor or (ranks % node and node % ranks):
            raise ValueError(
                f"nodes of {node} GPUs are not filled evenly by {sizes}; in a node {_of(node)}"
            )
        if self.gpus % self.ranks_per_host:
            raise ValueError(f"{self.gpus} GPUs are not hosts of {self.ranks_per_host} each")
        if node % self.beside or self.context % self.head_parallel:
            raise ValueError(
                f"--burst-head-parallel-size {self.head_parallel} needs as many ranks of a node, "
                f"of {node // self.tensor}, or of several whole ones"
            )
        self._check_model()
        multiple = self.context * math.lcm(1 + (self.context > 1), self.row_shards)
        if self.tokens % multiple:
            raise ValueError(
                f"--seq-length {self.tokens} does not divide over {sizes}: a multiple of "
                f"{multiple} does"
            )
        if self.sequences % (multiple := self.data * self.micro):
            raise ValueError(
                f"--global-batch-size {self.sequences} does not divide over {self.data} "
                f"data-parallel ranks of {self.micro} sequences a micro-batch; a multiple of "
                f"{multiple} does"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(
                f"{self.virtual} parts of a stage: Megatron wants several stages for them"
            )
        group, batches = max(self.group, self.pipeline), self.micro_batches
        if self.virtual > 1 and (group > batches or 0 < batches % group < self.pipeline):
            raise ValueError(
                f"--global-batch-size {self.sequences}: {batches} micro-batches of a rank do not go"
                f" in groups of {group} through parts of stages; multiples of {group} do"
            )

    def _check_model(self) -> None:
        """Check that heads go with KV heads, and divide over their ranks, as experts do."""
        heads, kv_heads = self.model.heads, self.model.kv_heads
        if heads % kv_heads or max(kv_heads, self.tensor) % min(kv_heads, self.tensor):
            raise ValueError(
                f"--num-query-groups {kv_heads}: it has to divide --num-attention-heads {heads}, "
                f"and --tensor-model-parallel-size {self.tensor} or be divided by it"
            )
        experts = max((part.experts for part in self.model.parts.values()), default=1)
        if experts > 1 and self.tensor > 1 and not self.sequence_parallel:
            raise ValueError(
                f"experts over {self.tensor} tensor-parallel ranks: Megatron refuses them in their "
                "first forward without --sequence-parallel"
            )
        ranks, beside = self.shards * self.tensor, self.expert_tensor
        groups = f"groups of --expert-tensor-parallel-size {beside}"
        for kind, size, what, count in (
            ("tensor-model", self.tensor, "attention heads", heads),
            ("expert-model", self.expert, "experts", experts),
            ("expert-tensor", beside, "ranks of a stage", ranks),
            ("expert-model", self.expert, groups, ranks // beside),
        ):
            if count % size:
                text = f"{count} {what} do not divide over {size}; {_of(count)}"
                raise ValueError(f"--{kind}-parallel-size: {text}")

    @property
    def data(self) -> int:
        """The data-parallel size."""
        return self.gpus // (self.tensor * self.context * self.pipeline)

    @property
    def micro_batches(self) -> int:
        """Of a data-parallel rank in a step."""
        return self.sequences // (self.data * self.micro)

    @property
    def shards(self) -> int:
        """Over how many ranks the optimizer's states of a parameter are spread."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """How many ranks have the same part of the same experts."""
        return self.shards * self.tensor // (self.expert * self.expert_tensor)

    @property
    def local_tokens(self) -> int:
        """Of a context-parallel rank in a micro-batch."""
        return self.micro * self.tokens // self.context

    @property
    def row_shards(self) -> int:
        """Over how many tensor-parallel ranks the rows of hidden states are spread."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def hidden_bytes(self) -> int:
        """Of a micro-batch's hidden states, over those ranks."""
        return self.local_tokens * self.model.hidden * self.element_bytes

    @property
    def heads(self) -> tuple[int, int]:
        """Query and kv heads of a tensor-parallel rank."""
        return self.model.heads // self.tensor, max(self.model.kv_heads // self.tensor, 1)

    @property
    def repeats_attention(self) -> bool:
        """Whether its forward runs again in the backward, or what of it is not kept."""
        return self.recompute or "core_attn" in self.selective

    @property
    def head_parallel(self) -> int:
        """U, over how many ranks the heads are spread; 1 where it is left to the training."""
        ulysses = self.config.algorithm is Algorithm.ULYSSES
        return self.context if ulysses else self.config.head_parallel_size or 1

    @property
    def degrees(self) -> list[int]:
        """The Ulysses degrees that the context-parallel ranks may have."""
        return [1, *degrees(self.nodes, *self.heads)]

    @property
    def nodes(self) -> list[int]:
        """That of each context-parallel rank."""
        return [rank // self.ranks_per_node for rank in range(self.context)]

    @property
    def ranks_per_node(self) -> int:
        """How many context-parallel ranks of one tensor-parallel rank a node holds."""
        return min(self.context, self.cluster.gpus_per_node // self.tensor)

    @property
    def ranks_per_host(self) -> int:
        """How many of the GPUs share a host's memory."""
        return min(self.gpus, self.cluster.gpus_per_host or self.cluster.gpus_per_node)

    @property
    def beside(self) -> int:
        """How many GPUs that follow each other on a node are in the same place of their rings."""
        return self.tensor * min(self.head_parallel, self.ranks_per_node)

    @property
    def head_chunks(self) -> int:
        """Into how many chunks attention cuts a rank's heads."""
        shape = self.shape
        return choose_head_chunks(
            *(self.config, shape.tokens, shape.query_heads, shape.kv_heads),
            is_worth_it=self.context > self.head_parallel and not self.documents,
            has_latents=shape.latents is not None,
        )

    @cached_property
    def ring(self) -> Ring:
        """The ring of a rank, without a fraction that changes no plan: so equal ones are known.

        It runs once for each chunk of the heads.
        """
        size, config, shape = self.head_parallel, self.config, self.shape
        if not (config.layout is LayoutName.SEGMENTED_ZIGZAG and config.cuts_for_recompute):
            config = replace(config, recompute_fraction=None)
        on_a_node = max(1, self.ranks_per_node * self.tensor // self.beside)
        mask = Mask.causal if self.causal else Mask.full
        if (chunks := self.head_chunks) > 1:
            heads, kv_heads = shape.query_heads // chunks, shape.kv_heads // chunks
            shape = replace(shape, query_heads=heads, kv_heads=kv_heads, latents=None)
        return Ring(
            config=config,
            tokens=self.tokens,
            mask=mask(window=self.window, documents=self.documents),
            nodes=tuple(rank // on_a_node for rank in range(self.context // size)),
            shape=shape,
            machine=self.cluster,
            beside=self.beside,
            local=self.ranks_per_node,
            heads=size,
        )

    @cached_property
    def shape(self) -> Shape:
        """Of a rank's tensors in its ring, all heads."""
        size, dims = self.head_parallel, (self.model.head_dim, self.model.value_head_dim)
        given = self.heads, dims, self.element_bytes, self.config.grad_dtype
        shape = Shape.of(self.local_tokens, *given)
        # What repeats core attention alone has none.
        travel = size == 1 and "core_attn" not in self.selective
        if (latents := self.model.latents) and travel:
            up = (sum(dims) - latents.rope) * shape.query_heads * latents.kv
            shape = replace(shape, latents=LatentShape(latents.kv + latents.rope, up))
        return exchanged(shape, size)


def _of(count: int) -> str:
    """Say over what a number divides."""
    divisors = [str(size) for size in range(1, count + 1) if count % size == 0]
    shown = divisors if len(divisors) < 13 else [*divisors[:12], "…"]
    return f"{count} divides over {', '.join(shown)}"
