"""The packed sequences (documents) of one micro-batch, handed from the model to every attention."""

import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_burst.plans.visibility.layout import Layout, zigzag_of_each
from megatron_burst.plans.visibility.mask import Mask

# With and without padding, of queries and keys.
_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass
class PackedDocuments(PackedSeqParams):
    """Where documents begin, in a form that leaves everything but our attention as it is.

    Its format is not "thd", so that Megatron keeps tensors [s, b, h, d] and applies rotary
    embeddings row by row. It belongs to one micro-batch: a layer that is computed again, between
    others of other micro-batches, gets its own.
    """

    bounds: tuple[int, ...] = ()  # of each document, and last where the sequence ends
    lengths: tuple[int, ...] | None = None  # of each without its padding; None: there is none
    samples: int = 1  # how many of the data set's samples the sequence is made of
    layout: Layout | None = None  # in which attention runs; None: that of the configuration
    brought: Layout | None = None  # in which the call's tensors come; None: zigzag of the whole
    rank: int | None = None  # of this process in `cp_group`; None: that of the model's own group
    masks: dict[tuple[bool, int | None], Mask] = field(default_factory=dict)  # by causality, window
    longest: int = field(init=False)  # tokens of a document

    def __post_init__(self) -> None:
        super().__post_init__()
        self.longest = max((end - start for start, end in pairwise(self.bounds)), default=0)


def read_documents(
    packed: PackedSeqParams,
    group: dist.ProcessGroup | None,
    ranks_of_a_sequence: int,
    *,
    apart: bool = False,
    layout_of: Callable[[tuple[int, ...]], Layout | None] = lambda _: None,
    moves: bool = False,
) -> PackedDocuments:
    """Read Megatron's boundaries: one copy to the host a micro-batch.

    Args:
        packed: with the boundaries in the whole sequence, as all ranks have them.
        group: the context-parallel group that runs it; None is this rank alone.
        ranks_of_a_sequence: over how many ranks the rows of an expert layer are spread.
        apart: whether the ranks hold each document in a zigzag of its own, as they do wherever
            `packed` has boundaries with padding; else the zigzag is that of the whole sequence.
        layout_of: says by their bounds which tokens the ranks hold of documents that are not apart;
            see `Layouts`.
        moves: whether it says so of those that are apart, too.

    Raises:
        ValueError: samples of different lengths, boundaries that are none, or documents that do not
            divide over the ranks.
    """
    apart = apart or packed.cu_seqlens_q_padded is not None
    ranks = len(ranks_of(group)) if apart else 1
    lengths, places = _read(packed, 2 * ranks if ranks > 1 else 1)
    tokens = sum(places)
    samples, rest = divmod(tokens, packed.tokens_per_sample or tokens)
    if rest:
        raise ValueError(
            f"the documents end at {tokens}, no multiple of {packed.tokens_per_sample} tokens a "
            "sample"
        )
    brought = zigzag_of_each(places, ranks) if apart else None
    bounds = (0, *accumulate(places))
    padded = packed.cu_seqlens_q_padded
    starts = packed.cu_seqlens_q if padded is None else padded
    return PackedDocuments(
        qkv_format="sbhd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        # By it expert layers undo the flattening, which needs all rows of a sample.
        tokens_per_sample=packed.tokens_per_sample if ranks_of_a_sequence == 1 else None,
        bounds=bounds,
        lengths=None if lengths == places else tuple(lengths),
        samples=samples,
        layout=layout_of(bounds) if moves or brought is None else brought,
        brought=brought,
    )


