"""The network ports of this machine, as the system says; imports no torch."""

from pathlib import Path

SYSFS = Path("/sys/class")


def network(sysfs: Path = SYSFS) -> list[dict[str, str]]:
    """Return InfiniBand and RoCE ports, and network devices that say how fast they are."""
    ports = []
    for port in sorted(sysfs.glob("infiniband/*/ports/*")):
        name = f"{port.parts[-3]}:{port.name}"
        ports.append({"name": name, "state": _text(port / "state"), "rate": _text(port / "rate")})
    for device in sorted(sysfs.glob("net/*")):
        if (speed := _text(device / "speed")) and speed != "-1":
            state = _text(device / "operstate")
            ports.append({"name": device.name, "state": state, "rate": f"{speed} Mb/s"})
    return ports


def fastest_ports(sysfs: Path = SYSFS) -> dict[str, float]:
    """Return Gb/s of the InfiniBand and RoCE ports that are up, of the highest rate.

    Slower ones beside them are for storage or management.
    """
    ports = [p for p in network(sysfs) if ":" in p["name"] and p["rate"] and "ACTIVE" in p["state"]]
    rates = {port["name"]: float(port["rate"].split()[0]) for port in ports}
    return {name: rate for name, rate in rates.items() if rate == max(rates.values())}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of a device that is down cannot be read
        return ""
