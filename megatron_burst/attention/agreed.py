"""The calls that all ranks of a context have agreed on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatron_burst.attention.call import Prepared
from megatron_burst.attention.kept import Recent
from megatron_burst.attention.signature import Given
from megatron_burst.transport.agreement import Said
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.errors import CommunicationError
from megatron_burst.transport.warm_up import Connections


class AgreedCalls:
    """Compares each call over the ranks before its first message; see `Agreement`.

    What sends messages for the first time in a call is connected then.
    """

    def __init__(self, communicator: Communicator, connections: Connections | None) -> None:
        self._communicator, self._connections = communicator, connections
        self._known = Recent[Given, tuple[Said, Prepared]]()

    def __call__(self, given: Given, prepare: Callable[[], Prepared]) -> Prepared:
        """Return what was prepared for such a call, by `prepare` when it is new."""
        known = self._known.pop(given, None)
        is_new = known is None
        said, prepared = known or self._prepare(given, prepare)
        if (agreement := self._communicator.agreement) is not None:
            by_host = self._communicator.is_by_gloo(given.q[2])
            try:
                agreement.compare(said, waits=by_host or is_new)
            except (ValueError, CommunicationError):
                if agreement.is_over:
                    self._communicator.hang_up()
                raise
        if is_new and self._connections is not None:
            self._connections.add(prepared.plans, direct=prepared.call.is_direct)
        self._known.keep(given, (said, prepared))
        return prepared

    @contextmanager
    def told(self, request: str) -> Iterator[None]:
        """Within it a call is prepared; if that fails here alone, the other ranks learn why."""
        try:
            yield
        except Exception as error:
            if (agreement := self._communicator.agreement) is not None:
                failed = Said(request, f"{type(error).__name__}: {error}", has_failed=True)
                with suppress(ValueError, CommunicationError):  # for this rank `error` says it
                    agreement.compare(failed, waits=True)
            raise

    def _prepare(self, given: Given, prepare: Callable[[], Prepared]) -> tuple[Said, Prepared]:
        with self.told(str(given)):
            prepared = prepare()
            return Said(str(given), str(prepared)), prepared
