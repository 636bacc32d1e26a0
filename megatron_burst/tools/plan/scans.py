"""What layers with a state send, M and G: states and the rows that move for them, or heads."""

import math

from megatron_burst.config import LayoutName
from megatron_burst.plugin.scans.bytes_sent import Sent, sent_by_model
from megatron_burst.tools.plan.workload import Workload


def sent_for_scans(load: Workload) -> Sent:
    """Return the bytes that a rank sends in either way of a micro-batch's forward."""
    moved = load.hidden_bytes // load.micro // load.row_shards
    sizes = load.local_tokens // load.micro, load.context, load.element_bytes
    sent = sent_by_model(load.model.kinds, load.model.scans, moved, *sizes)
    return Sent(sent.states * load.micro, sent.heads * load.micro)


def taken_by_scans(load: Workload) -> float:
    """Return those of the way that a training takes; see --burst-layout.

    Raises:
        ValueError: it is the all-to-all over heads, which they do not allow.
    """
    sent = sent_for_scans(load)
    if load.documents or not load.config.is_zigzag:
        return sent.states
    taken = sent.heads if load.config.layout is LayoutName.ZIGZAG else min(sent)
    if taken == math.inf:
        raise ValueError(f"layers with a state in Megatron's zigzag: {_indivisible(load)}")
    return taken


def said_of_scans(load: Workload) -> str:
    """Return a line for the page; empty where no layer has a state, or one rank all tokens."""
    sent = sent_for_scans(load)
    if load.context == 1 or not sent.states:
        return ""
    said = f"layers with a state, a rank and a forward: {sent.states / 2**20:.4g} MiB where they "
    said += "are passed and rows move, "
    if sent.heads == math.inf:
        return f"{said}which is taken: {_indivisible(load)}"
    taken = "states" if taken_by_scans(load) == sent.states else "heads"
    return f"{said}{sent.heads / 2**20:.4g} MiB by an all-to-all over heads; taken: {taken}"


def _indivisible(load: Workload) -> str:
    return f"their heads do not divide over {load.context} context-parallel ranks"
