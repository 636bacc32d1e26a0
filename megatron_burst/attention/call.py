"""What was planned and chosen for an attention call: all of it but its tensors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from megatron_burst.attention.head_exchange import HeadExchange
from megatron_burst.attention.launches import Launch, Launches, Parts, rows_of
from megatron_burst.attention.sums import WireDtypes
from megatron_burst.kernels import Kernel, KernelInput
from megatron_burst.plans.schedules.plan import Item, Plan
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.lowered import Form, Lowered


@dataclass(frozen=True, slots=True)
class AttentionPlan:
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
    forward_launches: Launches = field(kw_only=True)
    backward_launches: Launches = field(kw_only=True)
    parts: Parts = field(default_factory=dict)
    is_direct: bool = False  # whether a pass is a direct exchange
    moves_kv: bool = False  # in either pass
    moves_queries: bool = False  # in the backward
    choice: str = ""  # how messages go, in words that are the same on all ranks
    schedules: str = ""  # of both passes, by name
    known: dict[tuple[str, int], tuple[Plan, Lowered]] = field(default_factory=dict)
    """What was lowered, by the pass and the identity of its plan."""

    def lowered(self, name: str, plan: Plan, forms: Callable[[Item], Iterable[Form]]) -> Lowered:
        """Return a pass made ready for its messages, once for all tensors of its shapes."""
        key = name, id(plan)
        if key not in self.known:
            self.known[key] = plan, self.communicator.lower(name, plan, forms)
        return self.known[key][1]

    def of_rows(
        self, launch: Launch, q: Tensor, k: Tensor, v: Tensor, leaves_room: bool = False
    ) -> KernelInput:
        """Take the rows of a kernel call out of the blocks that it reads."""
        (q,), (k, v) = rows_of((q,), launch.queries), rows_of((k, v), launch.keys)
        settings = launch.band, self.scale, self.soft_cap, launch.packing, leaves_room
        return KernelInput(q, k, v, *settings)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is done before the first message of `ring_attention`."""

    call: AttentionPlan
    chunks: int  # of the heads
    exchange: HeadExchange | None = None
    copies: int = 1  # of kv heads

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans of messages."""
        call = self.call.forward_plan, self.call.backward_plan
        return (*call, self.exchange.plan) if self.exchange else call

    def __str__(self) -> str:
        chunks = f", heads in {self.chunks} chunks" if self.chunks > 1 else ""
        return f"kernel {self.call.kernel.name}{chunks}, {self.call.choice}"
