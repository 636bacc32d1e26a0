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
