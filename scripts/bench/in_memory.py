"""A communicator without messages: whatever a plan receives is at hand in this process."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping

from megatron_burst.plans.plan import Item, Plan, Receive, Step
from megatron_burst.transport.blocks import Block
from megatron_burst.transport.comm import Communicator, Transfers

type Template = Callable[[Item], Block]  # a block of the shape of what is received


class InMemory(Communicator):
    """Leaves the messages of a plan to the transfers that a function returns."""

    def __init__(self, transfers: Callable[[Template], Transfers]) -> None:
        super().__init__((), {}, timeout_seconds=1)
        self._transfers = transfers

    def begin(self, name: str, plan: Plan, template: Template) -> Transfers:
        return self._transfers(template)


class LocalTransfers(Transfers):
    """Takes what lands from where it is; sends nothing by itself."""

    def __init__(self) -> None:
        self._landing: dict[int, list[Receive]] = defaultdict(list)

    def post(self, number: int, step: Step, outgoing: Mapping[Item, Block]) -> None:
        for receive in step.receives:
            self._landing[receive.lands].append(receive)

    def land(self, number: int) -> list[tuple[Item, Block]]:
        return [(each.item, self.take(each)) for each in self._landing.pop(number, [])]

    @abstractmethod
    def take(self, receive: Receive) -> Block: ...
