"""The memory of one rank's attention against what is counted without a device."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_most
from megatron_burst.tools.one_rank import EmptyKernel, OneRank, Sizes, silent_rank
from megatron_burst.transport.memory import message_of

REMEDY = "plan with the larger figure, a shorter sequence or more ranks (docs/budgets.md)"
_LAGGING, _CYCLES = 2**26, 10**9  # bytes, and about half a second
_APART = {"cuda": 0.05, "cpu": 0.1}  # of the count; a CPU's kernel has no workspace
_NODES = {"flat": (0,) * 8, "double": (0,) * 4 + (1,) * 4}  # of each rank
_RINGS = (("flat", "kv"), ("double", "query"), ("flat", "query"), ("double", "kv"))


def check(device: Device) -> Iterator[Check]:
    """Compare the peaks of both rings, flat and double, without grouped heads."""
    sizes = Sizes(16384, 32, 32, 128) if device.is_gpu else Sizes(256, 4, 4, 64)
    tensors = sizes.draw(device.device, DTYPE)
    for topology, ring in _RINGS if device.is_gpu else _RINGS[:2]:
        settings = {"backward": ring, "topology": topology}
        rank = silent_rank(_NODES[topology], tensors, **settings)
        rank.backward()  # what is made once is no part of it
        measured, counted = _peaks(device, rank), counted_peaks(_NODES[topology], sizes, **settings)
        for name, mine, right in zip(("forward", "backward"), measured, counted, strict=True):
            of_q = tensors[0].nbytes
            sizes_in_q = f" ({mine / of_q:.1f} x q, counted {right / of_q:.1f})"
            what = f"{topology} {ring} ring, {name}: apart"
            yield at_most(what, abs(mine / right - 1), _APART[device.device.type], more=sizes_in_q)
        del rank
        device.free()
    yield from _while_a_message_lags(device)


def _while_a_message_lags(device: Device) -> Iterator[Check]:
    """Free what another stream was recorded to use, as NCCL's group does: a message's waits not."""
    for name, is_message in (("a message", True), ("a tensor", False)):
        what, allowed = f"memory of {name} that NCCL's stream has not come to", "free at once"
        if not device.is_gpu:
            yield Check(what, "says nothing without a GPU")
            continue
        device.free()
        freed = torch.empty(_LAGGING, dtype=torch.uint8, device=device.device)
        sent, place = message_of((freed,)) if is_message else freed, freed.data_ptr()
        with torch.cuda.stream(side := torch.cuda.Stream(device.device)):
            torch.cuda._sleep(_CYCLES)
        sent.record_stream(side)
        del sent, freed
        is_free = torch.empty(_LAGGING, dtype=torch.uint8, device=device.device).data_ptr() == place
        state = allowed if is_free else "waits for it"
        yield Check(what, state, *((allowed, is_free) if is_message else ()))


def _peaks(device: Device, rank: OneRank) -> list[int]:
    """Return those of a forward and of a backward."""
    rank.result = None
    forward = device.peak(rank.forward, rank.tensors)
    return [forward, device.peak(rank.backward, (*rank.tensors, *(rank.result or ())))]


def counted_peaks(nodes: Sequence[int], sizes: Sizes, **settings: str) -> list[int]:
    """Count the bytes of a forward and of a backward, beside their tensors, without a device."""
    tensors = sizes.draw("meta", DTYPE)
    rank = silent_rank(nodes, tensors, **settings, kernel="reference")  # on any device
    rank.call = replace(rank.call, kernel=EmptyKernel())
    rank.backward()  # as on the device
    return _peaks(Device(torch.device("meta"), Path()), rank)


def counted_layer(rank: OneRank, nodes: Sequence[int], sizes: Sizes, **settings: str) -> int:
    """Count the most bytes of a layer of a rank that has run, with its tensors and results."""
    forward, backward = counted_peaks(nodes, sizes, **settings)
    results = sum(x.nbytes for x in rank.result or ())
    return max(forward, results + backward) + sum(x.nbytes for x in rank.tensors)
