"""What is asked of the logits: which function of them the loss of a token is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss of a token: that of `linear_cross_entropy`, whose arguments these are.

    Raises:
        ValueError: a number is outside its range.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if self.z_loss < 0.0:
            raise ValueError(f"z_loss must not be negative, got {self.z_loss}")
        if self.logit_softcap is not None and self.logit_softcap <= 0.0:
            raise ValueError(f"logit_softcap must be positive or None, got {self.logit_softcap}")

    @property
    def statistics(self) -> int:
        """How many numbers a token's logits leave: largest, sum of exp, target, perhaps the sum."""
        return 4 if self.label_smoothing else 3
