"""The network ports of this machine, as the system says; imports no torch."""

from pathlib import Path

SYSFS = Path("/sys/class")


def fastest_ports(sysfs: Path = SYSFS) -> dict[str, float]:
    """Return Gb/s of the InfiniBand and RoCE ports that are up, of the highest rate.

    Slower ones beside them are for storage or management.
    """
    rates = {
        f"{port.parts[-3]}:{port.name}": float(rate.split()[0])
        for port in sorted(sysfs.glob("infiniband/*/ports/*"))
        if (rate := text(port / "rate")) and "ACTIVE" in text(port / "state")
    }
    return {name: rate for name, rate in rates.items() if rate == max(rates.values())}


def text(path: Path) -> str:
    """Return what a file of the system says; nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:  # of a port that is down
        return ""
