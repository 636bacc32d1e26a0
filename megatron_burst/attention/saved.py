"""Keeps results of a checkpointed call from its first pass for its second.

Megatron's full recompute runs every layer twice, attention and its ring with it. Of a causal
sequence the late rows cost most, and early ones see none of them: kept are the results of the last
1-ρ of the sequence, and the first ρ runs again, for ρ² of the FLOPs and, as only early keys have to
travel, ρ of the ring's bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.config import check_fraction


@dataclass(slots=True)
class AttentionMemory:
    """Carries results of one attention call from its first pass to its second.

    The first call of `ring_attention` with it fills it, the second empties it again; both are
    given the same tensors. It belongs to one call of one module: a memory that is never emptied
    is never used for another.
    """

    fraction: float
    """ρ, the share of the sequence that runs again; rounded to whole chunks."""
    host: "HostMemory | None" = None
    """Where what a GPU has computed is kept; None: where it is."""
    kept: "Kept | None" = None

    def __post_init__(self) -> None:
        """Check the fraction."""
        check_fraction(self.fraction)

    def keep(self, row: int, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Keep the results from `row` on."""
        late = out_BSHD[:, row:], lse_BHS[:, :, row:]
        if self.host is not None:
            self.kept = self.host.store(row, *late)
        else:
            out, lse = (x.clone() for x in late)  # the whole is to be freed
            self.kept = Kept(row, out, lse)

    def fetch(self) -> None:
        """Start to bring what is kept back from the host, ahead of the second pass."""
        if self.host is not None and self.kept is not None:
            self.kept = self.host.fetch(self.kept)

    def recall(self) -> "Kept | None":
        """Return what is kept and forget it; None before the first pass."""
        kept, self.kept = self.kept, None
        return kept


@dataclass(frozen=True, slots=True)
class Kept:
    """The results of a rank's rows from `row` on."""

    row: int
    out_BSHD: Tensor
    lse_BHS: Tensor
    ready: torch.cuda.Event | None = None  # when they are where they were copied to
    on_host_of: torch.device | None = None  # the GPU's, if they are in the host's memory

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.out_BSHD.nbytes + self.lse_BHS.nbytes

    def put(self, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Write the kept rows into the results of the others."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(out_BSHD.device)
            stream.wait_event(self.ready)
            if self.on_host_of is None:  # fetched: memory of the copy stream
                self.out_BSHD.record_stream(stream)
                self.lse_BHS.record_stream(stream)
        out_BSHD[:, self.row :].copy_(self.out_BSHD, non_blocking=True)
        lse_BHS[:, :, self.row :].copy_(self.lse_BHS, non_blocking=True)


class HostMemory:
    """Copies results to the host's pinned memory and back, on one stream a device.

    Shared by all memories of a model: CUDA has 32 streams to give, and NCCL's come from them, too.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def store(self, row: int, out_BSHD: Tensor, lse_BHS: Tensor) -> Kept:
        """Start to copy results to the host, when they are computed."""
        device, copies = out_BSHD.device, []
        side = self._stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for x in (out_BSHD, lse_BHS):
                copies.append(torch.empty(x.shape, dtype=x.dtype, pin_memory=True))
                copies[-1].copy_(x, non_blocking=True)
                x.record_stream(side)
        out, lse = copies
        return Kept(row, out, lse, side.record_event(), device)

    def fetch(self, kept: Kept) -> Kept:
        """Start to copy them back; what is back already stays as it is."""
        if kept.on_host_of is None:
            return kept
        side = self._stream(kept.on_host_of)
        with torch.cuda.stream(side):
            out, lse = (
                x.to(kept.on_host_of, non_blocking=True) for x in (kept.out_BSHD, kept.lse_BHS)
            )
        return Kept(kept.row, out, lse, side.record_event())

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
