"""A GPT of our layer spec whose micro-batches run over 4, 2 and 1 of four ranks; run by tests.

The groups are Megatron's of --hybrid-context-parallel; the model's own is of two ranks. Prints how
far logits and gradients are from those of each document alone.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.logits_of_documents import Alone, Run, build, distance, documents, in_thd, start

SIZES = (4, 1, 2, 4)  # of the groups, one micro-batch behind the other
KINDS = {"latent": "zigzag", "balanced": "balanced"}


def main() -> None:
    from megatron.core import parallel_state

    model_groups, alone = start()
    of_size = parallel_state.get_hybrid_data_context_parallel_groups
    groups = {1: alone.cp, **{size: of_size(group_size=size) for size in (2, 4)}}
    for name, layout in KINDS.items():
        apart = compare(name, layout, groups, model_groups, alone)
        if dist.get_rank() == 0:
            for what, value in apart.items():
                print(f"apart {name} {what} {value}")


def compare(
    name: str, layout: str, groups: dict[int, Any], model_groups: Any, alone: Any
) -> dict[str, float]:
    """All micro-batches under way at once."""
    from megatron_burst import BurstConfig
    from megatron_burst.plugin.attention.shared_state import SharedState
    from megatron_burst.plugin.hooks.sequence_hooks import SequenceHooks

    shared = SharedState(BurstConfig(layout=layout, mla="latent" if name == "latent" else "auto"))
    ours, reference = build(name, model_groups, shared), build(name, alone)
    reference.load_state_dict(ours.state_dict())
    SequenceHooks(shared)([ours])
    found = [Batch(ours, name, number, groups[size]) for number, size in enumerate(SIZES)]
    sum(batch.loss for batch in found).backward()
    apart = {"logits": 0.0, "weights": 0.0}
    for batch in found:
        some = [Alone(reference, *cut) for cut in batch.documents]
        share = float(batch.rank == 0)  # of a group one rank
        (share * sum(one.loss for one in some)).backward()
        whole = batch.mine(batch.spread([one.logits.detach() for one in some]))
        is_text = batch.mine(batch.spread([torch.ones(len(one.weights), 1) for one in some]))
        apart["logits"] = max(apart["logits"], distance(is_text * batch.logits.detach(), whole))
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        dist.all_reduce(theirs.grad)
        apart["weights"] = max(apart["weights"], distance(mine.grad, theirs.grad))
    worst = torch.tensor([*apart.values()])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(apart, worst.tolist(), strict=True))


class Batch(Run):
    """Documents of a group: padded and each in a zigzag, or packed in a zigzag of the whole."""

    def __init__(self, model: Any, name: str, number: int, group: dist.ProcessGroup) -> None:
        from megatron_burst.plans.visibility.layout import zigzag_of_each

        self.rank, ranks, is_padded = group.rank(), group.size(), name != "balanced"
        first, multiple = dist.get_process_group_ranks(group)[0], 2 * ranks
        lengths = [9 + 4 * number, 1, 20 + first]
        lengths.append(-sum(lengths) % 8 + 8)
        self.documents = documents(10 * number + first, lengths)
        self._places = [
            -(-length // multiple) * multiple if is_padded else length for length in lengths
        ]
        whole = [sum(lengths)]
        self._layout = zigzag_of_each(self._places if is_padded else whole, ranks)
        cut = [self.spread([*each]) for each in zip(*self.documents, strict=True)]
        packed = in_thd(
            lengths,
            self._places,
            cp_group=None if ranks == 1 and name != "latent" else group,
            # Megatron 0.19 refuses one in MLA.
            local_cp_size=None if name == "latent" else ranks,
        )
        self.logits = self.run(model, self.mine(cut[0])[None], packed)
        self.loss = (self.logits * self.mine(cut[1])).sum()

    def spread(self, rows: list[Tensor]) -> Tensor:
        """Return the rows of the documents one behind the other, with their padding."""
        pairs = zip(rows, self._places, strict=True)
        return torch.cat(
            [part for x, place in pairs for part in (x, x.new_zeros(place - len(x), *x.shape[1:]))]
        )

    def mine(self, whole: Tensor) -> Tensor:
        return self._layout.shard(whole, self.rank, 0)
