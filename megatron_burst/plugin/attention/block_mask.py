"""Reads the table of --burst-block-mask."""

from pathlib import Path

import numpy
import torch
from torch import Tensor

from megatron_burst.plans.visibility.mask import Mask


def load_block_mask(file: str) -> Tensor:
    """Return the table in a .npy file: bool [blocks of queries, blocks of keys].

    Raises:
        ValueError: the file cannot be read, or holds no square table of booleans.
    """
    try:
        table = torch.from_numpy(numpy.load(Path(file), allow_pickle=False))
        Mask.full(block_table=table)  # which refuses another
    except Exception as error:  # whatever parsing a garbled header brings
        raise ValueError(f"--burst-block-mask {file}: {error}") from error
    return table
