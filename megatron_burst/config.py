"""What a user can choose: frozen dataclasses whose field docstrings are the flags' help texts."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

# What the values mean is said where they are used, in the fields below.
Algorithm = StrEnum("Algorithm", "BURST RING ALLGATHER ULYSSES")
Backward = StrEnum("Backward", "AUTO QUERY KV")
Topology = StrEnum("Topology", "AUTO FLAT DOUBLE MESH")
GradDtype = StrEnum("GradDtype", "AUTO FLOAT32 MODEL")
Mla = StrEnum("Mla", "AUTO LATENT HEADS")
LmHeadLoss = StrEnum("LmHeadLoss", "MEGATRON CHUNKED")


class LayoutName(StrEnum):
    """Which tokens a rank holds; see `Layout`. The last has no flag."""

    AUTO = "auto"
    ZIGZAG = "zigzag"
    SEGMENTED_ZIGZAG = "segmented-zigzag"
    BALANCED = "balanced"
    CONTIGUOUS = "contiguous"
    STRIPED = "striped"


ZIGZAGS = LayoutName.AUTO, LayoutName.ZIGZAG  # in which attention has Megatron's own split


class Refused(list[str]):
    """What several checks refuse, to be said at once."""

    def by[**P, T](self, check: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T | None:
        """Return what a check returns; None where it raises a ValueError, whose text is kept."""
        try:
            return check(*args, **options)
        except ValueError as error:
            self.append(str(error))
            return None


def refuse(reasons: Iterable[str]) -> None:
    """Raise one ValueError with all reasons, if there are any."""
    if lines := [*reasons]:
        raise ValueError("\n".join(lines))


def size_or_auto(text: str) -> int | None:
    """Read the number that a flag is given; None for auto."""
    return None if text == "auto" else int(text)


def wrong_fraction(fraction: float) -> Iterator[str]:
    """Yield what is wrong with the share that is recomputed."""
    if not 0 <= fraction <= 1:
        yield f"--recompute-attention-fraction is within 0 and 1, got {fraction}"


def positive(sizes: Mapping[str, float | None]) -> Iterator[str]:
    """Yield what is wrong with each size that is given and not positive."""
    for name, value in sizes.items():
        if value is not None and not 0 < value < math.inf:
            yield f"{name} must be positive and finite, got {value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagConfig:
    """Settings whose fields are flags: a string becomes a member of its enum, auto no size.

    Sizes and times have to be positive.
    """

    prefix: ClassVar[str] = "--burst-"

    def __post_init__(self) -> None:
        unknown, numbers = list[str](), dict[str, float | None]()
        for spec in dataclasses.fields(self):
            value, known = getattr(self, spec.name), {str(each): each for each in members(spec)}
            if spec.metadata.get("type") is size_or_auto and value == "auto":
                object.__setattr__(self, spec.name, None)
            elif str(value) in known:
                object.__setattr__(self, spec.name, known[str(value)])
            elif known:
                text = f"{flag_name(self, spec)} {value} is unknown; this version has: "
                unknown.append(text + ", ".join(known))
            elif spec.type in (int | None, float):  # a share is float | None
                numbers[flag_name(self, spec)] = value
        refuse(unknown or [*positive(numbers), *self.wrong()])

    def wrong(self) -> Iterator[str]:
        """Yield what is wrong with known values."""
        yield from ()


def flag_name(config: FlagConfig | type[FlagConfig], spec: dataclasses.Field[Any]) -> str:
    """The flag of a field; where it has none, the field's own name."""
    name = config.prefix + spec.name.replace("_", "-")
    return spec.metadata.get("flag", name) or spec.name


