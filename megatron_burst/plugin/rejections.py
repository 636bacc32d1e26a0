"""Says why Megatron ends a training whose result it rejects, above all a loss that is NaN.

Megatron's rerun machine computes the step again, saves a checkpoint of the step before and exits
with status 16 or 17, without an error that says why.
"""

from collections.abc import Callable
from typing import Any

from megatron.training import get_args

from megatron_burst.transport.failure import Status

_NEXT = {
    True: "a start with the same --load computes the step again, best on another GPU: the same "
    "result there is no fault of the device",
    False: "without --save it cannot be looked at again",
}
_MORE = "--burst-check nan names the layer where a NaN begins, --rerun-mode disabled ends at once"


def with_reason(ask: Callable[[Any], tuple[bool, bool, int]]) -> Callable[[Any], Any]:
    """Megatron's `should_checkpoint_and_exit`, whose status says which result was rejected.

    Without --save no checkpoint is asked for, where Megatron would fail.
    """

    def should_exit(machine: Any) -> tuple[bool, bool, int]:
        saves, leaves, code = ask(machine)
        if not leaves:
            return saves, leaves, code
        args = get_args()
        can_save = bool(args.save)
        if call := machine.failed_validation_call:  # of this rank
            # As the log counts them; the machine's own messages name the next.
            step, value = args.curr_iteration + 1, float(machine.initial_result)
            what = f"iteration {step}: {call.caller.message} ({value:g})"
            code = Status(code, f"{what}. Status {code}: {_NEXT[can_save]}; {_MORE}")
        return saves and can_save, leaves, code

    return should_exit
