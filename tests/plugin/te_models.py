"""Builds models of TransformerEngine's layers without a GPU, with their attention and with ours.

Run by test_transformer_engine.py in a process of its own, for what it puts in CUDA's place. Takes
the settings of the models as JSON and prints what it found of each.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_burst import BurstConfig
from megatron_burst.cpu_platform.table import CPU, allocated_on_cpu
from megatron_burst.plugin.layer_spec import burst_layer_spec
from megatron_burst.plugin.local_layers import local_stack_spec


def stand_in_for_cuda() -> None:
    """What TransformerEngine and Megatron ask of CUDA while they make a layer and save it.

    After their import: there they look for the GPU that is not here.
    """
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda: None
    torch.zeros = allocated_on_cpu(torch.zeros)
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


type Model = GPTModel | HybridModel


def build(settings: dict[str, Any], with_ours: bool, stack: Any = hybrid_stack_spec) -> Model:
    settings = dict(settings)
    pattern, latent = settings.pop("pattern", None), settings.get("multi_latent_attention", False)
    config_class = MLATransformerConfig if latent else TransformerConfig
    config = config_class(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        **settings,
    )
    if pattern:
        spec = stack
    elif config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=latent
        )
    if with_ours:
        spec = burst_layer_spec(spec, BurstConfig(kernel="reference"))
    if pattern:
        return HybridModel(config, spec, 64, 32, pattern, position_embedding_type="rope")
    return GPTModel(config, spec, 64, 32, position_embedding_type="rope")


def examine(settings: dict[str, Any]) -> dict[str, Any]:
    stock, ours = build(settings, with_ours=False), build(settings, with_ours=True)
    local = build(settings, False, local_stack_spec()) if "pattern" in settings else stock
    return {
        "stock": classes_of_a_layer(stock),
        "ours": classes_of_a_layer(ours),
        "only in stock": sorted(stock.state_dict().keys() - ours.state_dict().keys()),
        "only in ours": sorted(ours.state_dict().keys() - stock.state_dict().keys()),
        "shards that differ": shards_that_differ(stock, ours),
        "keys that differ": sorted(name for name, _ in keys(stock).items() ^ keys(local).items()),
        "plain, ours from stock": copied(settings, stock, True, plain),
        "plain, stock from ours": copied(settings, ours, False, plain),
        "distributed, ours from stock": copied(settings, stock, True, distributed),
        "distributed, stock from ours": copied(settings, ours, False, distributed),
    }


def classes_of_a_layer(model: Model) -> dict[str, str]:
    """The classes of its modules, without what core attention is made of."""
    modules = model.decoder.layers[-1].named_modules()
    return {n: type(module).__name__ for n, module in modules if "core_attention." not in n}


def shards_that_differ(stock: Model, ours: Model) -> list[str]:
    """What one of two models has in its distributed checkpoints and the other has not so."""
    found = [
        {name: (type(shard).__name__, shard.key, shard.global_shape) for name, shard in s.items()}
        for s in (stock.sharded_state_dict(), ours.sharded_state_dict())
    ]
    return sorted(name for name, _ in found[0].items() ^ found[1].items())


def keys(model: Model) -> dict[str, tuple[int, ...]]:
    """What its distributed checkpoint has by which name, but for TransformerEngine's own state."""
    shards = model.sharded_state_dict().values()
    return {s.key: s.global_shape for s in shards if "_extra_state" not in s.key}


def copied(
    settings: dict[str, Any], source: Model, with_ours: bool, load: Callable[[Model, Model], None]
) -> str:
    """Load a checkpoint of `source` into a model of other weights; "" if they then are the same."""
    model = build(settings, with_ours)
    try:
        load(model, source)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wanted = dict(source.named_parameters())
    wrong = [n for n, p in model.named_parameters() if not torch.equal(p, wanted.pop(n))]
    return " ".join([*wrong, *wanted])


def plain(model: Model, source: Model) -> None:
    model.load_state_dict(source.state_dict(), strict=True)


def distributed(model: Model, source: Model) -> None:
    with tempfile.TemporaryDirectory() as directory:
        dist_checkpointing.save(source.sharded_state_dict(), directory)
        state = dist_checkpointing.load(model.sharded_state_dict(), directory, strict="raise_all")
    model.load_state_dict(state, strict=True)


def main() -> None:
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store.name}", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        stand_in_for_cuda()
        models = json.loads(sys.argv[1])
        print(json.dumps({name: examine(settings) for name, settings in models.items()}))
