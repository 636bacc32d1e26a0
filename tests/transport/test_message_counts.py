"""How many messages a layer sends, and of how many bytes, on 8 and 64 ranks. (fast tier)"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig, Mask
from megatron_burst.plans.schedules.plan import Channel, Kind, Send
from megatron_burst.tools.one_rank import EmptyKernel, OneRank, Silence, Sizes, context_of
from megatron_burst.transport.comm import Posted
from megatron_burst.transport.lowered import Batch

TOKENS, HEADS, HEAD_DIM = 64, 4, 128
Q = TOKENS * HEADS * HEAD_DIM * 2  # bytes of a rank's q in bfloat16, and of its k, v, dO
ROWS = TOKENS * HEADS * 4  # of a float32 number a row
ONE_NODE, EIGHT = (0,) * 8, tuple(rank // 8 for rank in range(64))
GRADIENTS = Channel.GRADIENT_BETWEEN


class Counts(Silence):
    """Notes what would go out."""

    messages = bytes = 0

    def start(self, batch: Batch, own: Mapping[Kind, Tensor], memory: Tensor) -> Posted:
        self.messages += sum(isinstance(message.transfer, Send) for message in batch.messages)
        self.bytes += batch.bytes_sent
        return super().start(batch, own, memory)


def counts(nodes: tuple[int, ...], ring: str) -> list[tuple[int, int]]:
    """Return the messages and bytes that the middle rank sends in the forward, in the backward."""
    found = []
    topology = "double" if len({*nodes}) > 1 else "flat"
    config = BurstConfig(kernel="reference", topology=topology, backward=ring)
    context = context_of(len(nodes) // 2, nodes, config, communicator := Counts(len(nodes)))
    tensors = Sizes(TOKENS, HEADS, HEADS, HEAD_DIM).draw("meta", torch.bfloat16)
    rank = OneRank(context, tensors, Mask.causal())
    rank.call = replace(rank.call, kernel=EmptyKernel())
    for run in (rank.forward, rank.backward):
        communicator.messages = communicator.bytes = 0
        run()
        found.append((communicator.messages, communicator.bytes))
    return found


@pytest.mark.parametrize(
    ("nodes", "ring", "forward", "backward"),
    [
        # K and V in one message, dK and dV in one: of each of 7 others' blocks.
        (ONE_NODE, "kv", (7, 14 * Q), (14, 28 * Q)),
        # Q, dO, LSE and delta in one, dQ in another.
        (ONE_NODE, "query", (7, 14 * Q), (14, 21 * Q + 14 * ROWS)),
        # Sums leave a node for 7 others in float32.
        (EIGHT, "kv", (63, 126 * Q), (126, 266 * Q)),
        (EIGHT, "query", (63, 126 * Q), (126, 196 * Q + 126 * ROWS)),
    ],
)
def test_what_goes_together_is_one_message(
    nodes: tuple[int, ...], ring: str, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """Half as many as one a tensor, of the same bytes: 14 and 28, 35; 126 and 252, 315."""
    assert counts(nodes, ring) == [forward, backward]


def test_what_a_node_sums_waits_for_one_batch_of_another_node() -> None:
    """Gradients of keys behind one of queries, on 64 ranks; the clock counts them so."""
    sizes = Sizes(4096, 32, 8, 128)
    config = BurstConfig(kernel="reference", topology="mesh")
    context = context_of(32, EIGHT, config, Silence(64))
    plan = OneRank(context, sizes.draw("meta", torch.bfloat16)).call.backward_plan
    behind, on_their_way = [], list[int]()
    for number, step in enumerate(plan.steps):
        on_their_way = [lands for lands in on_their_way if lands >= number]
        ways = [way for way in (*step.receives, *step.sends) if way.channel is GRADIENTS]
        behind += [number] if ways and on_their_way else []
        on_their_way += {way.lands for way in ways}
    assert behind == [49, 57]
