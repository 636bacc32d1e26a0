"""What is predicted: a model, the machines it runs on and how it is spread over them, as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron_burst.config import (
    Algorithm,
    BurstConfig,
    GradDtype,
    LmHeadConfig,
    LmHeadLoss,
    Topology,
    flags,
)
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk_size import Chunking, Sizes
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.head_parallel import kv_head_copies
from megatron_burst.plans.layout import Layout
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import make_layout
from megatron_burst.plans.topology import Grid, choose_grid
from megatron_burst.tools.flops import Model

type Flags = Mapping[str, Any]  # Megatron's and ours, by name without dashes in front

# Flags that change what would have to be predicted.
_NOT_MODELLED = {
    "num-experts": "experts",
    "multi-latent-attention": "MLA",
    "use-megatron-fsdp": "Megatron-FSDP",
    "dataloader-inter-document-masking": "documents",
    "burst-block-mask": "block masks",
    "fp16": "float16",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes; a rate is what one GPU, link or NIC sustains one way."""

    name: str
    gpus_per_node: int
    memory: float  # bytes of a GPU
    forward_rate: float  # FLOP/s of attention kernels
    backward_rate: float
    linear_rate: float  # FLOP/s of matrix products
    memory_rate: float  # bytes/s of the GPU's memory
    within_rate: float  # bytes/s from a GPU into its node
    nic_rate: float  # bytes/s of a NIC
    gpus_per_nic: int
    contention: float  # seconds of computing lost for each second of messages
    copy_rate: float  # bytes/s that computing loses to the messages a rank sends; infinite on GPUs
    peak: float  # FLOP/s, for the MFU


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of training."""

    model: Model
    cluster: Cluster
    gpus: int
    tensor: int  # tensor-parallel size, with sequence parallelism
    tokens: int  # of a sequence
    config: BurstConfig
    context: int
    sequences: int = 1  # of a step, over all data-parallel ranks
    window: int | None = None  # keys that a query sees, itself included
    recompute: bool = True  # every layer is recomputed in the backward
    chunked_loss: bool = True
    loss_bytes: int = 512 * 2**20  # what the chunked loss takes
    head_products: int = 4  # of a token with the LM head, under the chunked loss
    zero3: bool = False  # parameters and gradients are sharded over all ranks
    sharded: bool = True  # the optimizer's states are, by the distributed optimizer
    gradient_bytes: int = 4  # of an element of the gradients that are summed
    offload: bool = False  # the optimizer's states are in the host's memory
    element_bytes: int = 2

    def __post_init__(self) -> None:
        """Check that the ranks fit on the nodes."""
        if self.gpus % (self.tensor * self.context):
            raise ValueError(
                f"{self.gpus} GPUs do not divide over --tensor-model-parallel-size {self.tensor} x "
                f"--context-parallel-size {self.context}"
            )
        node = min(self.cluster.gpus_per_node, self.gpus)
        ranks = self.context * self.tensor
        if node % self.tensor or (ranks % node and node % ranks):
            raise ValueError(
                f"nodes of {node} GPUs are not filled evenly by --tensor-model-parallel-size "
                f"{self.tensor} x --context-parallel-size {self.context}"
            )
        if node % (self.tensor * self._spread):
            raise ValueError(
                f"--burst-head-parallel-size {self._spread} needs as many ranks of a node, of "
                f"{node // self.tensor}"
            )

    @property
    def data(self) -> int:
        """The data-parallel size."""
        return self.gpus // (self.tensor * self.context)

    @property
    def head_parallel(self) -> int:
        """U, over how many ranks the heads are spread."""
        ulysses = self.config.algorithm is Algorithm.ULYSSES
        return self.context if ulysses else self.config.head_parallel_size

    @property
    def _spread(self) -> int:
        return 1 if self.config.algorithm is Algorithm.ULYSSES else self.head_parallel

    @property
    def local_tokens(self) -> int:
        """Of a context-parallel rank."""
        return self.tokens // self.context

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank of a ring."""
        ring = self.context // self.head_parallel
        return tuple(rank // self.ring_ranks_per_node for rank in range(ring))

    @property
    def ring_ranks_per_node(self) -> int:
        """How many ranks of one ring a node holds."""
        return max(1, self.ranks_per_node // self._spread)

    @property
    def ranks_per_node(self) -> int:
        """How many context-parallel ranks of one tensor-parallel rank a node holds."""
        return min(self.context, self.cluster.gpus_per_node // self.tensor)

    @property
    def rings_beside(self) -> int:
        """How many GPUs that follow each other on a node are in the same place of their rings."""
        return self.tensor * self._spread

    @property
    def grid(self) -> Grid:
        """Of the ranks of one ring."""
        topology = self.config.topology
        if topology is Topology.AUTO and self.config.algorithm is not Algorithm.BURST:
            topology = Topology.FLAT
        return choose_grid(topology, self.nodes)[0]

    @cached_property
    def layout(self) -> Layout:
        """Which tokens the ranks of one ring hold."""
        return make_layout(self.config, self.tokens, self.context // self.head_parallel)

    @property
    def mask(self) -> Mask:
        """Causal, with or without a window."""
        return Mask.causal(window=self.window)

    @cached_property
    def shape(self) -> Shape:
        """Of a rank's tensors in its ring."""
        heads, kv_heads, size = self.heads_of_a_rank, self.kv_heads_of_a_rank, self.head_parallel
        copies = kv_head_copies(heads, kv_heads, size)
        width = self.element_bytes if self.config.grad_dtype is GradDtype.MODEL else 4
        return Shape(
            tokens=self.local_tokens * size,
            query_heads=heads // size,
            kv_heads=kv_heads * copies // size,
            head_dim=self.model.head_dim,
            value_head_dim=self.model.head_dim,
            element_bytes=self.element_bytes,
            gradient_bytes=width,
        )

    @property
    def exchange_bytes(self) -> int:
        """What a rank sends in the all-to-alls of one pass over the heads; 0 without any."""
        size, heads, kv_heads = self.head_parallel, self.heads_of_a_rank, self.kv_heads_of_a_rank
        held = heads + kv_heads * kv_head_copies(heads, kv_heads, size)
        row = 2 * held * self.model.head_dim * self.element_bytes  # of q, k, v and the output
        return self.local_tokens * row * (size - 1) // size

    @property
    def heads_of_a_rank(self) -> int:
        """Query heads of a tensor-parallel rank."""
        return self.model.heads // self.tensor

    @property
    def kv_heads_of_a_rank(self) -> int:
        """Kv heads of a tensor-parallel rank."""
        return max(self.model.kv_heads // self.tensor, 1)


def model_of(given: Flags) -> Model:
    """Read the shape of a model from Megatron's flags."""
    needed = ("num-layers", "hidden-size", "num-attention-heads", "vocab-size")
    if missing := [f"--{name}" for name in needed if name not in given]:
        raise ValueError(f"the model is not known without {', '.join(missing)}")
    hidden, heads = int(given["hidden-size"]), int(given["num-attention-heads"])
    tensor = int(given.get("tensor-model-parallel-size", 1))
    multiple = int(given.get("make-vocab-size-divisible-by", 128)) * tensor
    return Model(
        layers=int(given["num-layers"]),
        hidden=hidden,
        ffn=int(given.get("ffn-hidden-size", 4 * hidden)),
        gated=bool(given.get("swiglu", False)),
        heads=heads,
        kv_heads=int(given.get("num-query-groups", heads)),
        head_dim=int(given.get("kv-channels", hidden // heads)),
        vocabulary=-(-int(given["vocab-size"]) // multiple) * multiple,
        tied=not given.get("untie-embeddings-and-output-weights", False),
    )


def burst_config_of(given: Flags) -> BurstConfig:
    """Read our configuration from the flags; burst where they do not say."""
    return _config_of(BurstConfig, given)


def _config_of[T: (BurstConfig, LmHeadConfig)](config: type[T], given: Flags) -> T:
    names = {flag: flag.name.removeprefix("--") for flag in flags(config)}
    values: dict[str, Any] = {
        flag.field: flag.type(given[name]) for flag, name in names.items() if name in given
    }
    return config(**values)


def loss_chunking(given: Flags) -> Chunking | None:
    """Return the chunks of the loss as training will choose them; None for Megatron's own loss.

    Raises:
        ValueError: they cannot be.
    """
    config = _config_of(LmHeadConfig, given)
    if config.loss is not LmHeadLoss.CHUNKED:
        return None
    model, tensor = model_of(given), int(given.get("tensor-model-parallel-size", 1))
    samples, context = (
        int(given.get(name, 1)) for name in ("micro-batch-size", "context-parallel-size")
    )
    call = Call(chunk_size=config.chunk_size, memory_mb=config.memory_mb)
    element_bytes, gradient_bytes = _widths(given)
    sizes = Sizes(
        tokens=samples * int(given["seq-length"]) // context,
        vocabulary=model.vocabulary // tensor,
        hidden=model.hidden,
        dtype=torch.bfloat16 if element_bytes == 2 else torch.float32,
        ranks=tensor,
        statistics=call.statistics,
        sums_apart=gradient_bytes < 4,  # `main_grad` is too narrow for sums
    )
    return call.chunking(sizes)


def _widths(given: Flags) -> tuple[int, int]:
    """Bytes of an element of weights and activations, and of the gradients that are summed."""
    if not given.get("bf16", False):
        return 4, 4
    return 2, 2 if given.get("grad-reduce-in-bf16", False) else 4


def workload_of(given: Flags, cluster: Cluster, gpus: int) -> Workload:
    """Read a step of training from Megatron's and our flags.

    Raises:
        ValueError: something is missing, is not modelled or does not fit together.
    """
    for name, what in _NOT_MODELLED.items():
        if given.get(name):
            raise ValueError(f"--{name} {given[name]}: {what} cannot be predicted here")
    if int(given.get("pipeline-model-parallel-size", 1)) > 1:
        raise ValueError("--pipeline-model-parallel-size: pipelines cannot be predicted here")
    if "seq-length" not in given:
        raise ValueError("--seq-length is missing")
    granularity = given.get("recompute-granularity", "none")
    _refuse_other_ways(given, granularity)
    window = given.get("window-size")
    left = -1 if window is None else int(str(window).split(",")[0])
    element_bytes, gradient_bytes = _widths(given)
    chunking = loss_chunking(given)
    load = Workload(
        model=model_of(given),
        cluster=cluster,
        gpus=gpus,
        tensor=int(given.get("tensor-model-parallel-size", 1)),
        context=int(given.get("context-parallel-size", 1)),
        tokens=int(given["seq-length"]),
        sequences=int(given.get("global-batch-size", 1)),
        config=burst_config_of(given),
        window=None if left < 0 else left + 1,
        recompute=granularity == "full",
        chunked_loss=chunking is not None,
        loss_bytes=chunking.peak if chunking else 0,
        head_products=chunking.products if chunking else 3,
        sharded=bool(given.get("use-distributed-optimizer", False)),
        gradient_bytes=gradient_bytes,
        offload=bool(given.get("optimizer-cpu-offload", False)),
        element_bytes=element_bytes,
    )
    if load.sequences % load.data:
        raise ValueError(
            f"--global-batch-size {load.sequences} does not divide over {load.data} data-parallel "
            "ranks of one sequence each"
        )
    if (
        load.context * load.data > 1
        and element_bytes == 2
        and not given.get("use-distributed-optimizer")
    ):
        raise ValueError("without --use-distributed-optimizer memory cannot be predicted here")
    return load


def _refuse_other_ways(given: Flags, granularity: str) -> None:
    """Raise ValueError for flags that change memory or time in a way that is not modelled."""
    if granularity == "selective":
        raise ValueError("--recompute-granularity selective cannot be predicted here: full or none")
    method = given.get("recompute-method", "uniform"), given.get("recompute-num-layers", 1)
    if granularity == "full" and (method[0] != "uniform" or int(method[1]) != 1):
        raise ValueError(
            f"--recompute-method {method[0]} --recompute-num-layers {method[1]} cannot be "
            "predicted here: uniform and 1"
        )
    if int(given.get("micro-batch-size", 1)) != 1:
        raise ValueError(
            f"--micro-batch-size {given['micro-batch-size']} cannot be predicted here: give 1, and "
            "more sequences a step by --global-batch-size"
        )
    tensor = int(given.get("tensor-model-parallel-size", 1))
    if tensor > 1 and not given.get("sequence-parallel"):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor} cannot be predicted without --sequence-parallel"
        )
