"""One rank's attention on fake CUDA tensors: what it does, without a device or other ranks."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.attention import preparing
from megatron_burst.attention.call import AttentionPlan
from megatron_burst.attention.head_chunks import in_chunks
from megatron_burst.attention.kv import KeysAndValues
from megatron_burst.attention.passes import backward, forward
from megatron_burst.attention.preparing import prepare
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.plan import Channel, Item, Send
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.tools.one_rank import EmptyKernel
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.groups import members_of_channels
from megatron_burst.transport.lowered import Batch as Messages
from megatron_burst.transport.lowered import Message
from megatron_burst.transport.memory import side_by_side
from tests.counting import Counting


class Posted(NamedTuple):
    """One message, as an end of it posts it."""

    sends: bool
    peer: int
    item: Item
    channel: Channel
    bytes: int


type Batch = Sequence[Posted]  # messages that are posted together


class Recorder(Communicator):
    """Remembers what is posted, in this order.

    What torch's allocator owns of it stays until the end, as where the host is ahead of the device:
    NCCL's group records it on its stream. A rank's own blocks are aliases, see `message_of`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._watchdog = None  # nothing gets through
        self.batches: list[Batch] = []
        self.held: list[Any] = []

    def start(self, batch: Messages, own: Any, memory: Tensor) -> Any:
        self.batches.append([_posted(m, m.bytes(own, memory)) for m in batch.messages])
        self.held += (m.bytes(own, memory).untyped_storage() for m in batch.messages if m.place)
        return super().start(batch, own, memory)


def _posted(message: Message, sent: Tensor) -> Posted:
    transfer = message.transfer
    ends = isinstance(transfer, Send), transfer.peer, transfer.item, transfer.channel
    return Posted(*ends, sent.nbytes)


class Pass(NamedTuple):
    """What a forward or a backward does beside its attention kernels; bytes in those of q."""

    kernels: int
    bytes: float
    peak: float  # most that lives beyond q, k, v (and dout, out and lse in the backward)
    made_by: dict[str, float]  # what lives then, by the file that made it


@dataclass(frozen=True)
class Counted:
    """One rank's forward and backward."""

    forward: Pass
    backward: Pass
    call: AttentionPlan
    batches: Sequence[Batch]


def count(
    ranks: int,
    nodes: int,
    backward_ring: str,
    mask: Mask,
    *,
    tokens: int = 1024,
    kv_heads: int = 4,
    topology: str = "",
    kernel: Any = None,
    rank: int | None = None,
    head_chunks: int = 1,
    layout: Layout | None = None,
    memory_limit: float = math.inf,
) -> Counted:
    """Count a rank's work in bfloat16, [1, tokens, heads, 128]; 8 heads of one kv head, else 4."""
    topology = topology or ("flat" if nodes == 1 else "double")
    config = BurstConfig(backward=backward_ring, topology=topology)
    rank = ranks // 2 if rank is None else rank
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        node_of = [r * nodes // ranks for r in range(ranks)]
        grid, _ = choose_grid(config.shape_of_rings, node_of)
        wanted = members_of_channels(grid, head_groups(node_of, 1))
        channels = {c: dist.new_group(list(range(ranks))) for c in wanted}
        recorder = Recorder(range(ranks), channels, 60.0)
        world, heads_apart = dist.group.WORLD, head_groups(node_of, 1)
        made = config, world, grid, node_of, recorder, heads_apart
        context = BurstContext(*made, memory_limit=memory_limit)
        with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
            patch.setattr(preparing, "select_kernel", lambda *_: kernel or EmptyKernel())
            patch.setattr(preparing, "log_choice", lambda *_: None)  # asks what GPU there is
            heads = max(4, 8 * (kv_heads == 1))
            q, k, v = (
                torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16, device="cuda")
                for heads in (heads, kv_heads, kv_heads)
            )
            k, v = side_by_side((k, v))  # as attention keeps them
            chunk = (x[:, :, : x.shape[2] // head_chunks] for x in (q, k, v))
            call = prepare(context, *chunk, mask, 1.0, layout=layout)

            def there_of(q: Tensor, k: Tensor, v: Tensor) -> Any:
                return forward(q, KeysAndValues(rank, k, v), call)

            def back_of(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *finished: Tensor) -> Any:
                return backward(dout, q, KeysAndValues(rank, k, v), *finished, call)

            with Counting((q, k, v)) as there:
                out, lse = in_chunks(head_chunks, "forward", there_of, q, k, v)
            dout = torch.empty_like(out)
            with Counting((q, k, v, out, lse, dout)) as back:
                in_chunks(head_chunks, "backward", back_of, dout, q, k, v, out, lse)
            return Counted(*(_pass(c, q.nbytes) for c in (there, back)), call, recorder.batches)
    finally:
        dist.destroy_process_group()


def _pass(counted: Counting, unit: int) -> Pass:
    made_by = {name: size / unit for name, size in counted.most.most_common()}
    work = counted.kernels.total(), counted.bytes.total() / unit
    return Pass(*work, counted.peak / unit, made_by)


class _End(NamedTuple):
    """A message at one of its ends, `number` of its channel from source to target."""

    sends: bool
    source: int
    target: int
    number: int
    what: tuple[Any, ...]


def check_order(by_rank: Sequence[Sequence[Batch]]) -> None:
    """Run all ranks' batches, on each one after the other, as NCCL does; all must get through.

    A batch does when the other ends of all its messages are in the first batches of their ranks.
    """
    left = [_numbered(rank, batches) for rank, batches in enumerate(by_rank)]
    posted: set[_End] = set()
    moved = True
    while moved:
        moved = False
        for batches in left:
            posted.update(*batches[:1])
        for batches in left:
            if batches and all(e._replace(sends=not e.sends) in posted for e in batches[0]):
                batches.pop(0)
                moved = True
    stuck = {rank: batches[0] for rank, batches in enumerate(left) if batches}
    assert not stuck, f"nobody can go on: {stuck}"


def _numbered(rank: int, batches: Sequence[Batch]) -> list[list[_End]]:
    numbers: Counter[tuple[Any, ...]] = Counter()
    found: list[list[_End]] = []
    for batch in batches:
        found.append([])
        for sends, peer, *what in batch:
            ends = (rank, peer) if sends else (peer, rank)
            numbers[*ends, what[1]] += 1
            found[-1].append(_End(sends, *ends, numbers[*ends, what[1]], tuple(what)))
    return found
