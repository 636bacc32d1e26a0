"""FLOPs as every tool counts them: of attention, of a training step, and the peaks of devices.

With h hidden size, a query and g kv heads of size k, f the size of the MLP (m = 3 matrices where it
is gated, else 2), V the padded vocabulary, L layers and T tokens in sequences of S, of which each
has `pairs` visible (query, key) pairs, S (S + 1) / 2 under a causal mask:

    forward of a token = L (2 h k (2 a + 2 g) + 2 m h f + 4 a k pairs / S) + 2 h V
    step               = 3 T forward
    MFU                = step / (seconds x GPUs x peak)

So the causal half of attention counts half, and what recompute or a chunked loss computes again
does not count: that is work of the method, not of the model. The backward is twice the forward.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_burst.plans.cost import visible_pairs
from megatron_burst.plans.mask import Mask

type Flags = Mapping[str, Any]  # Megatron's and ours, by name without dashes in front

PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800 PCIe": 756.0,
    "H800": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H20": 148.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A40": 150.0,
}
"""Dense bfloat16 peaks by words of a device's name; the first that fits counts."""

UNCOUNTED = (
    "num-experts",
    "multi-latent-attention",
    "experimental-attention-variant",
    "mtp-num-layers",
    "dataloader-inter-document-masking",
    "burst-block-mask",
)
"""Flags of models and masks that the formula does not hold for."""


def peak_tflops(device: str) -> float | None:
    """Return the peak of a device by its name, None where it is not known, as of a CPU."""
    found = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device))
    return next(found, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What of a model decides FLOPs and memory."""

    layers: int
    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int  # padded
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        attention = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.hidden * (attention + (3 if self.gated else 2) * self.ffn)

    @property
    def head_parameters(self) -> int:
        """Of the LM head; as many in the embedding."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Of all matrices."""
        embeddings = self.head_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings

    def step_flops(self, tokens: int, pairs: int) -> float:
        """Return the FLOPs of training on one sequence with so many visible (query, key) pairs."""
        products = 2 * (self.layers * self.layer_parameters + self.head_parameters)
        attention = self.layers * attention_flops(pairs, self.heads, self.head_dim, self.head_dim)
        return 3 * (tokens * products + attention)


def layers_of(given: Flags) -> int | None:
    """Return how many pairs of attention and MLP a model has; None for a hybrid of other layers."""
    if "hybrid-layer-pattern" not in given:
        return int(given["num-layers"])
    pattern = str(given["hybrid-layer-pattern"]).replace("|", "")
    pairs = len(pattern) // 2
    return pairs if pattern == "*-" * pairs else None


def model_of(given: Flags) -> Model:
    """Read the shape of a model from Megatron's flags.

    Raises:
        ValueError: one is missing, or a hybrid pattern has other layers than attention and MLP.
    """
    layers = "hybrid-layer-pattern" if "hybrid-layer-pattern" in given else "num-layers"
    needed = (layers, "hidden-size", "num-attention-heads", "vocab-size")
    if missing := [f"--{name}" for name in needed if name not in given]:
        raise ValueError(f"the model is not known without {', '.join(missing)}")
    if (count := layers_of(given)) is None:
        raise ValueError(f"--{layers} {given[layers]} is not counted, only '*-' repeated is")

    def number(name: str, default: int = 1) -> int:
        return int(given.get(name, default))

    hidden, heads = number("hidden-size"), number("num-attention-heads")
    padding = number("make-vocab-size-divisible-by", 128) * number("tensor-model-parallel-size")
    return Model(
        layers=count,
        hidden=hidden,
        ffn=number("ffn-hidden-size", 4 * hidden),
        gated=bool(given.get("swiglu")),
        heads=heads,
        kv_heads=number("num-query-groups") if given.get("group-query-attention") else heads,
        head_dim=number("kv-channels", hidden // heads),
        vocabulary=-(-number("vocab-size") // padding) * padding,
        tied=not given.get("untie-embeddings-and-output-weights"),
    )


def attention_flops(
    pairs: int, heads: int, head_dim: int, value_head_dim: int, *, backward: bool = False
) -> float:
    """Return what a kernel computes: two matrix products forward, five backward."""
    dims = 3 * head_dim + 2 * value_head_dim if backward else head_dim + value_head_dim
    return 2.0 * pairs * heads * dims


def logged_step_flops(arguments: Mapping[str, str]) -> float | None:
    """Return the model FLOPs of a step of a run, None where the formula does not hold for it.

    Args:
        arguments: Megatron's, as a run logs them, by name with underscores.
    """
    logged = {name.replace("_", "-"): text for name, text in arguments.items()}
    given = {name: text for name, text in logged.items() if text not in ("None", "False")}
    if any(name in given for name in (*UNCOUNTED, "window-size")) or layers_of(given) is None:
        return None
    # It is padded already.
    whole = {"vocab-size": given["padded-vocab-size"], "make-vocab-size-divisible-by": 1}
    model, tokens = model_of(given | whole | {"tensor-model-parallel-size": 1}), given["seq-length"]
    pairs = visible_pairs(Mask.causal(), int(tokens))
    return int(given["global-batch-size"]) * model.step_flops(int(tokens), pairs)
