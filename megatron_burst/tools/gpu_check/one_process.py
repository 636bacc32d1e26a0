"""All ranks of a group as threads of one process, on one device.

What NCCL does not do, several ranks on one GPU, and gloo only by way of the host. Messages are
matched as NCCL matches them: between two ranks and on a channel, in the order in which both post.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor

from megatron_burst.plans.schedules.plan import Channel, Kind, Receive
from megatron_burst.transport.comm import Communicator, Posted
from megatron_burst.transport.errors import CommunicationError
from megatron_burst.transport.lowered import Batch

_NAN = 0xFF  # all bytes of a NaN, of any dtype

type _Key = tuple[int, int, Channel, int]  # from whom, to whom, where, the how-manieth there


class Post:
    """What is on its way between the ranks, and what went wrong first."""

    def __init__(self, patience: float = 300.0) -> None:
        self.patience = patience  # seconds that a rank waits for another
        self.sent: dict[_Key, Tensor] = {}
        self.changed, self.error = threading.Condition(), ""

    def put(self, key: _Key, tensor: Tensor) -> None:
        """Send a message."""
        with self.changed:
            self.sent[key] = tensor
            self.changed.notify_all()

    def fail(self, error: str) -> None:
        """Let all who wait know what went wrong, the first time."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def take(self, key: _Key, what: str) -> Tensor:
        """Wait for a message, or until a rank has failed."""
        with self.changed:
            self.changed.wait_for(lambda: self.error or key in self.sent, self.patience)
            if self.error or key not in self.sent:
                raise CommunicationError(self.error or f"nobody sent what was to {what}")
            return self.sent.pop(key)


class ThreadedCommunicator(Communicator):
    """The transport of one rank.

    What will be received is NaN from when it is posted until it has landed, and what is sent must
    stay as it was until then: the plan says when both are free.
    """

    def __init__(self, rank: int, ranks: int, post: Post) -> None:
        super().__init__(range(ranks), {}, post.patience)
        self._rank, self._post = rank, post
        self._posted: Counter[tuple[int, int, Channel]] = Counter()

    def start(self, batch: Batch, own: Mapping[Kind, Tensor], memory: Tensor) -> Posted:
        """Send at once; poison what is to be received."""
        self.bytes_by_channel[batch.channel] += batch.bytes_sent
        works: list[Any] = []
        for message in batch.messages:
            transfer, tensor = message.transfer, message.bytes(own, memory)
            ends, receives = (self._rank, self._ranks[transfer.peer]), isinstance(transfer, Receive)
            way = *(ends[::-1] if receives else ends), transfer.channel
            self._posted[way] += 1
            key = *way, self._posted[way]
            if receives:
                works.append((self.name_of(transfer), tensor.fill_(_NAN), key))
            else:
                works.append((self.name_of(transfer), tensor, copy := tensor.clone()))
                self._post.put(key, copy)
        return Posted(batch, works, (), None)

    def wait(self, posted: Posted) -> None:
        """Let what is received land; look whether what was sent is still the same."""
        where, works = posted.batch.where, cast(list[Any], posted.works)
        for name, tensor, other in works:
            if isinstance(other, Tensor):
                if not torch.equal(tensor, other):
                    self._fail(f"{where}: written to before it had landed: {name}")
                continue
            arrived = self._post.take(other, f"{name}, {where}")
            if arrived.shape != tensor.shape:
                self._fail(f"{where}: {name}: {len(arrived)} bytes came for {len(tensor)}")
            tensor.copy_(arrived)

    def _fail(self, text: str) -> None:
        raise CommunicationError(f"rank {self._rank}, {text}")


def run_all[T](post: Post, jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run the jobs of all ranks at once, without gradients; return their results.

    Raises:
        RuntimeError: what a rank raised first.
    """

    def one(rank: int) -> T:
        try:
            with torch.no_grad():  # which is a thread's own
                return jobs[rank]()
        except Exception as error:
            post.fail(f"rank {rank}: {type(error).__name__}: {error}")
            raise

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(one, rank) for rank in range(len(jobs))]
    if post.error:
        raise RuntimeError(post.error)
    return [future.result() for future in futures]
