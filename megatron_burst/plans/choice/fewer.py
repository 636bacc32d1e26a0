"""The time of a pass of more ranks than are put on the clock, by what fewer take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_burst.plans.choice.cost import Traffic
from megatron_burst.plans.choice.machine import Machine
from megatron_burst.plans.choice.timing import PassTime
from megatron_burst.plans.schedules.mesh import Mesh
from megatron_burst.plans.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Fewer:
    """What fewer ranks take for a pass, each way of theirs."""

    known: Sequence[tuple[Schedule, Traffic, PassTime]]
    more: float  # times as many are asked for
    machine: Machine

    def seconds(self, schedule: Schedule, sent: Traffic) -> float:
        """Return about what it takes of all ranks; infinity if no such way is known.

        Computing grows with the ranks, and messages take what their bytes do, of computing as well
        if they slow it. What this does not explain of fewer's time stays: the first and the last.
        Of meshes that of the most alike form counts.
        """
        way, form = (type(schedule), schedule.sent), _form(schedule)
        alike = [each for each in self.known if (type(each[0]), each[0].sent) == way]
        if not alike:
            return math.inf
        _, of_fewer, time = min(alike, key=lambda each: abs(_form(each[0]) - form))
        computing, links = time.kernels + time.sums, self._on_links(of_fewer)
        rest = time.device - self._together(computing, links)
        device = self._together(self.more * computing, self._on_links(sent)) + rest
        return max(device, self.more * time.host)

    def _together(self, computing: float, links: float) -> float:
        return max(computing + self.machine.contention * links, links)

    def _on_links(self, sent: Traffic) -> float:
        away = sent.nic * self.machine.gpus_per_nic / self.machine.nic_rate
        return max(away, (sent.rank - sent.nic) / self.machine.within_rate)


def _form(schedule: Schedule) -> float:
    """Return the logarithm of the nodes of a mesh's column over those of its row."""
    if not isinstance(schedule, Mesh):
        return 0.0
    return math.log(schedule.held / schedule.table.visitors)
