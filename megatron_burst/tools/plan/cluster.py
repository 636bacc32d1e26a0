"""The machines that a step runs on: what a GPU and its links sustain, as values."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_burst.plans.choice.machine import HEAD_GRAIN, HOP_SECONDS, KEYS_A_CALL, Machine
from megatron_burst.tools.flops import peak_tflops

_LARGEST = 1e18
# What a cluster file says; what it may leave out has the default of a field below.
_COUNTS = ("gpus_per_node", "nics_per_node", "gpus_per_host", "nvlinks", "channels")
_NUMBERS = {
    "memory_gib": ("memory", 2**30),
    "host_gib": ("host_memory", 2**30),
    "fp8_speedup": ("fp8_speedup", 1),
    "peak_tflops": ("peak", 1e12),
}
_NEEDED = ("gpus_per_node", "nics_per_node", "memory_gib")
_NEEDED_RATES = (
    *("forward_tflops", "backward_tflops", "linear_tflops"),
    *("memory_gb_s", "within_gb_s", "nic_gb_s"),
)
_RATES = (*_NEEDED_RATES, "within_us", "nic_us", "host_gb_s", "channel_gb_s")
_UNITS = {"tflops": ("rate", 1e12), "gb_s": ("rate", 1e9), "us": ("latency", 1e-6)}
_CAPABILITIES = {"A": (8, 0), "H": (9, 0), "B": (10, 0), "GB": (10, 0)}  # by a GPU's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(Machine):
    """Equal nodes; a rate is what one GPU, link or NIC sustains one way."""

    name: str
    gpu: str = ""  # its name, where it is known
    gpus_per_node: int
    gpus_per_host: int = 0  # where a node, by its links, is several hosts
    memory: float  # bytes of a GPU
    host_memory: float = float("inf")  # bytes of a host
    fp8_speedup: float = 1.0  # of matrix products
    experts_seconds: float = 0.0  # of a layer of experts in a pass, beside products and bytes
    update_seconds: float = 0.0  # in which a host's processors update a parameter
    host_rate: float = 25e9  # bytes/s between a GPU and the host's memory
    peak: float  # FLOP/s, for the MFU
    working_set: float = 1.0  # bytes of attention at work for each that is counted, of other code
    nvlinks: int = 0  # of a GPU; 0: what NCCL does there is not known
    channels: int = 1  # of an NCCL communicator of a node's GPUs
    channel_rate: float = float("inf")  # bytes/s of one of them

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's number of the GPU's architecture; None if that is not known."""
        return _CAPABILITIES.get(self.gpu.rstrip("0123456789"))


def cluster_of(name: str, table: Mapping[str, Any], constant: Callable[[str], float]) -> Cluster:
    """Read a table of a cluster file; `constant` knows the values that are fitted.

    Raises:
        ValueError: a value is missing, unknown or no number that it can be, or the GPU's peak is
            not known.
    """
    others = ("gpu", "contended", "rates")
    _check_names(name, "", table, _NEEDED, (*_COUNTS, *_NUMBERS, *others))
    values: dict[str, Any] = {n: _count(name, n, table[n]) for n in _COUNTS if n in table}
    values["gpus_per_nic"] = max(1, values["gpus_per_node"] // values.pop("nics_per_node"))
    for field, (what, unit) in _NUMBERS.items():
        if field in table:
            values[what] = unit * _number(name, field, table[field])
    gpu = str(table.get("gpu", ""))
    peak = values.setdefault("peak", 1e12 * (peak_tflops(gpu) or 0.0))
    if not peak:
        raise ValueError(f"cluster {name}: its peak is not known; give it peak_tflops")
    return Cluster(
        name=name,
        gpu=gpu,
        **values,
        **_rates(name, table.get("rates", {}), peak, constant),
        contention=constant("contention") if table.get("contended") else 0.0,
        copy_rate=float("inf"),
        experts_seconds=1e-3 * constant("experts_ms"),
        update_seconds=1e-9 * constant("host_update"),
        hop_seconds=HOP_SECONDS,
        grain=KEYS_A_CALL,
        head_grain=HEAD_GRAIN,
        traffic=constant("traffic"),
    )


def _rates(
    name: str, given: Mapping[str, Any], peak: float, constant: Callable[[str], float]
) -> dict[str, Any]:
    """Return the rates by their fields, in units without prefixes."""
    _check_names(name, "rate ", given, _NEEDED_RATES, _RATES)
    rates = {}
    for field, value in given.items():
        value = value[0] if isinstance(value, list) and value else value
        what, _, unit = field.partition("_")
        kind, size = _UNITS[unit]
        if isinstance(value, str):
            try:
                value, size = constant(value), peak
            except KeyError:
                text = f"{value!r}: no such constant in published.toml, and no number"
                raise ValueError(f"cluster {name}: rate {field} = {text}") from None
        rates[f"{what}_{kind}"] = size * _number(name, f"rate {field}", value, zero=unit == "us")
    return rates


def _check_names(
    name: str, what: str, table: Mapping[str, Any], needed: Collection[str], known: Collection[str]
) -> None:
    if missing := [field for field in needed if field not in table]:
        raise ValueError(f"cluster {name} has no {what}{', '.join(missing)}")
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(
            f"cluster {name} has an unknown {what}{', '.join(unknown)}; known are "
            f"{', '.join(known)}"
        )


def _number(name: str, field: str, value: Any, *, zero: bool = False) -> float:
    """Return a number; ValueError for what is none, infinite, negative, or 0 unless that may be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value <= _LARGEST or (zero and value == 0)):
        kind = "a number from 0 on" if zero else "a positive number"
        raise ValueError(f"cluster {name}: {field} = {value!r} is not {kind}")
    return float(value)


def _count(name: str, field: str, value: Any) -> int:
    if not isinstance(value, int) or _number(name, field, value) < 1:
        raise ValueError(f"cluster {name}: {field} = {value!r} is not a whole number")
    return value
