"""What the public functions refuse of what they are given, whatever they compute."""

import torch.distributed as dist
from torch import Tensor


def as_number(name: str, x: float | None) -> float | None:
    """Return it as one of Python's own, which stays as it is until the backward; None is none.

    Raises:
        TypeError: it is a tensor that asks for a gradient.
    """
    if isinstance(x, Tensor) and x.requires_grad:
        raise TypeError(
            f"{name} is a number, which gets no gradient, and got a tensor that asks for one: "
            "a learned factor belongs into the tensors"
        )
    return None if x is None else float(x)


def check_local(**tensors: Tensor) -> None:
    """Raise a TypeError for a DTensor: what is computed and sent is a rank's own."""
    for name, x in tensors.items():
        if hasattr(x, "to_local"):
            raise TypeError(
                f"{name} is a DTensor: give {name}.to_local() or {name}.full_tensor(); fully_shard "
                "gathers a weight within the forward of the module that holds it"
            )


def check_group(group: dist.ProcessGroup | None) -> None:
    """Raise a TypeError for what is no process group."""
    if not isinstance(group, dist.ProcessGroup | None):
        what = "the process group that this rank is in, as mesh.get_group() is"
        raise TypeError(f"group must be {what}; got {group!r}")
