"""Model FLOPs of a training step and how much of the device's peak they are.

With h hidden size, a query and g kv heads of size k, f the size of the MLP (m = 3 matrices where it
is gated, else 2), V the padded vocabulary, L layers and T tokens in sequences of S, of which each
has `pairs` visible (query, key) pairs, S (S + 1) / 2 under a causal mask:

    forward of a token = L (2 h k (2 a + 2 g) + 2 m h f + 4 a k pairs / S) + 2 h V
    step               = 3 T forward
    MFU                = step / (seconds x GPUs x peak)

So the causal half of attention counts half, and what recompute or a chunked loss runs again does
not count: that is work of the method, not of the model. The backward is twice the forward.
"""

import re
from collections.abc import Mapping

from megatron_burst.plans.cost import visible_pairs
from megatron_burst.plans.mask import Mask

PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H20", 148.0),
    ("GH200", 989.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("A40", 150.0),
)
"""Dense bfloat16 peaks by words of a device's name; the first that fits counts."""

_UNCOUNTED = {
    "num_experts": "None",
    "multi_latent_attention": "False",
    "hybrid_layer_pattern": "None",
    "experimental_attention_variant": "None",
    "mtp_num_layers": "None",
    "dataloader_inter_document_masking": "False",
    "burst_block_mask": "None",
    "window_size": "None",
}


def peak_tflops(device: str) -> float | None:
    """Return the peak of a device by its name, None where it is not known, as of a CPU."""
    found = (peak for name, peak in PEAK_TFLOPS if re.search(rf"\b{name}\b", device))
    return next(found, None)


def step_flops(arguments: Mapping[str, str]) -> tuple[float | None, str]:
    """Return the model FLOPs of a step of a run with these arguments, or None and the reason.

    Args:
        arguments: Megatron's, as a run logs them, by name with underscores.
    """
    others = [
        f"--{name.replace('_', '-')}"
        for name, plain in _UNCOUNTED.items()
        if arguments.get(name, plain) != plain
    ]
    if others:
        return None, f"the formula does not hold with {', '.join(others)}"
    h, ffn, k, layers, vocabulary, length, batch = (
        int(arguments[name])
        for name in (
            "hidden_size",
            "ffn_hidden_size",
            "kv_channels",
            "num_layers",
            "padded_vocab_size",
            "seq_length",
            "global_batch_size",
        )
    )
    heads = int(arguments["num_attention_heads"])
    grouped = arguments.get("group_query_attention") == "True"
    kv_heads = int(arguments["num_query_groups"]) if grouped else heads
    matrices = 3 if arguments.get("swiglu") == "True" else 2
    pairs = visible_pairs(Mask.causal(), length)
    layer: float = 2 * h * k * (2 * heads + 2 * kv_heads) + 2 * matrices * h * ffn
    layer += 4 * heads * k * pairs / length
    forward = layers * layer + 2 * h * vocabulary
    return 3.0 * batch * length * forward, ""
