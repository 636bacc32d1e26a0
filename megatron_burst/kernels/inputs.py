"""What the public functions refuse of what they are given, whatever they compute."""

from torch import Tensor


def check_numbers(**numbers: object) -> None:
    """Raise a TypeError for a tensor that asks for a gradient in the place of a number."""
    for name, x in numbers.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise TypeError(
                f"{name} is a number, which gets no gradient, and got a tensor that asks for one: "
                "a learned factor belongs into the tensors"
            )


def check_local(**tensors: Tensor) -> None:
    """Raise a TypeError for a DTensor: what is computed and sent is a rank's own."""
    for name, x in tensors.items():
        if hasattr(x, "to_local"):
            raise TypeError(
                f"{name} is a DTensor: give {name}.to_local() or {name}.full_tensor(); fully_shard "
                "gathers a weight within the forward of the module that holds it"
            )
