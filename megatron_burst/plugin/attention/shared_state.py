"""What the layers of one model share."""

from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.plans.visibility.layout import Layout, contiguous, zigzag
from megatron_burst.plugin.attention.contexts import Contexts
from megatron_burst.plugin.attention.documents import PackedDocuments, Reader
from megatron_burst.plugin.attention.masks import Masks
from megatron_burst.plugin.attention.recompute import Checkpoints
from megatron_burst.plugin.attention.verify import Verification
from megatron_burst.plugin.training_config import Check, LayerConfig


class SharedState:
    """The settings of a model's attention, and what its layers make of them together.

    Args:
        config: the settings.
        tokens: of a micro-batch on a rank, by which the Ulysses degree is chosen; None: not known.
        batch: sequences of that micro-batch.
        layer_config: what its layers do around attention (default: nothing).
        moves: whether tokens may leave Megatron's zigzag, as they do in micro-batches with
            documents and in other layouts, and where layers with a state pass it.

    Raises:
        ValueError: --burst-block-mask cannot be read.
    """

    def __init__(
        self,
        config: BurstConfig,
        tokens: int | None = None,
        batch: int = 1,
        *,
        layer_config: LayerConfig | None = None,
        moves: bool = False,
    ) -> None:
        self.config, self.layer_config = config, layer_config or LayerConfig()
        self.masks = Masks(config.block_mask)
        self.contexts = Contexts(config, self.layer_config, tokens, self.masks, batch)
        # Mamba-2 and gated delta nets on contiguous shards; else Megatron's, in its zigzag.
        self.passes_states = moves or not config.is_zigzag
        self.follows_layout = not self.passes_states
        fraction, self.checkpoints = config.recompute_fraction, None
        if fraction is not None and fraction < 1:
            self.checkpoints = Checkpoints(fraction, self.layer_config.recompute_offload)
        verifies = self.layer_config.check is Check.REFERENCE
        self.verification = Verification(self.masks.table) if verifies else None
        self.whole = PackedDocuments()  # what a sequence without documents is
        self.read = Reader()

    def __deepcopy__(self, _: Any) -> "SharedState":
        """Return itself: Megatron copies specs that hold it."""
        return self

    def scan_layout(self, tokens: int, ranks: int) -> Layout:
        """Return the layout in which layers with a state run."""
        return contiguous(tokens, ranks) if self.passes_states else zigzag(tokens, ranks)

    def follow_layout(self) -> None:
        """Let layers run: from now on tokens come in the layout of the settings."""
        self.follows_layout = True
