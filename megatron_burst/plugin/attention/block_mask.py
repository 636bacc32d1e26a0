"""Reads the table of --burst-block-mask."""

from pathlib import Path

import numpy
import torch
from torch import Tensor


def load_block_mask(file: str) -> Tensor:
    """Return the table in a .npy file: bool [blocks of queries, blocks of keys].

    Raises:
        ValueError: the file cannot be read, or holds no square table of booleans.
    """
    try:
        table = numpy.load(Path(file), allow_pickle=False)
    except Exception as error:  # whatever parsing a garbled header brings
        raise ValueError(f"--burst-block-mask {file} cannot be read: {error}") from error
    shape = getattr(table, "shape", None)  # of an .npz archive none
    if shape is None or len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise ValueError(f"--burst-block-mask {file} is no square table: its shape is {shape}")
    if table.dtype != bool:
        raise ValueError(
            f"--burst-block-mask {file} holds {table.dtype}, not booleans: save it with "
            ".astype(bool)"
        )
    return torch.from_numpy(table.copy())