class Reader:
    """Reads the packed sequences of a micro-batch once, whichever layer asks first.

    For models without `SequenceHooks`: what they are given is Megatron's own "thd", in which the
    ranks hold each document in a zigzag of its own.
    """

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def __call__(
        self,
        packed: PackedSeqParams,
        group: dist.ProcessGroup | None,
        rotates: dist.ProcessGroup | None = None,
    ) -> PackedDocuments:
        """Return the documents, which run over `group`; raises what `read_documents` raises.

        `rotates` is the group by whose ranks Megatron applies rotary embeddings. Dev takes the
        micro-batch's, and gives its own back before core attention is computed again.
        """
        given = [*_boundaries(packed).values()]
        stamp = [(id(x), None if x.is_inference() else x._version) for x in given]
        stamp.append((id(group), None))
        known: tuple[object, PackedDocuments, object] | None = self._known.get(packed)
        if known is None or known[0] != stamp:
            if rotates is not None and (theirs := ranks_of(rotates)) != (ours := ranks_of(group)):
                raise ValueError(
                    f"packed_seq_params brings a cp_group of ranks {[*ours]}, and Megatron's layer "
                    f"rotates by its pg_collection.cp, of ranks {[*theirs]}: set that to the "
                    "cp_group for the forward, as Megatron's dev does, or append "
                    "SequenceHooks(shared) to the pre_wrap_hooks of the model's config"
                )
            # The tensors stay as long as their numbers, which others' could have afterwards.
            known = stamp, read_documents(packed, group, 1, apart=True), given
            self._known[packed] = known
        return known[1]


def _boundaries(packed: PackedSeqParams) -> dict[str, Tensor]:
    given = {name: getattr(packed, name) for name in _BOUNDARIES}
    return {name: x for name, x in given.items() if x is not None}


def _read(packed: PackedSeqParams, multiple: int) -> tuple[list[int], list[int]]:
    """Return the lengths of the documents without and with their padding.

    What the data set fills the list up with, documents of no tokens, is left out.
    """
    boundaries = _values(_boundaries(packed))
    if fault := next(_faults(boundaries), None):
        raise ValueError(fault)
    real = boundaries["cu_seqlens_q"]
    padded = boundaries.get("cu_seqlens_q_padded", real)
    each = [
        (stop - start, end - begin)
        for (start, stop), (begin, end) in zip(pairwise(real), pairwise(padded), strict=True)
    ]
    most = packed.max_seqlen_q if isinstance(packed.max_seqlen_q, int) else max(padded)
    for number, (length, place) in enumerate(each):
        name = f"document {number}, of {length} tokens"
        if length > place:
            raise ValueError(
                f"{name} by cu_seqlens_q, has {place} by cu_seqlens_q_padded: the second are the "
                "boundaries with padding"
            )
        if length > most:
            raise ValueError(
                f"{name}, is longer than max_seqlen_q = {most}, where rotary embeddings may end: "
                "pass the length of the longest"
            )
        if place % multiple:
            raise ValueError(
                f"{name}, takes {place}, no multiple of 2 x {multiple // 2} context-parallel ranks "
                f"= {multiple}: pad every document to one, and pass cu_seqlens_q_padded"
            )
    lengths, places = zip(*(pair for pair in each if pair[1]), strict=True)
    return list(lengths), list(places)


def _values(given: dict[str, Tensor]) -> dict[str, list[int]]:
    """Copy boundaries to the host, all at once."""
    if "cu_seqlens_q" not in given:
        raise ValueError("packed_seq_params without cu_seqlens_q does not say where documents are")
    if any(x.shape != given["cu_seqlens_q"].shape or x.ndim != 1 for x in given.values()):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items())
        raise ValueError(f"boundaries of documents are vectors of one length, got {shapes}")
    copied = torch.stack([x.long() for x in given.values()]).tolist()
    return dict(zip(given, copied, strict=True))


def _faults(boundaries: dict[str, list[int]]) -> Iterator[str]:
    """Say what is wrong with boundaries, by their names."""
    for name, values in boundaries.items():
        if len(values) < 2 or values[0] != 0 or values[-1] == 0:
            found = reprlib.repr(values)
            yield f"{name} goes from 0 to where the last document ends, got {found}"
        for number, (start, stop) in enumerate(pairwise(values)):
            if stop < start:
                yield f"{name} falls from {start} to {stop} at document {number}: pass sums"
        query = name.replace("_kv", "_q")
        if values != boundaries.get(query):
            shown = reprlib.repr(values), reprlib.repr(boundaries.get(query, []))
            yield f"{name} is {shown[0]} and {query} is {shown[1]}: self-attention has one of them"


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of the job that are in a group; None is this one alone."""
    if group is not None:
        return tuple(dist.get_process_group_ranks(group))
    return (dist.get_rank() if dist.is_initialized() else 0,)
