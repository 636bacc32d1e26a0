"""Finds which network of this node the ranks shall use, where the site's settings do not say it."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from megatron_burst.tools import hardware

ANYWHERE = "198.51.100.1"  # kept for documentation: the way to it is the default route


def network_settings(master: str) -> dict[str, str]:
    """Return the settings that the environment lacks; `master` is the first node."""
    device = device_towards(master)
    found = {"NCCL_SOCKET_IFNAME": device, "GLOO_SOCKET_IFNAME": device}
    found["NCCL_IB_HCA"] = fastest_nics(hardware.SYSFS)
    return {name: value for name, value in found.items() if value and not os.environ.get(name)}


def device_towards(host: str) -> str:
    """Return the device by which this node reaches a host; on it, the one with its address."""
    for target in (host, ANYWHERE):  # /etc/hosts makes many hosts' own names a loopback
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # which sends nothing
            own = probe.getsockname()[0]
            if not own.startswith("127."):
                rows = json.loads(hardware.output("ip", "-j", "address", "show", "to", own) or "[]")
                return next((str(row["ifname"]) for row in rows if row), "")
    return ""


def fastest_nics(sysfs: Path) -> str:
    """Return "=name:port,..." of the active InfiniBand or RoCE ports of the highest rate.

    A NIC for storage or management beside them would be used for training, too.
    """
    ports = [p for p in hardware.network(sysfs) if ":" in p["name"] and p["rate"]]
    rates = {p["name"]: float(p["rate"].split()[0]) for p in ports if "ACTIVE" in p["state"]}
    fastest = [name for name, rate in rates.items() if rate == max(rates.values())]
    return "=" + ",".join(fastest) if fastest else ""
