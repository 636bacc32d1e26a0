"""The packed sequences (documents) of one micro-batch, handed from the model to every attention."""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_burst.plans.layout import Layout
from megatron_burst.plans.mask import Mask


@dataclass
class Documents(PackedSeqParams):
    """Where documents begin, in a form that leaves everything but our attention as it is.

    Its format is not "thd", so that Megatron keeps tensors [s, b, h, d] and applies rotary
    embeddings row by row. It belongs to one micro-batch: a layer that is computed again, between
    others of other micro-batches, gets its own.
    """

    bounds: tuple[int, ...] = ()  # of each document, and last where the sequence ends
    samples: int = 1  # how many of the data set's samples the sequence is made of
    brought: Layout | None = None  # in which the caller holds the tokens; None: zigzag of them all
    layout: Layout | None = None  # in which attention runs; None: that of the configuration
    masks: dict[tuple[bool, int | None], Mask] = field(default_factory=dict)  # by causality, window
    longest: int = field(init=False)  # tokens of a document

    def __post_init__(self) -> None:
        super().__post_init__()
        self.longest = max((end - start for start, end in pairwise(self.bounds)), default=0)


def digest_of(packed: PackedSeqParams) -> bytes:
    """Return what tells the documents of micro-batches apart; one copy to the host a tensor."""
    given = _tensors(packed)
    tensors = {id(x): x.cpu().numpy().tobytes() for x in given.values()}
    order = [*tensors]
    said: list[object] = [(name, order.index(id(x))) for name, x in given.items()]
    said += [packed.tokens_per_sample, packed.local_cp_size, packed.cp_group]
    return hashlib.sha256(b"|".join([*tensors.values(), repr(said).encode()])).digest()


def with_tensors(documents: Documents, host: PackedSeqParams, packed: PackedSeqParams) -> Documents:
    """Return documents that were read from `host`, with the equal tensors of `packed`."""
    names = {id(x): name for name, x in _tensors(host).items()}
    ours = copy.copy(documents)
    for name, x in _tensors(documents).items():
        setattr(ours, name, getattr(packed, names[id(x)]))
    return ours


def _tensors(packed: PackedSeqParams) -> dict[str, Tensor]:
    given = {part.name: getattr(packed, part.name) for part in fields(PackedSeqParams)}
    return {name: x for name, x in given.items() if isinstance(x, Tensor)}


def read_documents(
    packed: PackedSeqParams,
    group: dist.ProcessGroup | None,
    ranks_of_a_sequence: int,
    layout_of: Callable[[tuple[int, ...]], Layout | None] = lambda _: None,
) -> Documents:
    """Read Megatron's boundaries: one copy to the host a micro-batch.

    Args:
        packed: with the boundaries in the whole sequence, as all ranks have them.
        group: the context-parallel group of our attention; None is this rank alone.
        ranks_of_a_sequence: over how many ranks the rows of an expert layer are spread.
        layout_of: says by their bounds which tokens the ranks hold; see `Layouts`.

    Raises:
        ValueError: samples of different lengths, documents padded to a multiple of the ranks, or
            a context-parallel group of other ranks.
    """
    if packed.cu_seqlens_q is None:
        raise ValueError("packed_seq_params without cu_seqlens_q does not say where documents are")
    _check_group(packed, group)
    # The data set fills the list up with the last value.
    bounds = tuple(dict.fromkeys(packed.cu_seqlens_q.tolist()))
    padded = packed.cu_seqlens_q_padded
    # One document that fills the sequence is split as the whole sequence is.
    if padded is not None and not (padded is packed.cu_seqlens_q and len(bounds) == 2):
        raise ValueError(
            "documents padded to a multiple of the ranks come in another order than Megatron's "
            "zigzag over the whole sequence: drop --sft"
        )
    tokens_per_sample = packed.tokens_per_sample or bounds[-1]
    samples, rest = divmod(bounds[-1], tokens_per_sample)
    if rest:
        raise ValueError(
            f"the documents end at {bounds[-1]}, no multiple of {tokens_per_sample} tokens a sample"
        )
    return Documents(
        qkv_format="sbhd",
        cu_seqlens_q=packed.cu_seqlens_q,
        cu_seqlens_kv=packed.cu_seqlens_kv,
        # By it expert layers undo the flattening, which needs all rows of a sample.
        tokens_per_sample=packed.tokens_per_sample if ranks_of_a_sequence == 1 else None,
        bounds=bounds,
        samples=samples,
        layout=layout_of(bounds),
    )


def _check_group(packed: PackedSeqParams, group: dist.ProcessGroup | None) -> None:
    """The group of a micro-batch, where it brings one, is that of our attention."""
    ours = _ranks(group)
    theirs = ours if packed.cp_group is None else _ranks(packed.cp_group)
    size = packed.local_cp_size or len(theirs)
    if theirs != ours or size != len(ours):
        brought = f"cp_group of ranks {theirs}" if theirs != ours else f"local_cp_size = {size}"
        raise ValueError(
            f"packed_seq_params brings a {brought}, and our attention runs over ranks {ours}: "
            "drop --hybrid-context-parallel"
        )


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    if group is not None:
        return dist.get_process_group_ranks(group)
    return [dist.get_rank() if dist.is_initialized() else 0]
