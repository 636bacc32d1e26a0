"""What a model is made of: its layers by kind, with their parameters and what a token costs.

Numbers are of whole layers, over all tensor- and expert-parallel ranks. With h hidden size, f that
of the MLP (m = 3 matrices where it is gated, else 2), k of E experts for each token.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

type Flags = Mapping[str, Any]  # Megatron's and ours, by name without dashes in front


@dataclass(frozen=True, slots=True)
class Part:
    """The layers of one kind."""

    count: int
    parameters: int  # of the matrices of one layer
    active: int  # of them, those that meet a token
    saved: int  # numbers of a token that its backward needs
    other_flops: int = 0  # of a token's forward, beside the products with parameters
    exchanged: int = 0  # numbers of a token that an all-to-all moves in a forward

    @property
    def forward_flops(self) -> int:
        """Of a token in one layer."""
        return 2 * self.active + self.other_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in the place of an MLP."""

    count: int
    chosen: int  # for each token
    ffn: int
    shared: int = 0  # the MLP of all tokens beside them


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """Multi-latent attention; the head size of the keys has `rope` in it."""

    query: int  # 0: queries are made of the hidden states
    kv: int
    rope: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent:
    """Mamba-2 or gated delta net layers: what is projected in and out, and a token's scan."""

    count: int = 0
    projected: int = 0  # numbers of a token that the first projection makes
    inner: int = 0  # that the last one takes
    scan_flops: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What of a model decides FLOPs and memory."""

    layers: int  # of attention, those of MTP's heads among them
    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    vocabulary: int  # padded
    tied: bool = False
    value_dim: int | None = None  # of a head, where it is not that of the keys
    mlps: int | None = None  # layers with an MLP (default: all)
    expert_layers: int = 0
    experts: Experts | None = None
    latents: Latents | None = None
    mamba: Recurrent = Recurrent()
    delta: Recurrent = Recurrent()
    mtp: int = 0  # heads, each with a layer and losses of its own

    @property
    def value_head_dim(self) -> int:
        """Of a head's values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def parts(self) -> dict[str, Part]:
        """The kinds of layers that there are."""
        mlps = self.layers if self.mlps is None else self.mlps
        matrices = (3 if self.gated else 2) * self.hidden
        mlp, joined = matrices * self.ffn, 2 * self.hidden**2
        found = {
            "attention": self._attention(),
            "mlp": Part(mlps, mlp, mlp, self._saved(self.ffn)),
            "experts": self._experts(matrices),
            "mamba": self._recurrent(self.mamba),
            "delta": self._recurrent(self.delta),
            "mtp": Part(self.mtp, joined, joined, 3 * self.hidden),
        }
        return {name: part for name, part in found.items() if part.count}

    @property
    def expert_parameters(self) -> int:
        """Of the experts alone, which expert parallelism shares out."""
        if self.experts is None:
            return 0
        one = (3 if self.gated else 2) * self.hidden * self.experts.ffn
        return self.expert_layers * self.experts.count * one

    @property
    def head_parameters(self) -> int:
        """Of the LM head; as many in the embedding."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Of all matrices."""
        embeddings = self.head_parameters * (1 if self.tied else 2)
        return sum(part.count * part.parameters for part in self.parts.values()) + embeddings

    def _attention(self) -> Part:
        queries, values = self.heads * self.head_dim, self.heads * self.value_head_dim
        if self.latents:
            query, kv, rope = self.latents.query, self.latents.kv, self.latents.rope
            made = query * (self.hidden + queries) if query else self.hidden * queries
            keys = self.heads * (self.head_dim - rope) + values
            made += self.hidden * (kv + rope) + kv * keys
            saved = query + kv + 2 * queries + 2 * keys
        else:
            keys = self.kv_heads * (self.head_dim + self.value_head_dim)
            made = self.hidden * (queries + keys)
            saved = 2 * queries + self.kv_heads * (2 * self.head_dim + self.value_head_dim)
        parameters = made + values * self.hidden
        # Its norm and sum, q and k before and after rotary, v, the output.
        return Part(self.layers, parameters, parameters, 3 * self.hidden + saved + values)

    def _saved(self, ffn: int) -> int:
        """Of an MLP: its norm and sum, its first product, what the activation makes of it."""
        return 2 * self.hidden + (3 if self.gated else 2) * ffn

    def _experts(self, matrices: int) -> Part:
        if not (experts := self.experts):
            return Part(0, 0, 0, 0)
        router = self.hidden * experts.count
        every = matrices * (experts.count * experts.ffn + experts.shared) + router
        active = matrices * (experts.chosen * experts.ffn + experts.shared) + router
        saved = self._saved(experts.chosen * experts.ffn + experts.shared)
        moved = 2 * experts.chosen * self.hidden  # to the experts and back
        return Part(self.expert_layers, every, active, saved + moved, exchanged=moved)

    def _recurrent(self, each: Recurrent) -> Part:
        products = self.hidden * (each.projected + each.inner)
        saved = 3 * self.hidden + 2 * each.projected + 2 * each.inner
        moved = each.projected + each.inner  # heads for tokens, and back
        return Part(each.count, products, products, saved, each.scan_flops, moved)


