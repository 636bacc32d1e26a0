"""Finds which network of this node the ranks shall use, where the site's settings do not say it."""

import json
import os
import socket
from contextlib import suppress

from megatron_burst.tools import hardware

ANYWHERE = "198.51.100.1"  # kept for documentation: the way to it is the default route


def network_settings(master: str) -> dict[str, str]:
    """Return the settings that the environment lacks; `master` is the first node."""
    device = device_towards(master)
    found = {"NCCL_SOCKET_IFNAME": device, "GLOO_SOCKET_IFNAME": device}
    if ports := hardware.fastest_ports(hardware.SYSFS):
        found["NCCL_IB_HCA"] = f"={','.join(ports)}"
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
