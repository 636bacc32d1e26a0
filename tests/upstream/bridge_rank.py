"""One rank of a model that Megatron-Bridge's provider builds; prints its loss and gradient norm."""

import sys
import types
from pathlib import Path

CHECKOUT, ALGORITHM = Path(sys.argv[1]), sys.argv[2]
ROOT = Path(__file__).parents[2]
PACKAGES = ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.utils")
TOKENS, VOCABULARY = 128, 96


def without_their_inits() -> None:
    """Let the provider's modules be imported without all models of Bridge, and what those need."""
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(CHECKOUT.joinpath("src", *name.split(".")))]
        sys.modules[name] = package


def main() -> None:
    from megatron_burst.cpu_platform.platform import activate

    activate()
    without_their_inits()
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.utils import get_batch_on_this_cp_rank

    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    provider = GPTModelProvider(
        **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2},
        **{"seq_length": TOKENS, "vocab_size": VOCABULARY, "position_embedding_type": "rope"},
        **{"context_parallel_size": ranks, "use_cpu_initialization": True, "hidden_dropout": 0.0},
        **{"gradient_accumulation_fusion": False, "bias_dropout_fusion": False},
        **{"masked_softmax_fusion": False, "apply_rope_fusion": False, "attention_dropout": 0.0},
        cross_entropy_loss_fusion=False,
        transformer_layer_spec=local_layer_spec,
    )
    if ALGORITHM == "burst":
        page = (ROOT / "docs" / "launching.md").read_text()
        recipe = page.partition("### Megatron-Bridge")[2].partition("```python\n")[2]
        names: dict = {}
        exec(recipe.partition("```")[0], names)
        names["use_burst"](provider)
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    made = []
    model.output_layer.register_forward_hook(lambda _, __, out: made.append(type(out[0]).__name__))
    tokens = torch.arange(TOKENS)[None] * 7 % VOCABULARY
    batch = {"tokens": tokens, "labels": tokens * 5 % VOCABULARY}
    batch |= {"position_ids": torch.arange(TOKENS)[None]}
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False)
    loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).sum()
    (loss / TOKENS).backward()
    gradients = [p.grad for p in model.parameters()]
    for each in (loss, *gradients):
        torch.distributed.all_reduce(each.detach())
    norm = torch.stack([g.norm() for g in gradients]).norm()
    name = type(model.decoder.layers[0].self_attention.core_attention).__name__
    if torch.distributed.get_rank() == 0:
        print(f"found {name} {made[0]} {loss.item() / TOKENS:.6f} {norm.item():.6f}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


main()
