"""What a model is made of: its layers by kind, with their parameters and what a token costs.

Numbers are of whole layers, over all tensor- and expert-parallel ranks. With h hidden size, f that
of the MLP (m = 3 matrices where it is gated, else 2), k of E experts for each token.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_burst.plugin.scans.bytes_sent import ScanShape, shapes_of
from megatron_burst.tools.flags import Flags, heads_of, hybrid_pattern, kept, whole


@dataclass(frozen=True, slots=True)
class Part:
    """The layers of one kind."""

    count: int
    parameters: int  # of the matrices of one layer
    active: int  # of them, those that meet a token
    saved: int  # numbers of a token that its backward needs
    other_flops: int = 0  # of a token's forward, beside the products with parameters
    exchanged: int = 0  # numbers of a token that experts' all-to-alls move in a forward
    experts: int = 1  # of a layer
    chosen: int = 1  # of them, for each token
    of_experts: int = 0  # of the parameters, those that expert parallelism shares out
    on_all_ranks: int = 0  # of them, those that tensor parallelism does not
    activated: int = 0  # of what is saved, what the activations of experts make
    at_work: float = 7 / 3  # numbers that live in its backward, over those that it saves within
    at_second: float = 0.0  # of them, those of an MLP's at its second product

    @property
    def forward_flops(self) -> int:
        """Of a token in one layer."""
        return 2 * self.active + self.other_flops

    def of_rank(self, tensor: int) -> int:
        """Return the parameters of a layer on one of so many tensor-parallel ranks, no experts."""
        spread = self.parameters - self.of_experts - self.on_all_ranks
        return spread // tensor + self.on_all_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """Multi-latent attention; the head size of the keys has `rope` in it."""

    query: int  # 0: queries are made of the hidden states
    kv: int
    rope: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What of a model decides FLOPs and memory."""

    layers: int  # of attention, those of MTP's heads among them
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_head_dim: int
    latents: Latents | None
    norms_heads: bool  # queries and keys, before rotary
    vocabulary: int  # padded
    tied: bool
    positions: int  # numbers of learned position embeddings; tensor-parallel ranks have all of them
    mtp: int  # heads, each with a layer and losses of its own
    kinds: str  # Megatron's symbols of the layers, those of each of MTP's heads behind a `/`
    scans: dict[str, ScanShape]  # what layers with a state send by, for a tensor-parallel rank
    others: Mapping[str, Part]  # layers that are not attention, by their kind

    @property
    def parts(self) -> dict[str, Part]:
        """The kinds of layers that there are."""
        every = {"attention": self._attention(), **self.others}
        return {name: part for name, part in every.items() if part.count}

    @property
    def expert_parameters(self) -> int:
        """Of the experts alone."""
        return sum(part.count * part.of_experts for part in self.others.values())

    @property
    def head_parameters(self) -> int:
        """Of the LM head; as many in the embedding."""
        return self.hidden * self.vocabulary

    @property
    def ends(self) -> int:
        """Parameters of embedding and LM head."""
        return self.head_parameters * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Of all matrices."""
        layers = sum(part.count * part.parameters for part in self.parts.values())
        return layers + self.ends + self.positions

    def of_rank(self, tensor: int) -> int:
        """Return those of all layers on one of so many tensor-parallel ranks, no experts."""
        return sum(part.count * part.of_rank(tensor) for part in self.parts.values())

    def _attention(self) -> Part:
        queries, values = self.heads * self.head_dim, self.heads * self.value_head_dim
        down = 0
        if self.latents:
            query, kv, rope = self.latents.query, self.latents.kv, self.latents.rope
            made = query * (self.hidden + queries) if query else self.hidden * queries
            expanded = self.heads * (self.head_dim - rope) + values
            down = self.hidden * (query + kv + rope)  # to latents, which all ranks have
            made += self.hidden * (kv + rope) + kv * expanded
            saved = query + kv + 2 * queries + 2 * expanded
        else:
            expanded = self.kv_heads * (self.head_dim + self.value_head_dim)
            made = self.hidden * (queries + expanded)
            saved = 2 * queries + self.kv_heads * (2 * self.head_dim + self.value_head_dim)
        parameters = made + values * self.hidden
        # Its norm and sum, q and k before and after rotary, v, the output.
        saved += 3 * self.hidden + values
        return Part(self.layers, parameters, parameters, saved, on_all_ranks=down)


def model_of(given: Flags) -> Model:
    """Read the shape of a model from Megatron's flags.

    Raises:
        ValueError: one is missing, or the model has layers that are not counted.
    """
    layers = "hybrid-layer-pattern" if "hybrid-layer-pattern" in given else "num-layers"
    vocabulary = "padded-vocab-size" if "padded-vocab-size" in kept(given) else "vocab-size"
    needed = (layers, "hidden-size", "num-attention-heads", vocabulary)
    if missing := [f"--{name}" for name in needed if name not in kept(given)]:
        raise ValueError(f"the model is not known without {', '.join(missing)}")

    number = partial(whole, given)
    kinds, mtp = _kinds(given)
    count, tensor = Counter(kinds), number("tensor-model-parallel-size")
    hidden, heads = number("hidden-size"), heads_of(given)
    padding = number("make-vocab-size-divisible-by", 128) * tensor
    padded = -(-number("vocab-size") // padding) * padding
    # Megatron's default: three matrices of SwiGLU have about as many numbers as two others.
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if given.get("swiglu") else 4 * hidden
    ffn, latents = number("ffn-hidden-size", usual), None
    if given.get("multi-latent-attention"):
        ranks = {"query": number("q-lora-rank", 0), "kv": number("kv-lora-rank", 32)}
        latents = Latents(**ranks, rope=number("qk-pos-emb-head-dim", 64))
    made = 2 if given.get("swiglu") or given.get("quick-geglu") else 1  # by an MLP's first product
    matrices = made + 1
    eager = "no-bias-swiglu-fusion" if given.get("swiglu") else "no-bias-gelu-fusion"
    # Between its products: what the first made and its gradient, and the gradient of what follows;
    # where nothing compiles a gate, as much again as the first made.
    at_work = (2 * made + 1 + made * (made > 1 and eager in kept(given))) / matrices
    scans = partial(shapes_of, lambda name, default: number(name.replace("_", "-"), default))
    mamba, delta = scans().values()  # of whole layers
    # As Megatron counts: the delta rule has four products of a head's state with a vector.
    of_delta = 8 * delta.out * number("linear-value-head-dim", 128)
    return Model(
        layers=count["*"],
        hidden=hidden,
        heads=heads.query,
        kv_heads=heads.kv,
        head_dim=heads.size,
        value_head_dim=heads.value_size,
        latents=latents,
        norms_heads=bool(given.get("qk-layernorm")) and latents is None,
        vocabulary=number("padded-vocab-size", padded),
        tied=not given.get("untie-embeddings-and-output-weights"),
        positions=hidden * number("max-position-embeddings", 0) if _learns_positions(given) else 0,
        mtp=mtp,
        kinds=kinds,
        scans=scans(tensor),
        others={
            "mlp": _mlp(count["-"], matrices, hidden, ffn, at_work),
            "experts": _experts(number, count["E"], matrices, hidden, ffn, at_work),
            "mamba": _recurrent(count["M"], hidden, mamba, 7 * mamba.state),
            "delta": _recurrent(
                count["G"], hidden, delta, 2 * delta.width * delta.convolved + of_delta
            ),
            "mtp": Part(mtp, 2 * hidden**2, 2 * hidden**2, 3 * hidden),
        },
    )


def _learns_positions(given: Flags) -> bool:
    """Whether positions have an embedding of their own: Megatron's default."""
    kind = given.get("position-embedding-type", "learned_absolute")
    return kind == "learned_absolute" and not given.get("use-rotary-position-embeddings")


