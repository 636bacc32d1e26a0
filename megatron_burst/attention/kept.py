"""What calls of one group leave for the next ones."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from megatron_burst.attention.call import AttentionPlan
from megatron_burst.attention.head_exchange import HeadExchange
from megatron_burst.attention.log import Means
from megatron_burst.attention.signature import CallSignature
from megatron_burst.plans.visibility.layout import Layout

_KEPT = 64  # more than the masks of one step


class Recent[Key: Hashable, Value](dict[Key, Value]):
    """The last values that were asked for: with documents every batch has its own mask."""

    def recall(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return what is kept, or make it."""
        value = self.pop(key, None)
        return self.keep(key, make() if value is None else value)

    def keep(self, key: Key, value: Value) -> Value:
        """Put a value last, forget the first, and return it."""
        self[key] = value
        if len(self) > _KEPT:
            del self[next(iter(self))]
        return value


@dataclass(slots=True)
class Kept:
    """What calls of one group leave for the next ones."""

    calls: Recent[CallSignature, AttentionPlan] = field(default_factory=Recent)
    ready: Recent[tuple[object, ...], AttentionPlan] = field(default_factory=Recent)
    """With their scale and pass."""
    exchanges: Recent[int | Layout, HeadExchange] = field(default_factory=Recent)
    means: Means = field(default_factory=Means)

    @property
    def last(self) -> AttentionPlan:
        """The last call."""
        return next(reversed(self.ready.values()))