def members(spec: dataclasses.Field[Any]) -> list[StrEnum]:
    """Return what a field may be; nothing where it is no enum."""
    if isinstance(spec.type, type) and issubclass(spec.type, StrEnum):
        return list(spec.type)
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class BurstConfig(FlagConfig):
    """Settings of BurstAttention; the same names, without prefix, as the command-line flags.

    Raises:
        ValueError: values are unknown, not positive, without effect, or do not go together.
    """

    algorithm: Algorithm = field(
        default=Algorithm.BURST, metadata={"flag": "--context-parallel-algo"}
    )
    """Which context parallelism runs attention. burst: ours, a ring whose backward sends what is
    faster, hierarchical where the ranks are spread over nodes. Baselines on the same kernels:
    ring: K/V circulate in forward and backward on one flat ring (with --burst-topology double the
    DoubleRing); allgather: all K and V arrive before anything is computed; ulysses: heads are
    sharded instead of tokens. The flag alone selects our core attention, at a context-parallel size
    of 1 too."""

    backward: Backward = Backward.AUTO
    """What the backward ring sends. kv: K, V and their gradients. query: Q, dO, the gradient of Q,
    LSE and delta. auto: the faster by the planner's clock, where work stays as even;
    logged."""

    topology: Topology = Topology.AUTO
    """Which way blocks take. flat: one ring over all ranks, node by node. double: a hierarchical
    ring, one in each node and one between nodes; each inter-node transfer overlaps one intra-node
    pass. mesh: queries of some nodes, or ranks, meet K and V of others, so that of either only a
    few travel; it needs rows and columns of two or more, so no prime number of nodes. auto: for
    burst double where the ranks are spread evenly over several nodes, else flat, and mesh between
    nodes where it is faster within --burst-memory-mb; logged."""

    memory_mb: int | None = None
    """How much memory, in MiB, a mesh or a direct exchange may take on a rank for other ranks'
    blocks and their results, and an all-to-all over heads that `auto` chooses (default: a
    sixteenth of the GPU's; without a GPU any)."""

    ranks_per_node: int | None = None
    """How many ranks of the job share a node (default: by host name and torchrun's node)."""

    head_parallel_size: int | None = field(default=None, metadata={"type": size_or_auto})
    """The Ulysses degree: over how many ranks of a node, or of whole nodes, an all-to-all shards
    the heads; the rings run over the others. With ring and a flat topology this is USP; ulysses
    takes all ranks. auto: for burst the fastest by the planner's clock that fits --burst-memory-mb;
    1 under windows, documents and block masks, where latents may travel, and where a topology, a
    backward or hierarchical groups are given; logged."""

    head_chunks: int | None = field(default=None, metadata={"type": size_or_auto})
    """Into how many chunks attention cuts a rank's heads, to run one after the other: buffers and
    sums are one chunk's, the bytes that are sent the same, kernel calls smaller. It divides the kv
    heads of a rank. auto (the default): for burst on a GPU 2 or 4 where tokens x heads of a rank
    are at least 2^19 or 2^20 (16384 tokens and 32 heads make 2), so that a kernel call still fills
    the GPU; else 1, as under documents and where latents may travel; logged."""

    layout: LayoutName = field(default=LayoutName.AUTO, metadata={"values": [*LayoutName][:-1]})
    """Which tokens a rank holds. zigzag: Megatron's own split, chunks r and 2P-1-r of 2P. auto:
    zigzag for attention; M and G layers pass states on contiguous shards where that sends fewer
    bytes than an all-to-all over heads; logged. segmented-zigzag: each of 2 to 8 equal pieces in
    zigzag by itself, as many as leave a chunk 512 rows, for packed sequences and block masks; with
    --recompute-attention-fraction between 0 and 1 two, cut there. balanced: of packed sequences,
    chunks that are chosen every micro-batch so that all ranks have as much work; else zigzag.
    contiguous: equal pieces in their order; the last has twice the mean's work of attention."""

    block_mask: str | None = None
    """A block-sparse mask: a .npy file with a square table of booleans, which blocks of keys each
    block of queries may see, a block being an equal part of --seq-length. The causal mask, windows
    and packed sequences hold as well (default: none). The same file on every rank."""

    kernel: str = "auto"
    """The attention kernel of one tile. auto: the first that can serve the tensors, of flash3,
    flash4 and cudnn, then flash2 and aten_flash, then cpu; among equals one that needs no padding
    where K and V have heads of two sizes. flash2, flash3 and flash4 are flash-attn's packages,
    optional. A name takes that kernel or fails with its reasons; reference is dense float64."""

    grad_dtype: GradDtype = GradDtype.AUTO
    """The dtype of gradients on the wire. float32: no rounding on the way. model: that of the
    tensors, half the bytes under bfloat16; one rounding a hop. auto: what one kernel call
    returned travels as it is, in the dtype of the tensors, and a sum in float32: no rounding on the
    way either. Accumulation is float32 in all cases."""

    mla: Mla = Mla.AUTO
    """What a ring sends of K and V under --multi-latent-attention. heads: those of all heads.
    latent: the compressed latent and the rotary key, of which the receiver makes K and V. auto:
    latent where its fewer bytes save more time than the up-projections take; logged."""

    recompute_fraction: float | None = field(
        default=None, metadata={"flag": "--recompute-attention-fraction"}
    )
    """Partial attention recompute: which share of the sequence, 0 to 1, attention recomputes in
    layers that Megatron recomputes; the outputs of the rest are saved (default: all is recomputed,
    as Megatron does). 0 repeats neither attention nor its ring's messages (an all-to-all over heads
    is repeated), 0.5 a quarter of a causal sequence's work and half of the messages. It is rounded
    to whole chunks; with --burst-layout segmented-zigzag the sequence is cut there, so that every
    rank repeats as much."""

    timeout_seconds: float = field(default=600.0, metadata={"flag": None})
    """How long a message may take before the rank gives up with an error that names the step, the
    peer and the tensor; on NCCL that is logged somewhat earlier, and NCCL ends the process. Under
    Megatron: --distributed-timeout-minutes."""

    def wrong(self) -> Iterator[str]:
        """Yield what cannot go together, or has no effect."""
        for name, value in ("parallel-size", self.head_parallel_size), ("chunks", self.head_chunks):
            if self.mla is Mla.LATENT and (value or 1) > 1:
                given = f"--burst-head-{name} {value}"
                yield f"--burst-mla {self.mla}: latents have no heads for {given}: drop one"
        if self.layout is LayoutName.BALANCED and self.block_mask is not None:
            yield (
                f"--burst-layout {self.layout} looks at documents alone: drop --burst-block-mask, "
                f"or take --burst-layout {LayoutName.SEGMENTED_ZIGZAG}"
            )
        if self.recompute_fraction is not None:
            yield from wrong_fraction(self.recompute_fraction)
        yield from self._without_effect()

    @property
    def is_zigzag(self) -> bool:
        """Whether attention has Megatron's own split of the tokens."""
        return self.layout in ZIGZAGS

    @property
    def cuts_for_recompute(self) -> bool:
        """Whether segmented zigzag cuts where recompute ends, not into equal pieces."""
        return self.recompute_fraction is not None and 0 < self.recompute_fraction < 1

    @property
    def shape_of_rings(self) -> Topology:
        """FLAT, or DOUBLE where the nodes allow it: what AUTO and MESH stand for."""
        if self.topology in (Topology.FLAT, Topology.DOUBLE):
            return self.topology
        return Topology.DOUBLE if self.algorithm is Algorithm.BURST else Topology.FLAT

    def memory_limit(self, card: float) -> float:
        """Return how many bytes others' blocks may take on a card of so many."""
        return card / 16 if self.memory_mb is None else self.memory_mb * 2**20

    @property
    def may_take_mesh(self) -> bool:
        """Whether a mesh is asked for or may be chosen."""
        taken = self.topology in (Topology.AUTO, Topology.MESH)
        return taken and self.algorithm is Algorithm.BURST

    def _without_effect(self) -> Iterator[str]:
        """A baseline fixes what burst chooses: what would have no effect, and the reason."""
        if self.algorithm is Algorithm.BURST:
            return
        fixed: dict[str, tuple[str | int | None, ...]] = {
            "backward": (Backward.AUTO, Backward.KV),
            "topology": (Topology.AUTO, Topology.FLAT, Topology.DOUBLE),
            "memory_mb": (None,),
            "head_chunks": (None, 1),
            "mla": (Mla.AUTO, Mla.HEADS),
        }
        if self.algorithm is Algorithm.ULYSSES:
            fixed |= dict.fromkeys(("backward", "topology", "grad_dtype"), ("auto",))
        if self.algorithm is not Algorithm.RING:
            fixed["head_parallel_size"] = (None, 1)
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value not in fixed.get(spec.name, (value,)):
                yield (
                    f"{flag_name(self, spec)} {value} has no effect under --context-parallel-algo "
                    f"{self.algorithm}: drop it or take {Algorithm.BURST}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class LmHeadConfig(FlagConfig):
    """Settings of the LM head and its loss; the same names, with a prefix, as the flags."""

    prefix: ClassVar[str] = "--lm-head-"
    loss: LmHeadLoss = LmHeadLoss.MEGATRON
    """Who turns the last hidden states into losses. megatron: its output layer and its cross
    entropy, with the full logits in memory. chunked: both together, a chunk of tokens at
    a time; the losses of the tokens are the same. It goes with every --context-parallel-algo."""

    chunk_size: int | None = None
    """How many tokens a chunk of --lm-head-loss chunked has (default: as many as
    --lm-head-memory-mb allows)."""

    memory_mb: int | None = None
    """How much memory, in MiB, --lm-head-loss chunked may take on a rank beside the hidden states,
    the weight, their gradients and up to 40 bytes a token (default: 512, or as much as chunks of
    2048 tokens take). With room for the weight's gradient in float32, too, logits are made once,
    not in forward and backward; by default where that takes at most 1024."""

    def wrong(self) -> Iterator[str]:
        """Yield both sizes, or one without the chunked loss."""
        sizes = {"--lm-head-chunk-size": self.chunk_size, "--lm-head-memory-mb": self.memory_mb}
        given = [f"{name} {value}" for name, value in sizes.items() if value is not None]
        text = " and ".join(given)
        if given and self.loss is LmHeadLoss.MEGATRON:
            yield (
                f"{text} has no effect under --lm-head-loss {self.loss}; add --lm-head-loss "
                f"{LmHeadLoss.CHUNKED}"
            )
        if len(given) > 1:
            yield f"{text} both say how large a chunk is: drop one of them"
