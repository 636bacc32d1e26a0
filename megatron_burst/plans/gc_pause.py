"""Plans are many small objects, all of which stay: Python's collector looks for garbage in vain."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Hold the collector back, as a decorator or in a `with`; what it was set to comes back.

    It runs by the number of objects, and took a third of the time in which 1024 ranks are planned.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
