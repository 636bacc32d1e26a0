"""A cluster on one machine: network namespaces joined by links of a chosen speed.

Every rank has a namespace of its own, because gloo does not bind the sockets that it connects: only
a rank's own routes decide by which link its bytes leave.

    rank --- near0, near1 ... --- the other ranks of its node: not shaped
      \\---- NIC ---- switch ----- the ranks of other nodes: shaped in both directions

So traffic between nodes leaves by the sender's NIC, whichever rank it goes to. Needs root and
iproute2. Nothing is made outside the new namespaces, and with them all of it disappears.
"""

import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

NIC, SWITCH_ADDRESS = "nic", "10.77.255.254"
# Cubic is not permitted in every namespace; reno always is. The links stand for RDMA, which has no
# slow start; with it, a ring would gain by sending to one neighbour alone, a connection never idle.
SETTINGS = "net.ipv4.tcp_congestion_control=reno net.ipv4.ip_forward=1"
SETTINGS += " net.ipv4.tcp_slow_start_after_idle=0"
BURST_SECONDS, LEAST_BURST, LARGEST_PACKET = 2e-3, 4_000, 65_536
"""A shaper that idled lets a burst through at once, for nothing, so it is little: what its rate
gives in 2 ms, for a busy core wakes up no sooner, but two frames. TCP hands over whole packets of
many frames; one larger than a burst, with the headers of its frames, a core would have to cut."""
ENDINGS = (signal.SIGTERM, signal.SIGHUP)


class LinkError(RuntimeError):
    """The links cannot be made here; the message says what is missing or what failed."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equally many ranks; a rank is known by its number in the job."""

    nodes: int
    ranks_per_node: int
    prefix: str  # of the namespaces' names

    @property
    def ranks(self) -> range:
        return range(self.nodes * self.ranks_per_node)

    @property
    def switch(self) -> str:
        return f"{self.prefix}-switch"

    @property
    def namespaces(self) -> list[str]:
        return [self.switch, *map(self.namespace, self.ranks)]

    def namespace(self, rank: int) -> str:
        return f"{self.prefix}-rank{rank}"

    def address(self, rank: int) -> str:
        node, local = divmod(rank, self.ranks_per_node)
        return f"10.77.{node}.{local + 1}"


@contextmanager
def shaped_links(nodes: int, ranks_per_node: int, mbit: float) -> Iterator[Cluster]:
    """Make the namespaces and links and remove them however the block ends.

    Cards let `mbit` Mbit/s pass, or with infinity whatever they can.
    SIGTERM and SIGHUP become SystemExit inside the block; SIGINT stays KeyboardInterrupt.

    Raises:
        LinkError: not root, no iproute2, or a command of it failed.
    """
    refuse_where_impossible()
    cluster = Cluster(nodes, ranks_per_node, f"burst{os.getpid()}")
    with ExitStack() as made:  # removes again, should a signal come before the block below
        for number in ENDINGS:
            made.callback(signal.signal, number, signal.signal(number, _leave))
        try:
            with _undisturbed():
                _build(cluster, mbit, made)
            yield cluster
        finally:
            with _undisturbed():
                made.close()


def refuse_where_impossible() -> None:
    """Raise a LinkError that says what is missing to make namespaces and shaped links."""
    missing = [f"`{tool}` of iproute2" for tool in ("ip", "tc") if not shutil.which(tool)]
    if os.geteuid() != 0:
        missing.append("root, for network namespaces and tc")
    if missing:
        raise LinkError(f"shaped links need {', '.join(missing)}")


def namespaces() -> list[str]:
    """Return the names of all network namespaces of this machine."""
    return [entry["name"] for entry in json.loads(_run("ip -j netns list") or "[]")]


def enter(namespace: str) -> None:
    """Move this thread, and the threads that it starts later, into the namespace."""
    with Path("/run/netns", namespace).open() as handle:
        os.setns(handle.fileno(), os.CLONE_NEWNET)


def _build(cluster: Cluster, mbit: float, made: ExitStack) -> None:
    for name in cluster.namespaces:
        _run(f"ip netns add {name}")
        made.callback(_run, f"ip netns delete {name}")
        _run(f"ip -n {name} link set lo up")
        _run(f"ip netns exec {name} sysctl -qw {SETTINGS}")
    _run(f"ip -n {cluster.switch} address add {SWITCH_ADDRESS} dev lo")
    for rank in cluster.ranks:
        _plug_in(cluster, rank, mbit)
        first_of_node = rank - rank % cluster.ranks_per_node
        for peer in range(first_of_node, rank):
            _join(cluster, rank, peer)


def _plug_in(cluster: Cluster, rank: int, mbit: float) -> None:
    """Give the rank its address and its NIC, a link to the switch shaped at both ends."""
    here, port, address = cluster.namespace(rank), f"port{rank}", cluster.address(rank)
    _veth(here, NIC, cluster.switch, port)
    _run(f"ip -n {here} address add {address} dev {NIC}")
    _run(f"ip -n {here} route add 10.77.0.0/16 via {SWITCH_ADDRESS} dev {NIC} onlink")
    _run(f"ip -n {cluster.switch} route add {address} dev {port}")
    if not math.isinf(mbit):
        for name, device in ((here, NIC), (cluster.switch, port)):
            shape = f"tbf rate {mbit}mbit burst {burst_bytes(mbit)} latency 50ms"
            _run(f"tc -n {name} qdisc add dev {device} root {shape}")
        _run(f"ip -n {here} link set {NIC} gso_max_size {packet_bytes(mbit)}")


def burst_bytes(mbit: float) -> int:
    """Return what a shaper lets through at once."""
    return max(LEAST_BURST, round(mbit * 1e6 / 8 * BURST_SECONDS))


def packet_bytes(mbit: float) -> int:
    """Return how large TCP's packets may be: with a twentieth for headers no more than a burst."""
    return min(LARGEST_PACKET, burst_bytes(mbit) * 9 // 10)


def _join(cluster: Cluster, rank: int, peer: int) -> None:
    """Link two ranks of a node directly."""
    _veth(cluster.namespace(rank), f"near{peer}", cluster.namespace(peer), f"near{rank}")
    for a, b in ((rank, peer), (peer, rank)):
        _run(f"ip -n {cluster.namespace(a)} route add {cluster.address(b)} dev near{b}")


def _veth(namespace: str, device: str, other: str, other_device: str) -> None:
    """Make a pair of devices inside the two namespaces and switch both on."""
    peer = f"peer name {other_device} netns {other}"
    _run(f"ip -n {namespace} link add {device} type veth {peer}")
    _run(f"ip -n {namespace} link set {device} up")
    _run(f"ip -n {other} link set {other_device} up")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"`{command}` failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold signals back, also from the commands that are run, until the block is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *ENDINGS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
