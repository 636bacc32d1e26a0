"""What the layers of one model share."""

from collections.abc import Callable
from typing import Any

from megatron_burst.config import BurstConfig, Check, LayoutName
from megatron_burst.plans.visibility.layout import Layout, zigzag
from megatron_burst.plugin.attention.contexts import Contexts
from megatron_burst.plugin.attention.documents import PackedDocuments, Reader
from megatron_burst.plugin.attention.masks import Masks
from megatron_burst.plugin.attention.recompute import Checkpoints
from megatron_burst.plugin.attention.verify import Verification


class SharedState:
    """The settings of a model's attention, and what its layers make of them together.

    Args:
        config: the settings.
        tokens: of a micro-batch on a rank, by which the Ulysses degree is chosen; None: not known.

    Raises:
        ValueError: --burst-block-mask cannot be read.
    """

    def __init__(self, config: BurstConfig, tokens: int | None = None) -> None:
        self.config = config
        self.masks = Masks(config.block_mask)
        self.contexts = Contexts(config, tokens, self.masks)
        self.follows_layout = config.layout is LayoutName.ZIGZAG
        fraction, self.checkpoints = config.recompute_fraction, None
        if fraction is not None and fraction < 1:
            self.checkpoints = Checkpoints(fraction, config.recompute_offload)
        verifies = config.check is Check.REFERENCE
        self.verification = Verification(self.masks.table) if verifies else None
        self.scan_layout: Callable[[int, int], Layout] = zigzag  # of layers with a state
        self.whole = PackedDocuments()  # what a sequence without documents is
        self.read = Reader()

    def __deepcopy__(self, _: Any) -> "SharedState":
        """Return itself: Megatron copies specs that hold it."""
        return self

    def follow_layout(self) -> None:
        """Let layers run: from now on tokens come in the layout of the settings."""
        self.follows_layout = True
