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

from megatron_burst.plans.choice.cost import attention_flops as attention_flops
from megatron_burst.plans.choice.cost import visible_pairs
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.flags import flags_of, whole
from megatron_burst.tools.model import Model, model_of

PEAK_TFLOPS = {
    "H[18]00 PCIe": 756.0,
    "H[12]00 NVL": 835.0,
    "(H100|H800|H200|GH200)": 989.0,
    "H20": 148.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A[18]00": 312.0,
    "L40S": 362.0,
    "A40": 150.0,
}
"""Dense bfloat16 peaks by words of a device's name, as patterns; the first that fits counts."""

_UNCOUNTED = {  # of models and masks that a run's MFU is not said for
    "num-experts",
    "multi-latent-attention",
    "experimental-attention-variant",
    "attention-output-gate",
    "heterogeneous-layers-config-path",
    "mtp-num-layers",
    "dataloader-inter-document-masking",
    "reset-attention-mask",
    "sft",
    "burst-block-mask",
    "window-size",
}


def peak_tflops(device: str) -> float | None:
    """Return the peak of a device by its name, None where it is not known, as of a CPU."""
    peaks = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device))
    return next(peaks, None)


def step_flops(model: Model, tokens: int, pairs: int) -> float:
    """Return the FLOPs of training on one sequence with so many visible (query, key) pairs."""
    layers = sum(part.count * part.forward_flops for part in model.parts.values())
    of_token = layers + 2 * (1 + model.mtp) * model.head_parameters
    dims = model.heads, model.head_dim, model.value_head_dim
    return 3 * (tokens * of_token + model.layers * attention_flops(pairs, *dims))


def logged_step_flops(arguments: Mapping[str, str]) -> float | None:
    """Return the model FLOPs of a step of a run, None where the formula does not hold for it.

    Args:
        arguments: Megatron's, as a run logs them, by name with underscores.
    """
    given = flags_of(arguments)
    if _UNCOUNTED & given.keys() or set(given.get("hybrid-layer-pattern", "")) - set("*-|"):
        return None
    model = model_of(given | {"tensor-model-parallel-size": 1})
    tokens, sequences = whole(given, "seq-length"), whole(given, "global-batch-size")
    return sequences * step_flops(model, tokens, visible_pairs(Mask.causal(), tokens))
