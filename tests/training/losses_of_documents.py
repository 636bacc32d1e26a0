"""Runs a tiny model of Megatron on documents and on what differs by a document; run by tests.

Prints the largest difference of losses that must not differ, the smallest of those that must, and
the largest gradient, and how far losses of logits are from those that the model makes of labels.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

BOUNDS = (0, 1, 2, 33, 65, 66, 97, 98, 128)  # of 128 tokens on two ranks with chunks of 32
CHANGED = (33, 65)
ALONE = (33, 65)  # 32 tokens: a sequence of their own for up to eight ranks


def main() -> None:
    from megatron.training import argument_utils, arguments, initialize
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.models.hybrid import HybridModelBuilder

    args = arguments.parse_and_validate_args()
    kind, configure = GPTModelBuilder, argument_utils.gpt_config_from_args
    if args.hybrid_layer_pattern:
        kind, configure = HybridModelBuilder, argument_utils.hybrid_config_from_args
    config = configure(args)
    initialize.initialize_megatron(allow_no_cuda=True)
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = kind(config)
    (model,) = builder.build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
    losses = Losses(model, groups.cp)

    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 256, (2, 1, 128), generator=generator)
    usual = losses(tokens, labels, BOUNDS)
    usual.sum().backward()
    gradient = max(float(p.grad.abs().max()) for p in model.parameters())
    assert all(p.grad.isfinite().all() for p in model.parameters())

    changed = tokens.clone()
    changed[:, slice(*CHANGED)] = (changed[:, slice(*CHANGED)] + 1) % 256
    difference = (losses(changed, labels, BOUNDS) - usual).detach().abs()[0]
    inside = difference[slice(*CHANGED)]
    outside = torch.cat([difference[: CHANGED[0]], difference[CHANGED[1] :]])
    alone = losses(*(x[:, slice(*ALONE)] for x in (tokens, labels)), None)
    apart = (alone - usual[:, slice(*ALONE)]).detach().abs()
    together = losses(tokens, labels, (0, 128))
    by_logits = losses(tokens, labels, BOUNDS, from_logits=True)
    if dist.get_rank() == 0:
        print("leak", float(outside.max()))
        print("effect", float(inside.min()))
        print("alone", float(apart.max()))
        print("together", float((together - usual).detach().abs()[0, 2:].min()))
        print("gradient", gradient)
        print("logits", float((by_logits - usual).detach().abs().max()))


class Losses:
    """The losses of a whole sequence, of which each rank has the shard that Megatron gives it."""

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group

    def __call__(
        self,
        tokens: Tensor,
        labels: Tensor,
        bounds: tuple[int, ...] | None,
        *,
        from_logits: bool = False,  # of a call without labels
    ) -> Tensor:
        from megatron.core.packed_seq_params import PackedSeqParams

        from megatron_burst.plans.visibility.layout import zigzag

        layout, rank = zigzag(tokens.shape[1], self.group.size()), self.group.rank()
        positions = torch.arange(tokens.shape[1])[None]
        packed = None
        if bounds is not None:
            starts = torch.tensor(bounds)
            positions = torch.cat([torch.arange(n) for n in starts.diff()])[None]
            packed = PackedSeqParams("thd", cu_seqlens_q=starts.int(), cu_seqlens_kv=starts.int())
        mine = [layout.shard(x, rank, 1) for x in (tokens, positions, labels)]
        if from_logits:
            options = {"packed_seq_params": packed, "runtime_gather_output": True}
            logits = self.model(*mine[:2], None, **options)
            losses = cross_entropy(logits.transpose(1, 2), mine[2], reduction="none")
        else:
            losses = self.model(*mine[:2], None, labels=mine[2], packed_seq_params=packed)
        shards = [torch.empty_like(losses) for _ in range(layout.ranks)]
        dist.all_gather(shards, losses.detach(), group=self.group)
        shards[rank] = losses  # with its gradient
        return layout.unshard(shards, 1)
