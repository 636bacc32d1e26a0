"""Trains on stand-ins for CUDA's streams; at the end each rank says what ran in which order.

"f" and "b" are a forward and a backward of our attention, "d" is a layer's dispatch of tokens to
their experts; "'" behind one says that it was on a stream of its own. Run by tests.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_burst import pretrain
from megatron_burst.transport.comm import Communicator
from tests.streams import Streams


def main() -> None:
    streams, said = Streams(card="cpu"), []

    def noted(function: Callable[..., Any], letter: str = "") -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            said.append(letter or args[0][0])  # the name of a pass
            if streams.current is not streams.default:
                said.append("'")
            return function(self, *args)

        return run

    Communicator.in_pass = noted(Communicator.in_pass)
    MoELayer.dispatch = noted(MoELayer.dispatch, "d")
    leave = dist.destroy_process_group

    def say_and_leave() -> None:
        print(f"\nrank {dist.get_rank()} ran {''.join(said)}.\n", end="", flush=True)
        leave()

    dist.destroy_process_group = say_and_leave
    with streams.recording(fakes=False):
        pretrain.main()
