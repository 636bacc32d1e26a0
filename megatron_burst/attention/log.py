"""What attention says of its plans: in the log, and in a run's figures."""

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from megatron_burst.config import BurstConfig, LayoutName
from megatron_burst.kernels import Kernel, Request, passed_over
from megatron_burst.kernels.in_triton import why_plain
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.planning import mib
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.mask import Mask

logger = logging.getLogger(__name__)

_LINES = 64  # of one context: more than the kinds of calls of a model


def log_choice(
    config: BurstConfig,
    heads: int,
    grid: Grid,
    kernel: Kernel,
    request: Request,
    choice: str,
    shape: Shape,
) -> None:
    """Say what was chosen for calls of a shape, whose heads are shared among `heads` ranks."""
    reasons = passed_over(kernel, request) if config.kernel == "auto" else ""
    spread = exchanged = ""
    if heads > 1:
        spread = f"heads over {heads} ranks, "
        size = mib(shape.exchange_bytes(heads))
        exchanged = f"; the all-to-all over the heads sends {size} a rank forward and backward each"
    merged = ""
    if request.device.type == "cuda":
        plain = why_plain(request.device, request.dtype)
        merged = f", merged by plain torch ({plain})" if plain else ", merged by Triton"
    logger.info(
        "burst attention: %s on %d ranks (%s, %s%s), kernel %s%s; %s%s",
        config.algorithm,
        heads * grid.ranks,
        LayoutName.ZIGZAG if config.is_zigzag else config.layout,
        spread,
        grid,
        f"{kernel.name} ({reasons})" if reasons else kernel.name,
        merged,
        choice,
        exchanged,
    )


def kind_of(mask: Mask) -> tuple[object, ...]:
    """Return what lines are said of once.

    Documents, and where the forward of a second pass stops, change with every micro-batch.
    """
    is_early, documents = mask.query_stop is not None, mask.documents is not None
    return mask.is_causal, mask.window, documents, mask.block_table, is_early


class LogOnce:
    """Whether a rank is to log something: the first of the group, once, and not without end."""

    def __init__(self, rank: int) -> None:
        self._rank, self._said = rank, set[Hashable]()

    def __call__(self, about: Hashable) -> bool:
        """Return whether it is to say that now."""
        if self._rank or about in self._said or len(self._said) > _LINES:
            return False
        self._said.add(about)
        if is_full := len(self._said) > _LINES:
            logger.info("burst attention: says no more of further shapes and masks")
        return not is_full


@dataclass(slots=True)
class Means:
    """Of what was planned: documents of a sequence, and how uneven the work of the ranks is."""

    plans: int = 0
    documents: float = 0.0
    imbalance: float = 0.0  # FLOPs max/mean

    def add(self, mask: Mask, imbalance: float) -> None:
        """Count a plan in."""
        self.plans += 1
        documents = len(mask.documents or (0, 0)) - 1
        self.documents += (documents - self.documents) / self.plans
        self.imbalance += (imbalance - self.imbalance) / self.plans
