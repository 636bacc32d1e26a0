"""What was planned and chosen for an attention call: all of it but its tensors."""

from dataclasses import dataclass, field

from torch import Tensor

from megatron_burst.attention.rows import DeviceCall, DeviceCalls, Parts, rows_of
from megatron_burst.attention.sums import WireDtypes
from megatron_burst.kernels import Kernel, TileCall
from megatron_burst.plans.plan import Plan
from megatron_burst.transport.comm import Communicator


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """All of one attention call but its tensors."""

    forward_plan: Plan
    backward_plan: Plan
    kernel: Kernel
    scale: float
    communicator: Communicator
    wire: WireDtypes = WireDtypes()  # of gradients
    soft_cap: float | None = None
    first_saved_row: int = 0  # of a call with a memory: see `AttentionMemory`
    sends_latents: bool = False  # in the place of K and V
    leaves_room: bool = False  # for messages, see `room_pays`
    forward_calls: DeviceCalls = field(kw_only=True)
    backward_calls: DeviceCalls = field(kw_only=True)
    parts: Parts = field(default_factory=dict)

    def of_rows(
        self, some: DeviceCall, q: Tensor, k: Tensor, v: Tensor, leaves_room: bool = False
    ) -> TileCall:
        """Take the rows of a kernel call out of the blocks that it reads."""
        (q,), (k, v) = rows_of((q,), some.queries), rows_of((k, v), some.keys)
        settings = some.band, self.scale, self.soft_cap, some.packing, leaves_room
        return TileCall(q, k, v, *settings)
