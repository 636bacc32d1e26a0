"""Finds which network of this node the ranks shall use, where the site's settings do not say it."""

import ipaddress
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from megatron_burst.tools import hardware


def network_settings(master: str) -> dict[str, str]:
    """Return the settings that the environment lacks; `master` is the first node."""
    device = device_towards(master)
    found = {"NCCL_SOCKET_IFNAME": device, "GLOO_SOCKET_IFNAME": device}
    found["NCCL_IB_HCA"] = fastest_nics(hardware.SYSFS)
    return {name: value for name, value in found.items() if value and not os.environ.get(name)}


def device_towards(host: str) -> str:
    """Return the device by which this node reaches a host; on it, the one with its address."""
    try:
        address = str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except OSError:
        return ""
    if ipaddress.ip_address(address).is_loopback:  # /etc/hosts gives many hosts' own names so
        rows = _ip("route", "show", "default")
    else:
        own = [row for row in _ip("address", "show", "to", address) if row]
        rows = own or _ip("route", "get", address)
    return next((str(row.get("dev") or row["ifname"]) for row in rows), "")


def fastest_nics(sysfs: Path) -> str:
    """Return "=name:port,..." of the active InfiniBand or RoCE ports of the highest rate.

    A NIC for storage or management beside them would be used for training, too.
    """
    ports = [port for port in hardware.network(sysfs) if ":" in port["name"]]
    rates = {p["name"]: float(p["rate"].split()[0]) for p in ports if "ACTIVE" in p["state"]}
    fastest = [name for name, rate in rates.items() if rate == max(rates.values())]
    return "=" + ",".join(fastest) if fastest else ""


def _ip(*arguments: str) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(["ip", "-j", *arguments], capture_output=True, check=True)
        return list(json.loads(done.stdout or "[]"))
    except (OSError, subprocess.CalledProcessError):
        return []
