"""What is predicted: a model, the machines it runs on and how it is spread over them, as values."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megatron_burst.config import (
    Algorithm,
    BurstConfig,
    GradDtype,
    LayoutName,
    LmHeadConfig,
    LmHeadLoss,
    flags,
)
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk_size import Chunking, Sizes
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.head_parallel import exchanged
from megatron_burst.plans.layout import Layout
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import make_layout
from megatron_burst.plans.topology import Grid, choose_grid
from megatron_burst.tools.flops import UNCOUNTED, Flags, Model, model_of

_PREDICTED = {
    **dict.fromkeys((*UNCOUNTED, "use-megatron-fsdp", "fp16")),
    "pipeline-model-parallel-size": 1,
    "micro-batch-size": 1,
    "recompute-granularity": "full",
    "recompute-method": "uniform",
}
"""Flags that are predicted with this value alone, or not at all."""


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
class Ring:
    """What the plans of a layer's attention follow from."""

    config: BurstConfig
    tokens: int  # of a sequence
    mask: Mask
    nodes: tuple[int, ...]  # of each rank
    shape: Shape  # of a rank's tensors
    card: float  # bytes of a GPU's memory

    @property
    def grid(self) -> Grid:
        """Of the ranks."""
        return choose_grid(self.config.shape_of_rings, self.nodes)[0]

    @cached_property
    def layout(self) -> Layout:
        """Which tokens the ranks hold."""
        return make_layout(self.config, self.tokens, len(self.nodes))


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
        sizes = (
            f"--tensor-model-parallel-size {self.tensor} x --context-parallel-size {self.context}"
        )
        ranks, node = self.context * self.tensor, min(self.cluster.gpus_per_node, self.gpus)
        if self.gpus % ranks:
            raise ValueError(f"{self.gpus} GPUs do not divide over {sizes}")
        if node % self.tensor or (ranks % node and node % ranks):
            raise ValueError(f"nodes of {node} GPUs are not filled evenly by {sizes}")
        if node % self.beside:
            raise ValueError(
                f"--burst-head-parallel-size {self.head_parallel} needs as many ranks of a node, "
                f"of {node // self.tensor}"
            )

    @property
    def data(self) -> int:
        """The data-parallel size."""
        return self.gpus // (self.tensor * self.context)

    @property
    def local_tokens(self) -> int:
        """Of a context-parallel rank."""
        return self.tokens // self.context

    @property
    def heads(self) -> tuple[int, int]:
        """Query and kv heads of a tensor-parallel rank."""
        return self.model.heads // self.tensor, max(self.model.kv_heads // self.tensor, 1)

    @property
    def head_parallel(self) -> int:
        """U, over how many ranks the heads are spread; 1 where it is left to the training."""
        ulysses = self.config.algorithm is Algorithm.ULYSSES
        return self.context if ulysses else self.config.head_parallel_size or 1

    @property
    def ranks_per_node(self) -> int:
        """How many context-parallel ranks of one tensor-parallel rank a node holds."""
        return min(self.context, self.cluster.gpus_per_node // self.tensor)

    @property
    def beside(self) -> int:
        """How many GPUs that follow each other on a node are in the same place of their rings."""
        ulysses = self.config.algorithm is Algorithm.ULYSSES
        return self.tensor * (1 if ulysses else self.head_parallel)

    @cached_property
    def ring(self) -> Ring:
        """The ring of a rank, without a fraction that changes no plan: so equal ones are known."""
        size, config = self.head_parallel, self.config
        if not (config.layout is LayoutName.SEGMENTED_ZIGZAG and config.cuts_for_recompute):
            config = replace(config, recompute_fraction=None)
        on_a_node = max(1, self.ranks_per_node * self.tensor // self.beside)
        heads, kv_heads = self.heads
        shape = Shape(
            tokens=self.local_tokens,
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=self.model.head_dim,
            value_head_dim=self.model.head_dim,
            element_bytes=self.element_bytes,
            gradient_bytes=self.element_bytes if config.grad_dtype is GradDtype.MODEL else 4,
            sends_raw=config.grad_dtype is GradDtype.AUTO,
        )
        return Ring(
            config=config,
            tokens=self.tokens,
            mask=Mask.causal(window=self.window),
            nodes=tuple(rank // on_a_node for rank in range(self.context // size)),
            shape=exchanged(shape, size),
            card=self.cluster.memory,
        )


def config_of[T: (BurstConfig, LmHeadConfig)](config: type[T], given: Flags) -> T:
    """Read one of our configurations from the flags, with its defaults where they do not say."""
    names = {flag: flag.name.removeprefix("--") for flag in flags(config)}
    values: dict[str, Any] = {
        flag.field: flag.type(given[name]) for flag, name in names.items() if name in given
    }
    return config(**values)


def _number(given: Flags, name: str) -> int:
    return int(given.get(name, 1))


def _widths(given: Flags) -> tuple[int, int]:
    """Bytes of an element of weights and activations, and of the gradients that are summed."""
    if not given.get("bf16"):
        return 4, 4
    return 2, 2 if given.get("grad-reduce-in-bf16") else 4


def loss_chunking(given: Flags) -> Chunking | None:
    """Return the chunks of the loss as training will choose them; None for Megatron's own loss.

    Raises:
        ValueError: they cannot be.
    """
    config = config_of(LmHeadConfig, given)
    if config.loss is not LmHeadLoss.CHUNKED:
        return None
    model, tensor = model_of(given), _number(given, "tensor-model-parallel-size")
    tokens = _number(given, "micro-batch-size") * int(given["seq-length"])
    call = Call(chunk_size=config.chunk_size, memory_mb=config.memory_mb)
    element_bytes, gradient_bytes = _widths(given)
    sizes = Sizes(
        tokens=tokens // _number(given, "context-parallel-size"),
        vocabulary=model.vocabulary // tensor,
        hidden=model.hidden,
        dtype=torch.bfloat16 if element_bytes == 2 else torch.float32,
        ranks=tensor,
        statistics=call.statistics,
        sums_apart=gradient_bytes < 4,  # `main_grad` is too narrow for sums
    )
    return call.chunking(sizes)


def workload_of(given: Flags, cluster: Cluster, gpus: int) -> Workload:
    """Read a step of training from Megatron's and our flags.

    Raises:
        ValueError: something is missing, is not modelled or does not fit together.
    """
    _refuse(given)
    left = int(str(given.get("window-size", -1)).split(",")[0])
    element_bytes, gradient_bytes = _widths(given)
    chunking = loss_chunking(given)
    load = Workload(
        model=model_of(given),
        cluster=cluster,
        gpus=gpus,
        tensor=_number(given, "tensor-model-parallel-size"),
        context=_number(given, "context-parallel-size"),
        tokens=int(given["seq-length"]),
        sequences=_number(given, "global-batch-size"),
        config=config_of(BurstConfig, given),
        window=None if left < 0 else left + 1,
        recompute="recompute-granularity" in given,
        chunked_loss=chunking is not None,
        loss_bytes=chunking.peak if chunking else 0,
        head_products=chunking.products if chunking else 3,
        sharded=bool(given.get("use-distributed-optimizer")),
        gradient_bytes=gradient_bytes,
        offload=bool(given.get("optimizer-cpu-offload")),
        element_bytes=element_bytes,
    )
    if load.sequences % load.data:
        raise ValueError(
            f"--global-batch-size {load.sequences} does not divide over {load.data} data-parallel "
            "ranks of one sequence each"
        )
    if load.context * load.data > 1 and element_bytes == 2 and not load.sharded:
        raise ValueError("without --use-distributed-optimizer memory cannot be predicted here")
    return load


def _refuse(given: Flags) -> None:
    """Raise ValueError for what would have to be predicted otherwise, or is missing."""
    for name, only in _PREDICTED.items():
        if given.get(name) and str(given[name]) != str(only):
            alone = f": {only} alone" if only else ""
            raise ValueError(f"--{name} {given[name]} cannot be predicted here{alone}")
    # Attention and the MLP are layers of their own in a HybridModel.
    layers = 2 if "hybrid-layer-pattern" in given else 1
    if (recomputed := int(given.get("recompute-num-layers", layers))) != layers:
        raise ValueError(
            f"--recompute-num-layers {recomputed} cannot be predicted here: {layers} alone"
        )
    tensor = _number(given, "tensor-model-parallel-size")
    if tensor > 1 and not given.get("sequence-parallel"):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor} cannot be predicted without --sequence-parallel"
        )
    if "seq-length" not in given:
        raise ValueError("--seq-length is missing")
