"""Message memory of which only what stays there has values: the rest is NaN."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_burst.transport.comm import Communicator, Transfers
from megatron_burst.transport.lowered import Lowered

_NAN = 0xFF  # all bytes of a NaN, of any dtype


def poison_message_memory() -> None:
    """Lend passes of this process such memory: what is read outside its stay shows in results."""
    original = Communicator.transfers

    @contextmanager
    @functools.wraps(original)
    def transfers(self: Communicator, lowered: Lowered, *given: Any) -> Iterator[Transfers]:
        with original(self, lowered, *given) as lent:
            writes, memory = lent.writes, lent._memory
            places = [*zip(lowered._begins, lowered._stays, strict=True)]

            def begin(number: int) -> Any:
                for place, stay in places:
                    if number == 0 or stay.end == number - 1:
                        memory[place : place + stay.size].fill_(_NAN)
                return writes(number)

            lent.writes = begin  # type: ignore[method-assign]
            yield lent
            memory.fill_(_NAN)

    Communicator.transfers = transfers  # type: ignore[method-assign]
