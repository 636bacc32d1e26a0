"""What of Megatron our attention cannot honour, each with the reason: refused, never ignored."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limit:
    """An argument of Megatron (or field of TransformerConfig), the values that work, and why."""

    name: str
    working: tuple[Any, ...]
    reason: str


LIMITS: tuple[Limit, ...] = (
    Limit(
        "attention_dropout",
        (0, 0.0),
        "a kernel's random numbers are local to a tile, so no CP size would equal another: "
        "pass --attention-dropout 0",
    ),
    Limit("window_size", (None, (-1, -1)), "sliding windows are not built yet: drop --window-size"),
    Limit("softmax_type", ("vanilla",), "attention sinks are not built yet: drop --softmax-type"),
    Limit(
        "multi_latent_attention",
        (False,),
        "MLA is not built yet: drop --multi-latent-attention",
    ),
    Limit(
        "experimental_attention_variant",
        (None,),
        "it brings an attention of its own: drop --experimental-attention-variant",
    ),
    Limit(
        "reset_attention_mask",
        (False,),
        "it needs the dense mask, which is never built: drop --reset-attention-mask",
    ),
    Limit(
        "dataloader_inter_document_masking",
        (False,),
        "document masks are not built yet: drop --dataloader-inter-document-masking",
    ),
    Limit("sft", (False,), "packed sequences are not built yet: drop --sft"),
    Limit(
        "hybrid_context_parallel",
        (False,),
        "its ranks hold sequences of different lengths: drop --hybrid-context-parallel",
    ),
    Limit(
        "mtp_num_layers",
        (None,),
        "Megatron builds MTP layers from a spec of its own, without our attention: "
        "drop --mtp-num-layers",
    ),
    Limit(
        "hybrid_layer_pattern",
        (None,),
        "HybridModel is not supported: drop --hybrid-layer-pattern",
    ),
    Limit("qk_clip", (False,), "it needs the largest score of a row: drop --qk-clip"),
    Limit(
        "log_max_attention_logit",
        (False,),
        "it needs the largest score of a row: drop --log-max-attention-logit",
    ),
    Limit(
        "fp8_dot_product_attention",
        (False,),
        "attention runs in the model's dtype: leave fp8_dot_product_attention off",
    ),
    Limit(
        "fp8_multi_head_attention",
        (False,),
        "attention runs in the model's dtype: leave fp8_multi_head_attention off",
    ),
    Limit(
        "cuda_graph_impl",
        (None, "none"),
        "a ring cannot be captured in a CUDA graph: drop --cuda-graph-impl",
    ),
    Limit(
        "overlap_moe_expert_parallel_comm",
        (False,),
        "its schedule splits layers in a way that was not shown to be right: "
        "drop --overlap-moe-expert-parallel-comm",
    ),
    Limit(
        "batch_invariant_mode",
        (False,),
        "Megatron does not run it with context parallelism: drop --batch-invariant-mode",
    ),
    Limit(
        "use_kitchen_attention",
        (False,),
        "it is another core attention: leave use_kitchen_attention off",
    ),
)


def refusals(settings: Any) -> list[str]:
    """Return why our attention cannot run with these settings, one line each; empty if it can.

    Args:
        settings: Megatron's parsed arguments or a TransformerConfig. A limit whose name it does
            not have does not apply to it.
    """
    reasons = [
        f"{limit.name} = {value}: {limit.reason}"
        for limit in LIMITS
        if (value := getattr(settings, limit.name, limit.working[0])) not in limit.working
    ]
    backend = getattr(settings, "attention_backend", None)
    name = getattr(backend, "name", backend)
    if name not in (None, "auto"):
        reasons.append(
            f"attention_backend = {name}: it chooses among Megatron's own kernels: "
            "drop --attention-backend, or choose with --burst-kernel"
        )
    return reasons
