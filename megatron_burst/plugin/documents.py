"""The documents of one micro-batch, as they travel from the model to every layer's attention."""

from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class Documents(PackedSeqParams):
    """Where documents begin, in a form that leaves everything but our attention as it is.

    Its format is not "thd", so that Megatron keeps tensors [s, b, h, d] and applies rotary
    embeddings row by row. It belongs to one micro-batch: a layer that is computed again, between
    others of other micro-batches, gets its own.
    """

    bounds: tuple[int, ...] = ()  # of each document, and last where the sequence ends
    samples: int = 1  # how many of the data set's samples the sequence is made of


def read_documents(packed: PackedSeqParams, ranks_of_a_sequence: int) -> Documents:
    """Read Megatron's boundaries: one copy to the host a micro-batch.

    Args:
        packed: with the boundaries in the whole sequence, as all ranks have them.
        ranks_of_a_sequence: over how many ranks the rows of an expert layer are spread.

    Raises:
        ValueError: samples of different lengths, or documents padded to a multiple of the ranks.
    """
    _check(packed)
    # The data set fills the list up with the last value.
    bounds = tuple(dict.fromkeys(packed.cu_seqlens_q.tolist()))
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
    )


def _check(packed: Any) -> None:
    if packed.cu_seqlens_q is None:
        raise ValueError("packed_seq_params without cu_seqlens_q does not say where documents are")
    if packed.local_cp_size is not None or packed.cp_group is not None:
        raise ValueError(
            "packed_seq_params brings a context-parallel group of its own: "
            "drop --hybrid-context-parallel"
        )
    if packed.cu_seqlens_q_padded is not None:
        raise ValueError(
            "documents padded to a multiple of the ranks come in another order than Megatron's "
            "zigzag over the whole sequence: drop --sft"
        )