def model_of(given: Flags) -> Model:
    """Read the shape of a model from Megatron's flags.

    Raises:
        ValueError: one is missing, or the model has layers that are not counted.
    """
    layers = "hybrid-layer-pattern" if "hybrid-layer-pattern" in given else "num-layers"
    needed = (layers, "hidden-size", "num-attention-heads", "vocab-size")
    if missing := [f"--{name}" for name in needed if name not in given]:
        raise ValueError(f"the model is not known without {', '.join(missing)}")

    number = partial(whole, given)
    count, mtp = _counted(given)
    hidden, heads = number("hidden-size"), number("num-attention-heads")
    padding = number("make-vocab-size-divisible-by", 128) * number("tensor-model-parallel-size")
    ffn, head_dim = number("ffn-hidden-size", 4 * hidden), number("kv-channels", hidden // heads)
    latents = None
    if given.get("multi-latent-attention"):
        rope = number("qk-pos-emb-head-dim", 64)
        latents = Latents(query=number("q-lora-rank", 0), kv=number("kv-lora-rank", 32), rope=rope)
        head_dim = number("qk-head-dim", 128) + rope
    grouped = given.get("group-query-attention") and not latents
    return Model(
        layers=count["*"],
        hidden=hidden,
        ffn=ffn,
        gated=bool(given.get("swiglu")),
        heads=heads,
        kv_heads=number("num-query-groups") if grouped else heads,
        head_dim=head_dim,
        value_dim=number("v-head-dim", 128) if latents else None,
        vocabulary=-(-number("vocab-size") // padding) * padding,
        tied=not given.get("untie-embeddings-and-output-weights"),
        mlps=count["-"],
        expert_layers=count["E"],
        experts=_experts_of(number, ffn) if count["E"] else None,
        latents=latents,
        mamba=_mamba_of(number, hidden, count["M"]),
        delta=_delta_of(number, count["G"]),
        mtp=mtp,
    )


def whole(given: Flags, name: str, default: int = 1) -> int:
    """Return the number that is given, or the default.

    Raises:
        ValueError: it is no whole number, or 0 where the default is not.
    """
    value = given.get(name)
    text = str(default if value is None else value)
    if not text.isdecimal() or (default and not int(text)):
        kind = "positive whole" if default else "whole"
        raise ValueError(f"--{name} {text} is not a {kind} number")
    return int(text)


def _counted(given: Flags) -> tuple[Counter[str], int]:
    """How many layers of each kind there are, by Megatron's letters, and how many MTP heads."""
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
        inner = heads[0] if heads else ""
        return Counter(main + max(mtp, len(heads)) * inner), max(mtp, len(heads))
    pattern = hybrid_pattern(given)
    return Counter(pattern + mtp * pattern[-2:]), mtp  # MTP's heads are as the last layer


def hybrid_pattern(given: Flags) -> str:
    """Return the layers of a GPTModel as a HybridModel's, by --num-layers and --moe-layer-freq.

    Raises:
        ValueError: the frequency is neither a number nor a list as '[0]*1+[1]*26'.
    """
    layers = whole(given, "num-layers")
    if not given.get("num-experts"):
        return "*-" * layers
    text = str(given.get("moe-layer-freq", 1)).strip("()").replace(" ", "")
    if text.isdigit():
        kinds = "".join("0" if layer % int(text) else "1" for layer in range(layers))
    else:
        found = re.findall(r"\[([01,]+)\](?:\*(\d+))?", text)
        kinds = "".join(part.replace(",", "") * int(times or 1) for part, times in found)
    if len(kinds) != layers:
        raise ValueError(
            f"--moe-layer-freq {text} says of {len(kinds)} layers what they are, but there are "
            f"{layers}: give a number or [0]*a+[1]*b"
        )
    return kinds.replace("0", "*-").replace("1", "*E")


def cut(pattern: str, parts: int) -> list[str]:
    """Cut the layers of a pattern into parts of about equal length."""
    ends = [len(pattern) * end // parts for end in range(parts + 1)]
    return [pattern[start:stop] for start, stop in pairwise(ends)]


def _experts_of(number: Any, ffn: int) -> Experts:
    return Experts(
        count=number("num-experts", 1),
        chosen=number("moe-router-topk", 2),
        ffn=number("moe-ffn-hidden-size", ffn),
        shared=number("moe-shared-expert-intermediate-size", 0),
    )


def _mamba_of(number: Any, hidden: int, count: int) -> Recurrent:
    """Scan FLOPs are those that Megatron counts: 7 times the inner size times that of the state."""
    state, head_dim = number("mamba-state-dim", 128), number("mamba-head-dim", 64)
    heads = number("mamba-num-heads", 2 * hidden // head_dim)
    inner, groups = heads * head_dim, number("mamba-num-groups", 8)
    return Recurrent(
        count=count,
        projected=2 * inner + 2 * groups * state + heads,
        inner=inner,
        scan_flops=7 * inner * state,
    )


def _delta_of(number: Any, count: int) -> Recurrent:
    """The delta rule has, as Megatron counts, four products of a head's state with a vector."""
    keys = number("linear-num-key-heads", 16) * number("linear-key-head-dim", 128)
    heads, dim = number("linear-num-value-heads", 32), number("linear-value-head-dim", 128)
    return Recurrent(
        count=count,
        projected=2 * keys + 2 * heads * dim + 2 * heads,
        inner=heads * dim,
        scan_flops=2 * (number("linear-conv-kernel-dim", 4) * (2 * keys + heads * dim))
        + 8 * heads * dim**2,
    )
