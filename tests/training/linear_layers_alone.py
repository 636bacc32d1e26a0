"""Mamba-2 and GDN layers over our zigzag equal the same layer on one rank; run by tests.

Every number P of ranks up to the job's, in float64: the output, and the gradients of the input and
of all parameters, on every rank. Prints a line a case.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.plans.visibility.layout import Layout, zigzag

HIDDEN = 8
# Megatron casts the decay and its parameters to float32.
TOLERANCE = 1e-6

type Build = Callable[[dist.ProcessGroup], torch.nn.Module]


def main() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    get_cuda_rng_tracker().add("model-parallel-rng", 1)
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(world)][rank]
    for ranks in range(2, world + 1):
        group = dist.new_group(range(ranks))
        if rank >= ranks:
            continue
        for case, build in (*mamba_layers(ranks, alone), *gdn_layers(ranks, alone)):
            worst = compare(build(alone), build(group), group)
            if rank == 0:
                print(f"P {ranks}, {case}: {worst:.1e}", flush=True)
            assert worst < TOLERANCE, (rank, ranks, case)
    dist.destroy_process_group()


def mamba_layers(ranks: int, tensor: dist.ProcessGroup) -> Iterator[tuple[str, Build]]:
    """Groups of heads that ranks share, have one of, and have two of; Megatron's other path."""
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    linear = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    for groups, efficient in ((1, True), (ranks, True), (2 * ranks, False)):
        config = settings(
            mamba_state_dim=3,
            mamba_head_dim=2,
            mamba_num_groups=groups,
            mamba_num_heads=4 * ranks,
            use_mamba_mem_eff_path=efficient,
        )
        yield (
            f"M, {groups} groups, {'' if efficient else 'not '}memory-efficient",
            lambda group, config=config: MambaMixer(
                config, linear, HIDDEN, pg_collection=groups_of(tensor, group)
            ),
        )


def gdn_layers(ranks: int, tensor: dist.ProcessGroup) -> Iterator[tuple[str, Build]]:
    """As many key heads as value heads, and half as many."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    for key_heads in (ranks, 2 * ranks):
        config = settings(
            normalization="RMSNorm",
            activation_func=torch.nn.functional.silu,
            linear_key_head_dim=4,
            linear_value_head_dim=3,
            linear_num_key_heads=key_heads,
            linear_num_value_heads=2 * ranks,
        )
        yield (
            f"G, {key_heads} key heads",
            lambda group, config=config: GatedDeltaNet(
                config, parts, 1, pg_collection=groups_of(tensor, group)
            ).double(),
        )


def settings(**given: object):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        **given,
    )


def groups_of(tensor: dist.ProcessGroup, context: dist.ProcessGroup):
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection(tp=tensor, cp=context)


def compare(whole: torch.nn.Module, sharded: torch.nn.Module, group: dist.ProcessGroup) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    torch.manual_seed(group.size())
    for parameter in whole.parameters():
        parameter.data.uniform_(-1, 1)
    sharded.load_state_dict(whole.state_dict())
    ranks = group.size()
    layout = zigzag(2 * ranks * 5, ranks)
    x, dout = torch.randn(2, layout.tokens, 2, HIDDEN, dtype=torch.float64)
    out, dx, *gradients = outcome(whole, x, dout)
    expected = [*shards(layout, group, out, dx), *gradients]
    found = outcome(sharded, *shards(layout, group, x, dout))
    for gradient in found[2:]:
        dist.all_reduce(gradient, group=group)  # as Megatron sums those of all its ranks
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)
    )


def shards(layout: Layout, group: dist.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    return [layout.shard(tensor, group.rank(), 0) for tensor in tensors]


def outcome(layer: torch.nn.Module, x: Tensor, dout: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    out = layer(x, None)[0]
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], dout)]
