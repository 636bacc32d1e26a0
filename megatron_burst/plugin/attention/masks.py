"""The masks of the layers of one model."""

import torch
import torch.distributed as dist

from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.plugin.attention.block_mask import load_block_mask
from megatron_burst.plugin.attention.documents import PackedDocuments
from megatron_burst.transport.objects import check_agreement


class Masks:
    """The masks of one model's layers, with the table of --burst-block-mask if there is one."""

    def __init__(self, file: str | None) -> None:
        self.table = None if file is None else load_block_mask(file)

    def of(self, is_causal: bool, window: int | None, documents: PackedDocuments) -> Mask:
        """Return the mask of a layer; a query sees at most `window` keys before it.

        Each of the samples that a sequence is made of is under the block mask.
        """
        if (is_causal, window) not in documents.masks:
            table, bounds = self.table, documents.bounds or None
            if table is not None and documents.samples > 1:
                table = torch.block_diag(*[table] * documents.samples).bool()
            documents.masks[is_causal, window] = (Mask.causal if is_causal else Mask.full)(
                window=window, documents=bounds, lengths=documents.lengths, block_table=table
            )
        return documents.masks[is_causal, window]

    def compare(self, timeout_seconds: float) -> None:
        """Raise a ValueError if the job's ranks have read different files: a collective call."""
        if self.table is not None and dist.is_initialized():
            assert dist.group.WORLD is not None
            digest = str(Mask.full(block_table=self.table))
            what = "the contents of --burst-block-mask"
            check_agreement(dist.group.WORLD, what, digest, timeout_seconds)
