"""What Megatron's layers with a state share where their ranks pass states on contiguous shards."""

import copy
import inspect
import logging
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from megatron_burst.plugin.attention.documents import PackedDocuments, ranks_of
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.scans.bytes_sent import shapes_in
from megatron_burst.plugin.scans.shards import Shard, shard_of

logger = logging.getLogger(__name__)

OTHER_GROUP = (
    "over the ranks of the model's own group, and packed_seq_params brings another cp_group: "
    "drop it"
)


class OverRanks:
    """Goes before Megatron's class, whose constructor it calls.

    The parameters are Megatron's. Where the ranks hold another layout and no documents come, its
    whole forward is, too, with its all-to-all over heads, which wants zigzag.
    """

    symbol: str  # in the pattern of a hybrid model; of the classes that follow
    config: Any
    layer_number: int
    tp_group: Any

    def __init__(self, *given: Any, shared: SharedState, pg_collection: Any, **named: Any) -> None:
        self_reliant = copy.copy(pg_collection)
        passes = shared.passes_states and pg_collection.cp.size() > 1
        if passes:  # all heads are here
            self_reliant.cp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        super().__init__(*given, pg_collection=self_reliant, **named)  # type: ignore[call-arg]
        self.pg_collection, self.shared, self._passes = pg_collection, shared, passes
        self._call = inspect.signature(super().forward)  # type: ignore[misc]

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        """Return the output [T, B, hidden] and its bias, as Megatron's does, of its arguments."""
        call = self._call.bind(hidden_states, *given, **named).arguments
        inference = call.get("inference_context") or call.get("inference_params")
        # Under sequence parallelism the rows are spread over more ranks.
        spread = self.tp_group.size() if self.config.sequence_parallel else 1
        tokens = len(hidden_states) * spread
        shard = self.shard(tokens, call.get("packed_seq_params"), inference)
        if shard is None:
            self.log_bytes(None, tokens, hidden_states.element_size())
            return super().forward(hidden_states, *given, **named)  # type: ignore[misc]
        return self.over_ranks(hidden_states, shard)

    def over_ranks(self, hidden_states: Tensor, shard: Shard) -> tuple[Tensor, Tensor | None]:
        """Return the same of a rank's contiguous shard, with the states of the ranks before it."""
        raise NotImplementedError

    def shard(self, tokens: int, packed: Any, inference: Any) -> Shard | None:
        """Return where documents begin in a rank's rows; None where Megatron's forward is right.

        Raises:
            ValueError: ours is needed, and cannot be.
        """
        group = self.pg_collection.cp
        theirs, size = (getattr(packed, name, None) for name in ("cp_group", "local_cp_size"))
        is_other = theirs is not None and ranks_of(theirs) != ranks_of(group)
        if is_other or size not in (None, group.size()):
            raise ValueError(f"layer {self.layer_number} carries a state {OTHER_GROUP}")
        if isinstance(packed, PackedDocuments) and packed.bounds:
            bounds: tuple[int, ...] | None = packed.bounds
            fault = group.size() > 1 and not self._passes
        elif self._passes:
            bounds, fault = None, packed is not None or not self.shared.follows_layout
        else:
            return None
        if fault or inference is not None:
            raise ValueError(
                f"layer {self.layer_number} passes states from rank to rank in training alone, in "
                "a model that megatron_burst.plugin.hooks.sequence_hooks.SequenceHooks is attached "
                "to, of a SharedState with moves=True or a layout other than zigzag"
            )
        return shard_of(bounds, tokens, group.rank())

    def log_bytes(self, kernel: str | None, tokens: int, number_bytes: int) -> None:
        """Say once a model what runs and what it sends, by which the other way can be judged.

        `kernel` is what scans the shards; None: heads are exchanged.
        """
        ranks, name = self.pg_collection.cp.size(), type(self).__bases__[-1].__name__
        context = self.shared.contexts.of(self.config, self.pg_collection)
        if ranks == 1 or not context.should_log((name, tokens)):
            return
        shape = shapes_in(self.config, self.tp_group.size())[self.symbol]
        states = shape.by_states(ranks, number_bytes)
        heads = shape.by_heads(tokens, ranks, number_bytes)
        logger.info(
            "%s: %s; for a layer, a sequence and a pass a rank sends %.3g MiB of states on "
            "contiguous shards, %.3g MiB in an all-to-all over heads under zigzag; states are less "
            "from %d tokens a rank on",
            *(name, f"states are passed, scanned by {kernel}" if kernel else "heads are exchanged"),
            *(states / 2**20, heads / 2**20, shape.fewer_from(ranks, number_bytes)),
        )


def layer_apart(stacks: Iterable[tuple[Any, Sequence[str]]], *, rows_move: bool) -> str:
    """Say which layer would read rows in another layout than it has; empty if none would.

    Rows move by the symbols of a pattern, and a class that --spec brings knows nothing of that.

    Args:
        stacks: of a model, and the symbols of their layers.
        rows_move: whether they do; else it matters only who knows where documents begin.
    """
    for stack, kinds in stacks:
        for layer in stack.layers:
            is_scan = kinds[layer.layer_number - 1] in "MG"
            is_ours = any(isinstance(module, OverRanks) for module in layer.modules())
            if is_scan and not is_ours or is_ours and not is_scan and rows_move:
                mixer = getattr(layer, "mixer", getattr(layer, "self_attention", layer))
                return (
                    f"layer {layer.layer_number}, {kinds[layer.layer_number - 1]}, is a "
                    f"{type(mixer).__name__}: states are passed by MambaMixer in M and by "
                    "GatedDeltaNet in G alone: take --burst-layout zigzag without documents"
                )
    return ""
