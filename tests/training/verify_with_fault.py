"""Trains with the fault named last on the command line; notes that it stopped. Run by tests."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_burst import pretrain_gpt
from megatron_burst.attention.sums import Sums
from megatron_burst.reference.verify import VerificationError
from tests.attention import faults


def main() -> None:
    from megatron_burst.plugin import pretraining

    changes: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
        "lost gradient": (Sums, "take", faults.lost_gradient),
        "swapped batch": (pretraining, "_next_batch", swapped_batch),
    }
    with faults.replaced(*changes[sys.argv.pop()]):
        try:
            pretrain_gpt.main()
        except (VerificationError, SystemExit) as stop:
            print("stopped:", stop, flush=True)


def swapped_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every rank's two chunks come in the wrong order."""

    def swapped(x: Any) -> Any:
        is_sharded = torch.is_tensor(x) and x.ndim == 2
        return torch.cat(x.chunk(2, dim=1)[::-1], dim=1) if is_sharded else x

    return lambda *given: {name: swapped(x) for name, x in original(*given).items()}
