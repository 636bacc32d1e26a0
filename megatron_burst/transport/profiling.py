"""Names what attention does for torch.profiler and, through it, for nsys; off, it is one `if`."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from megatron_burst.transport.range_names import PREFIX

_OFF = nullcontext()


def span(call: str, step: int | None = None, *what: object) -> AbstractContextManager[object]:
    """Return a `record_function` range, "burst: CALL" or "burst: CALL step N: WHAT".

    Args:
        call: forward, backward or head exchange.
        step: of its plan; None for the call as a whole.
        what: tile, merge, post or wait, and words about it, which are only read under a profiler.
    """
    if not profiler._is_profiler_enabled:
        return _OFF
    name = call if step is None else f"{call} step {step}: {' '.join(map(str, what))}"
    return profiler.record_function(PREFIX + name)
