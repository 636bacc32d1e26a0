"""The sinks of Megatron's softmax types, under the name and with the shape of Megatron's own."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)


def add_softmax_offset(module: MegatronModule, pg_collection: Any) -> None:
    """Give a core attention its `softmax_offset`, [heads of this tensor-parallel rank].

    None for the softmax type vanilla, zeros for off-by-one, a parameter for learnable.

    Args:
        module: the core attention.
        pg_collection: Megatron's process groups; None for those of `parallel_state`.
    """
    config = module.config
    if config.softmax_type == "vanilla":
        module.softmax_offset = None
        return
    shape = config.num_attention_heads // _tensor_parallel(pg_collection).size()
    # Made where Megatron makes it, because what is drawn for a seed depends on the device.
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    offset = torch.zeros(shape, dtype=config.params_dtype, device=device)
    if config.softmax_type == "off-by-one":
        module.register_buffer("softmax_offset", offset, persistent=False)
        return
    parameter = torch.nn.Parameter(offset)
    if config.perform_initialization:
        config.init_method(parameter)
    # Without it Megatron would leave those of all but the first rank out of the gradient norm.
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    module.register_parameter("softmax_offset", parameter)


def sharded_softmax_offset(
    module: MegatronModule,
    pg_collection: Any,
    with_extra_state: bool,
    prefix: str,
    offsets: tuple[tuple[int, int, int], ...],
    metadata: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the sharded state of a core attention: what Megatron's own saves and loads.

    Beside the sink that is, `with_extra_state`, TransformerEngine's, empty as it is without FP8.
    """
    if module.config.softmax_type != "learnable":
        return {}
    state = module.state_dict(prefix="", keep_vars=True)
    if with_extra_state:
        state["_extra_state"] = torch.empty(0, dtype=torch.uint8)
    return make_sharded_tensors_for_checkpoint(
        state,
        prefix,
        {"softmax_offset": 0},
        offsets,
        tp_group=_tensor_parallel(pg_collection),
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )


def _tensor_parallel(pg_collection: Any) -> dist.ProcessGroup:
    return pg_collection.tp if pg_collection else parallel_state.get_tensor_model_parallel_group()
