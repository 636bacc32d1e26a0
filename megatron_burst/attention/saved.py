"""Saves results of a checkpointed call's first pass for its second.

Megatron's full recompute runs every layer twice, attention and its ring with it. Of a causal
sequence the late rows cost most, and early ones see none of them. Saved are the outputs of the last
1-ρ of the sequence, and the first ρ is recomputed, for ρ² of the FLOPs and, as only early keys have
to be sent, ρ of the ring's bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.config import check_fraction
from megatron_burst.transport.pinned import pinned_like


@dataclass(slots=True)
class AttentionMemory:
    """Carries results of one attention call from its first pass to its second.

    The first call of `ring_attention` with it fills it, the second empties it again; both are
    given the same tensors. It belongs to one call of one module: a memory that is never emptied
    is never used for another.
    """

    fraction: float
    """ρ, the share of the sequence that is recomputed; rounded to whole chunks."""
    host: "HostMemory | None" = None
    """Where what a GPU has computed is saved; None: where it is."""
    saved: "SavedRows | None" = None

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    def save(self, row: int, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Save the results from `row` on."""
        late = out_BSHD[:, row:], lse_BHS[:, :, row:]
        if self.host is not None:
            self.saved = self.host.store(row, *late)
        else:
            out, lse = (x.clone() for x in late)  # the whole is to be freed
            self.saved = SavedRows(row, out, lse)

    def fetch(self) -> None:
        """Start to bring what is saved back from the host, ahead of the second pass."""
        if self.host is not None and self.saved is not None:
            self.saved = self.host.fetch(self.saved)

    def recall(self) -> "SavedRows | None":
        """Return what is saved and forget it; None before the first pass."""
        saved, self.saved = self.saved, None
        return saved


@dataclass(frozen=True, slots=True)
class SavedRows:
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
        """Write the saved rows into the results of the others."""
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

    def store(self, row: int, out_BSHD: Tensor, lse_BHS: Tensor) -> SavedRows:
        """Start to copy results to the host, when they are computed."""
        device, copies = out_BSHD.device, []
        side = self._stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for x in (out_BSHD, lse_BHS):
                copies.append(pinned_like(x).copy_(x, non_blocking=True))
                x.record_stream(side)
        out, lse = copies
        return SavedRows(row, out, lse, side.record_event(), device)

    def fetch(self, saved: SavedRows) -> SavedRows:
        """Start to copy them back; what is back already stays as it is."""
        if saved.on_host_of is None:
            return saved
        side = self._stream(saved.on_host_of)
        with torch.cuda.stream(side):
            out, lse = (
                x.to(saved.on_host_of, non_blocking=True) for x in (saved.out_BSHD, saved.lse_BHS)
            )
        return SavedRows(saved.row, out, lse, side.record_event())

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
