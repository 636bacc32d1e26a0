"""The sinks of Megatron's softmax types, under the name and with the shape of Megatron's own."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor


class ModuleWithSink(MegatronModule):
    """A core attention with its `softmax_offset`, [heads of this tensor-parallel rank].

    None for the softmax type vanilla, zeros for off-by-one; for learnable a parameter under
    Megatron's name, so that checkpoints fit any other core attention. TransformerEngine's also
    writes an `_extra_state`, the scales of FP8 attention: to plain checkpoints always, to
    distributed ones only beside a sink. Ours, which never runs in FP8, passes over it. It writes
    none to plain ones, where TransformerEngine can do without, and an empty one to distributed
    ones, where it cannot, if TransformerEngine's attention stood in the spec.
    """

    softmax_offset: Tensor | None

    def __init__(
        self, config: TransformerConfig, pg_collection: Any, saves_extra_state: bool
    ) -> None:
        super().__init__(config=config)
        self._pg_collection = pg_collection
        self._saves_extra_state = saves_extra_state
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        shape = config.num_attention_heads // self._tensor_parallel().size()
        # Made where Megatron makes it, because what is drawn for a seed depends on the device.
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        offset = torch.zeros(shape, dtype=config.params_dtype, device=device)
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", offset, persistent=False)
            return
        self.softmax_offset = torch.nn.Parameter(offset)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)
        # Without it Megatron would leave those of all but the first rank out of the gradient norm.
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the state for Megatron's checkpoints: nothing, or the sink, a shard a TP rank."""
        if self.config.softmax_type != "learnable":
            return {}
        state = self.state_dict(prefix="", keep_vars=True)
        if self._saves_extra_state:
            state["_extra_state"] = torch.empty(0, dtype=torch.uint8)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tensor_parallel(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _megatrons_group(self) -> dist.ProcessGroup:
        """Return the context-parallel group that Megatron's layer has at the moment."""
        groups = self._pg_collection
        return groups.cp if groups else parallel_state.get_context_parallel_group()

    def _tensor_parallel(self) -> dist.ProcessGroup:
        groups = self._pg_collection
        return groups.tp if groups else parallel_state.get_tensor_model_parallel_group()
