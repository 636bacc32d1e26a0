"""What a GPU and its links sustain, by which plans are chosen: all rates, with their sources."""

from dataclasses import dataclass, replace

_HEAD_DIM = 128  # of the kernels whose rates these are
KEYS_A_CALL = 200
"""Keys that a row of a kernel call costs beside those it sees: FlashAttention-3's speed (arXiv
2407.08608, figure 5) grows with the sequence as n / (n + 200), from 512 to 16384 tokens."""
HEAD_GRAIN = 40
"""What of a pair's time does not grow with the head size, in numbers of a head: forward kernels of
FlashAttention-3 (figure 5) reach 0.77 with 64 and 1.17 with 256, backward 0.85 with 64 of what they
reach with 128; d / (d + 40) makes it 0.81 and 1.14."""

HOP_SECONDS = 0.2e-3, 0.36e-3
"""What the host of a GPU works for a hop, forward and backward, its calls of torch included: 86 and
165 times an `aten.add` before a plan was lowered, half of that since (scripts/bench/host_time.py),
4.5 microseconds each where that launches a kernel: an estimate. In a virtual machine with an H200
they were 16, a hop 0.36 and 0.87 ms (scripts/bench/results/h200_first_run.md). A peer of an
all-to-all, there and back, takes 96 of them, as a hop of a forward does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A GPU, its links and its NIC; a rate is what one of them sustains one way."""

    forward_rate: float  # FLOP/s of attention kernels with heads of 128
    backward_rate: float
    linear_rate: float  # FLOP/s of matrix products
    memory_rate: float  # bytes/s of the GPU's memory
    within_rate: float  # bytes/s from a GPU into its node
    nic_rate: float  # bytes/s of a NIC
    within_latency: float = 0.0  # seconds of a message beside its bytes
    nic_latency: float = 0.0
    gpus_per_nic: int
    contention: float  # seconds of computing lost for each second of messages
    copy_rate: float  # bytes/s that computing loses to the messages a rank sends; infinite on GPUs
    step_seconds: float = 0.0  # of a step with tiles, beside them; none where the host runs ahead
    hop_seconds: tuple[float, float] = 0.0, 0.0  # at least, of a step with tiles, where it does
    grain: float = 0.0  # keys' worth of time that a row of a kernel call costs beside its pairs
    head_grain: float = 0.0  # numbers of a head's worth of time that a pair costs beside them
    traffic: float = 1.0  # bytes moved to add results for each that is read and written once
    hop_slowness: float = 0.0  # of the time of what has a ring, for each hop: less is hidden

    def attention_rate(self, head_dim: float, *, backward: bool) -> float:
        """Return the FLOP/s of attention kernels with heads of a size."""
        rate = self.backward_rate if backward else self.forward_rate
        least = self.head_grain
        return rate * (head_dim / (head_dim + least)) / (_HEAD_DIM / (_HEAD_DIM + least))

    def shared_by(self, ranks: int) -> "Machine":
        """Return what one of so many neighbouring GPUs has of it, if all use their NICs at once."""
        at_once = min(ranks, self.gpus_per_nic)
        fewer = max(1, self.gpus_per_nic // ranks)
        return replace(self, nic_rate=self.nic_rate / at_once, gpus_per_nic=fewer)

    def at_pace(self, pace: float, of_memory: float | None = None) -> "Machine":
        """Return it with kernels so many times as fast, and copies as much if it is not given."""
        copies = of_memory or pace
        return replace(
            self,
            forward_rate=pace * self.forward_rate,
            backward_rate=pace * self.backward_rate,
            linear_rate=pace * self.linear_rate,
            memory_rate=copies * self.memory_rate,
            copy_rate=copies * self.copy_rate,
            step_seconds=self.step_seconds / copies,
        )


H100 = Machine(
    forward_rate=648e12,  # FlashAttention-3, figures 5 and 6, 16384 tokens
    backward_rate=561e12,
    linear_rate=682.41e12,  # fitted, configs/published.toml: share_linear
    memory_rate=3350e9,  # HBM3 of the SXM5
    within_rate=360e9,  # NVLink, 0.8 of the data sheet
    nic_rate=45e9,  # 400 Gbit/s, 0.9 of it
    within_latency=10e-6,  # a send and its receive in NCCL: an estimate
    nic_latency=20e-6,
    gpus_per_nic=1,
    contention=0.0,
    copy_rate=float("inf"),
    hop_seconds=HOP_SECONDS,
    grain=KEYS_A_CALL,
    head_grain=HEAD_GRAIN,
    traffic=3.164,  # fitted, configs/published.toml
)
"""That of configs/clusters.toml, as the others."""
_A100 = replace(
    H100,
    forward_rate=235.872e12,  # fitted, configs/published.toml: share_forward, of 312
    backward_rate=199.368e12,
    linear_rate=215.28e12,
    memory_rate=2039e9,
    within_rate=240e9,
    nic_rate=22e9,  # 200 Gbit/s
    contention=0.321,
)
_B200 = replace(
    H100,
    forward_rate=1257.075e12,  # fitted, configs/published.toml: b200_forward, of 2250
    backward_rate=872.325e12,
    linear_rate=1552.5e12,
    memory_rate=8000e9,
    within_rate=720e9,
)
MACHINES = {
    "A100": _A100,
    "A800": replace(_A100, within_rate=160e9, gpus_per_nic=2),
    "H200": replace(H100, memory_rate=4800e9),
    "H100": H100,
    "GB200": replace(_B200, forward_rate=1396.75e12, backward_rate=969.25e12, linear_rate=1725e12),
    "B200": _B200,
}
"""By words of a GPU's name; what its NICs sustain, training learns from the ports of its node."""
CPU = Machine(
    forward_rate=22.4e9,
    backward_rate=22.4e9,
    linear_rate=22.4e9,
    memory_rate=1.6e9,
    within_rate=1.74e9,
    nic_rate=1.25e9,
    gpus_per_nic=1,
    contention=0.0,
    copy_rate=0.34e9,
    step_seconds=2e-3,
    hop_slowness=0.04,
)
"""A rank with a share of a core over gloo, fitted to scripts/bench/results/cpu_two_nodes.csv. Rings
take up to 30 % longer there than the clock says, the more hops the longer, because cores and gloo
hide less of their messages. What 4 % a hop chooses: scripts/bench/results/cpu_chosen.md."""
CPU_KERNEL_RATE = 31e9
"""FLOP/s of a whole kernel call on such a share of a core; those of plans are smaller."""
