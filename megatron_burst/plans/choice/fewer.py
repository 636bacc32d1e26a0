"""The time of a pass of more ranks than are put on the clock, by what fewer take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_burst.plans.choice.cost import Traffic
from megatron_burst.plans.choice.machine import Machine
from megatron_burst.plans.choice.timing import PassTime
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.schedule import Schedule

type _Way = tuple[type[Schedule], Kind]  # by which schedules of two numbers of ranks are the same


@dataclass(frozen=True, slots=True)
class Fewer:
    """What fewer ranks take for a pass, each way of theirs."""

    known: Mapping[_Way, tuple[Traffic, PassTime]]
    more: float  # times as many are asked for
    machine: Machine

    def seconds(self, schedule: Schedule, sent: Traffic) -> float:
        """Return about what it takes of all ranks; infinity if no such way is known.

        Computing grows with the ranks, and messages take what their bytes do, of computing as well
        if they slow it. What this does not explain of fewer's time stays: the first and the last.
        """
        if (known := self.known.get((type(schedule), schedule.sent))) is None:
            return math.inf
        of_fewer, time = known
        computing, links = time.kernels + time.sums, self._on_links(of_fewer)
        rest = time.device - self._together(computing, links)
        device = self._together(self.more * computing, self._on_links(sent)) + rest
        return max(device, self.more * time.host)

    def _together(self, computing: float, links: float) -> float:
        return max(computing + self.machine.contention * links, links)

    def _on_links(self, sent: Traffic) -> float:
        away = sent.nic * self.machine.gpus_per_nic / self.machine.nic_rate
        return max(away, (sent.rank - sent.nic) / self.machine.within_rate)
