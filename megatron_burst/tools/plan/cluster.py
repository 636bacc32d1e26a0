"""The machines that a step runs on: what a GPU and its links sustain, as values."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_burst.plans.choice.machine import HEAD_GRAIN, HOP_SECONDS, KEYS_A_CALL, Machine
from megatron_burst.tools.flops import peak_tflops

_LARGEST = 1e18
_NEEDED = ("gpus_per_node", "nics_per_node", "memory_gib")
_OPTIONAL = (
    *("gpu", "peak_tflops", "gpus_per_host", "host_gib", "fp8_speedup", "contended"),
    *("nvlinks", "channels", "rates"),
)
_COUNTS = ("gpus_per_node", "gpus_per_host", "nics_per_node", "nvlinks", "channels")
# Of rates that need not be given.
_USUAL = {"within_us": 0.0, "nic_us": 0.0, "host_gb_s": 25.0, "channel_gb_s": 1e9}
_RATES = (
    *("forward_tflops", "backward_tflops", "linear_tflops"),
    *("memory_gb_s", "within_gb_s", "nic_gb_s", *_USUAL),
)
_CAPABILITIES = {"A": (8, 0), "H": (9, 0), "B": (10, 0), "GB": (10, 0)}  # by a GPU's name
_UNITS = {"tflops": ("rate", 1e12), "gb_s": ("rate", 1e9), "us": ("latency", 1e-6)}


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
    if missing := [field for field in _NEEDED if field not in table]:
        raise ValueError(f"cluster {name} has no {', '.join(missing)}")
    _refuse_unknown(name, "", table, (*_NEEDED, *_OPTIONAL))
    counts = {field: _count(name, field, table[field]) for field in _COUNTS if field in table}
    if "peak_tflops" in table:
        peak = 1e12 * _number(name, "peak_tflops", table["peak_tflops"])
    else:
        peak = 1e12 * (peak_tflops(str(table.get("gpu", ""))) or 0.0)
    if not peak:
        raise ValueError(f"cluster {name}: its peak is not known; give it peak_tflops")
    return Cluster(
        name=name,
        gpu=str(table.get("gpu", "")),
        gpus_per_node=counts["gpus_per_node"],
        gpus_per_host=counts.get("gpus_per_host", 0),
        nvlinks=counts.get("nvlinks", 0),
        channels=counts.get("channels", 1),
        memory=_number(name, "memory_gib", table["memory_gib"]) * 2**30,
        host_memory=_number(name, "host_gib", table.get("host_gib", _LARGEST)) * 2**30,
        **_rates(name, table.get("rates", {}), peak, constant),
        fp8_speedup=_number(name, "fp8_speedup", table.get("fp8_speedup", 1.0)),
        gpus_per_nic=max(1, counts["gpus_per_node"] // counts["nics_per_node"]),
        contention=constant("contention") if table.get("contended") else 0.0,
        copy_rate=float("inf"),
        experts_seconds=1e-3 * constant("experts_ms"),
        update_seconds=1e-9 * constant("host_update"),
        hop_seconds=HOP_SECONDS,
        peak=peak,
        grain=KEYS_A_CALL,
        head_grain=HEAD_GRAIN,
        traffic=constant("traffic"),
    )


def _rates(
    name: str, table: Any, peak: float, constant: Callable[[str], float]
) -> Mapping[str, float]:
    """Return the rates by their fields, in units without prefixes."""
    if not isinstance(table, Mapping):
        raise ValueError(f"cluster {name}: rates = {table!r} is no table")
    _refuse_unknown(name, "rate ", table, _RATES)
    given, rates = _USUAL | dict(table), {}
    for field in _RATES:
        if field not in given:
            raise ValueError(f"cluster {name} has no rate {field}")
        value = given[field]
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


def _refuse_unknown(name: str, what: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
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
