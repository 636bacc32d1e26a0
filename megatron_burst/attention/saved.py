"""Saves results of a checkpointed call's first pass for its second.

Megatron's full recompute runs every layer twice, attention and its ring with it. Of a causal
sequence the late rows cost most, and early ones see none of them. Saved are the outputs of the last
1-ρ of the sequence, and the first ρ is recomputed, for ρ² of the FLOPs and, as only early keys have
to be sent, ρ of the ring's bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatron_burst.config import refuse, wrong_fraction
from megatron_burst.transport.host import HostMemory, Stored


@dataclass(slots=True)
class AttentionMemory:
    """Carries results of one attention call from its first pass to its second.

    The first call of `ring_attention` with it fills it, the second empties it again; both are
    given the same tensors. It belongs to one call of one module: a memory that is never emptied
    is never used for another.
    """

    fraction: float
    """ρ, the share of the sequence that is recomputed; rounded to whole chunks."""
    host: HostMemory | None = None
    """Where what a GPU has computed is saved; None: where it is.

    Nobody may write to the first pass's output then: it is copied meanwhile.
    """
    saved: "SavedRows | None" = None

    def __post_init__(self) -> None:
        refuse(wrong_fraction(self.fraction))

    def save(self, row: int, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Save the results from `row` on."""
        late = out_BSHD[:, row:], lse_BHS[:, :, row:]
        if self.host is not None:
            self.saved = SavedRows(row, self.host.store(*late))
        else:
            self.saved = SavedRows(row, [x.clone() for x in late])  # the whole is to be freed

    def fetch(self) -> None:
        """Start to bring what is saved back from the host, ahead of the second pass."""
        if self.saved is not None and isinstance(self.saved.results, Stored):
            self.saved.results.fetch()

    def recall(self) -> "SavedRows | None":
        """Return what is saved and forget it; None before the first pass."""
        saved, self.saved = self.saved, None
        return saved


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The results of a rank's rows from `row` on: output and log-sum-exp."""

    row: int
    results: "Stored | Sequence[Tensor]"

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Where they are saved."""
        return self.results.there if isinstance(self.results, Stored) else self.results

    def put(self, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Write the saved rows into the results of the others."""
        results = self.results
        out, lse = results.recall() if isinstance(results, Stored) else results
        out_BSHD[:, self.row :].copy_(out)
        lse_BHS[:, :, self.row :].copy_(lse)


def is_selective() -> bool:
    """Whether torch's selective checkpoint looks on, in either pass.

    What a kernel returned is its own then: it may be saved for the second pass, and sums are made
    in place.
    """
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == checkpoint.__name__ for mode in modes)
