"""The time of one layer's attention: the plans of all ranks on a clock."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.choice.clock import Timed, duration
from megatron_burst.plans.choice.cost import Shape, attention_flops
from megatron_burst.plans.choice.machine import Machine
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.schedule import Messages, Schedule
from megatron_burst.plans.schedules.work import Work
from megatron_burst.plans.visibility.band import Ints


class PassTime(NamedTuple):
    """Seconds of a pass: of all devices, of the host, and of who computes most, of these two."""

    device: float
    host: float  # which runs ahead, from layer to layer
    kernels: float
    sums: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.device, self.host)


def pass_time(schedule: Schedule, links: "Links", *, backward: bool) -> PassTime:
    """Put all ranks' plans on the clock."""
    work, shape, machine = schedule.work(backward=backward), links.shape, links.machine
    local_tokens = schedule.tiling.local_tokens
    batch = shape.tokens // local_tokens
    # Tiles of a step share a call: one of what is seen whole, one of what is seen in part.
    query_rows = np.minimum(batch * work.query_rows, 2 * shape.tokens)
    work = Work(work.pairs * batch, query_rows, batch * work.key_rows, work.visitors)
    kernels, sums = _computing(work, shape, machine, backward=backward)
    sizes = shape.item_bytes(backward=backward)
    messages = links.timed(schedule.messages(backward=backward), sizes, local_tokens)
    lands = (step for timed in messages for step in timed.loads.lands.tolist())
    computing = np.zeros((1 + max([len(kernels), *lands]), len(links.nodes)))
    acts = np.zeros(computing.shape, bool)  # who computes or sends
    acts[: len(kernels)] = work.pairs > 0
    computing[: len(kernels)] = kernels + sums
    computing += machine.step_seconds * acts
    computing += links.taken_from_computing(messages, len(computing))
    most = work.pairs.sum(axis=0).argmax()
    of_most = kernels[:, most].sum(), sums[:, most].sum()
    for timed in messages:
        timed.mark(acts)
    of_host = float(acts.sum(axis=0).max()) * machine.hop_seconds[backward]
    return PassTime(duration(messages, computing), of_host, float(of_most[0]), float(of_most[1]))


def least_seconds(ranks: int, shape: Shape, machine: Machine, *, backward: bool) -> float:
    """Return what rings of so many ranks take at least, causal in zigzag: without any message."""
    tokens, pairs = shape.tokens, shape.tokens**2 // shape.batch * ranks // 2
    rows = np.array([[round(tokens * (1 + 0.75 * (ranks - 1)))]])  # a tile of others has 3/4
    work = Work(np.array([[pairs]]), rows, rows, np.zeros_like(rows))
    return float(sum(each.sum() for each in _computing(work, shape, machine, backward=backward)))


def _computing(
    work: Work, shape: Shape, machine: Machine, *, backward: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds of kernels and of what adds up their results: [step, rank]."""
    dims = shape.head_dim, shape.value_head_dim
    rate = machine.attention_rate(sum(dims) / 2, backward=backward)
    flops = attention_flops(1, shape.query_heads, *dims, backward=backward)
    kernels = (work.pairs + machine.grain * work.query_rows) * flops / rate
    if shape.latents:  # K and V are made of what came, in the backward again, and gradients of them
        met = np.minimum(work.key_rows, shape.tokens) * (3 if backward else 1)
        kernels += 2 * met * shape.latents.weight / machine.linear_rate
    sums: NDArray[np.float64] = sum_bytes(work, shape, backward) / machine.memory_rate
    return kernels, machine.traffic * sums


def sum_bytes(work: Work, shape: Shape, backward: bool) -> Ints:
    """Return what is read and written to add the tiles' results to the sums: [step, rank]."""
    a_query, a_key, a_visitor = shape.added_bytes(backward=backward)
    return a_query * work.query_rows + a_key * work.key_rows + a_visitor * work.visitors


class Exchange(NamedTuple):
    """The all-to-alls over heads of one pass."""

    device: float  # seconds
    host: float
    sent: int  # bytes of a rank
    between: int  # of them, to other nodes


def exchange(shape: Shape, size: int, ranks_per_node: int, machine: Machine) -> Exchange:
    """Return what those of `size` ranks take: one step, in which nothing is computed.

    All of a tensor is read and written to be packed, and again to be unpacked. The host works for
    each peer as for a hop of a forward. The shape is that behind the first of them.
    """
    if size == 1:
        return Exchange(0.0, 0.0, 0, 0)
    sent = shape.exchange_bytes(size)
    between = sent * max(0, size - ranks_per_node) // (size - 1)
    away = between * machine.gpus_per_nic / machine.nic_rate
    repacked = 4 * sent / (size - 1) * size
    seconds = (
        max((sent - between) / machine.within_rate, away)
        + sent / machine.copy_rate
        + repacked / machine.memory_rate
    )
    return Exchange(seconds, (size - 1) * machine.hop_seconds[False], sent, between)


class Links(NamedTuple):
    """The links of one ring, with those of the rings beside it on the same NICs."""

    nodes: tuple[int, ...]  # of each rank
    shape: Shape
    machine: Machine
    beside: int  # GPUs of a node that are in the same place of their rings

    @classmethod
    def of(cls, nodes: Sequence[Hashable], shape: Shape, machine: Machine, beside: int) -> "Links":
        """Return those of ranks on these nodes."""
        number = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
        return cls(tuple(number[node] for node in nodes), shape, machine, beside)

    def timed(
        self, messages: Iterable[Messages], sizes: Mapping[Kind, int], local_tokens: int
    ) -> list[Timed]:
        """Return the messages with the seconds that each takes."""
        machine = self.machine
        node = np.array(self.nodes)
        loads = [each.loads(sizes, local_tokens) for each in messages]
        between = [node[each.sources] != node[each.targets] for each in loads]
        place = np.array(self._places()) * self.beside // machine.gpus_per_nic
        nic = node * (1 + place.max()) + place
        leaving = np.zeros(len(node), bool)  # who sends to other nodes
        for each, leaves in zip(loads, between, strict=True):
            leaving[each.sources[leaves & (each.sizes > 0)]] = True
        shared = min(self.beside, machine.gpus_per_nic) * np.bincount(nic, leaving)[nic]
        slower = shared / machine.nic_rate
        timed = []
        for each, far in zip(loads, between, strict=True):
            seconds = np.where(far, slower[each.sources], 1 / machine.within_rate) * each.sizes
            latency = np.where(far, machine.nic_latency, machine.within_latency)
            timed.append(Timed(each, far, seconds + latency * (each.sizes > 0)))
        return timed

    def _places(self) -> list[int]:
        """Return of each rank how many before it are on its node."""
        seen = Counter[int]()
        return [seen.update((node,)) or seen[node] - 1 for node in self.nodes]

    def taken_from_computing(self, messages: Iterable[Timed], steps: int) -> NDArray[np.float64]:
        """Return the seconds that messages take from the computing beside them: [step, rank]."""
        sending, receiving, copied = np.zeros((3, steps * len(self.nodes)))
        for loads, _, seconds in messages:
            step = loads.leaves[:, None] * len(self.nodes)
            sources, targets = (step + loads.sources).ravel(), (step + loads.targets).ravel()
            np.add.at(sending, sources, seconds.ravel())
            np.add.at(receiving, targets, seconds.ravel())
            np.add.at(copied, sources, loads.sizes.ravel() / self.machine.copy_rate)
        taken = self.machine.contention * np.maximum(sending, receiving) + copied
        return taken.reshape(steps, -1)