def _kinds(given: Flags) -> tuple[str, int]:
    """The layers by Megatron's letters, each of MTP's heads behind a `/`, and how many heads."""
    mtp = whole(given, "mtp-num-layers", 0)
    if "hybrid-layer-pattern" in given:
        pattern = str(given["hybrid-layer-pattern"])
        main, *heads = pattern.replace("|", "").split("/")
        if unknown := set(main + "".join(heads)) - set("*-EMG"):
            raise ValueError(
                f"--hybrid-layer-pattern {pattern} is not counted: it has layers "
                f"{', '.join(sorted(unknown))}; known are *, -, E, M and G"
            )
        if given.get("num-experts") and "E" not in pattern:
            raise ValueError(
                f"--num-experts {given['num-experts']} has no effect: --hybrid-layer-pattern "
                f"{pattern} has no E; or give --gpt"
            )
        inner, count = heads[0] if heads else "", max(mtp, len(heads))
        return main + count * f"/{inner}", count
    pattern = hybrid_pattern(given)
    return pattern + mtp * f"/{pattern[-2:]}", mtp  # MTP's heads are as the last layer


def _mlp(count: int, matrices: int, hidden: int, ffn: int, at_work: float) -> Part:
    """It saves its norm and sum, its first product, what the activation makes of it."""
    parameters = matrices * hidden * ffn
    saved, at_second = 2 * hidden + matrices * ffn, (matrices + 1) / matrices
    return Part(count, parameters, parameters, saved, at_work=at_work, at_second=at_second)


def _experts(number: Any, count: int, matrices: int, hidden: int, ffn: int, at_work: float) -> Part:
    if not count:
        return Part(0, 0, 0, 0)
    experts, chosen = number("num-experts", 1), number("moe-router-topk", 2)
    ffn = number("moe-ffn-hidden-size", ffn)
    shared = number("moe-shared-expert-intermediate-size", 0)  # the MLP of all tokens beside them
    met = _mlp(count, matrices, hidden, chosen * ffn + shared, at_work)
    moved = 2 * chosen * hidden  # to the experts and back
    router, of_experts = hidden * experts, experts * matrices * hidden * ffn
    return Part(
        count,
        of_experts + matrices * hidden * shared + router,
        met.active + router,
        met.saved + moved,
        exchanged=moved,
        experts=experts,
        chosen=chosen,
        of_experts=of_experts,
        on_all_ranks=router,
        activated=chosen * ffn,
        at_work=at_work,
    )


def _recurrent(count: int, hidden: int, scan: ScanShape, scan_flops: int) -> Part:
    made = scan.projected + scan.out
    return Part(count, hidden * made, hidden * made, 3 * hidden + 2 * made, scan_flops)
