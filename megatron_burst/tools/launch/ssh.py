"""Trains on a list of nodes over ssh, without a scheduler."""

import argparse
import os
import random
import shlex
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_burst.tools.launch import node, site
from megatron_burst.tools.launch.processes import (
    POLL_SECONDS,
    TERMINATED,
    LaunchError,
    Signals,
    run_logged,
    say,
    status_of,
)

ABOUT = """Trains on a list of nodes over ssh.

  megatron-burst launch ssh --nodes "node1 node2" --run 14b_1m_32gpu_a800

Starts the ranks of every node over ssh, without passwords (BURST_SSH, default: ssh with BatchMode).
Python, package and current directory have the same paths on all nodes. With BURST_IMAGE set the
ranks run in that container, started by docker run with BURST_DOCKER_OPTIONS.

When one node fails all are ended, with a message that names it. Nothing is left running on the
nodes even if this is killed: the ranks end with the connection that started them.
"""
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
DOCKER = "--gpus all --ipc host"

type Connections = Sequence[subprocess.Popen[bytes]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the list of nodes."""
    parser.add_argument(
        "--nodes",
        metavar='"HOST ..."',
        help="the first one is where the ranks meet (default: BURST_NODES, for example "
        '"$(megatron-burst launch check --list)")',
    )


def run(args: argparse.Namespace) -> int:
    """Train on all nodes to the end; return the status of the first that failed."""
    nodes = (args.nodes or os.environ.get("BURST_NODES", "")).split()
    if not nodes:
        raise LaunchError('say which nodes: --nodes "HOST HOST ..." or BURST_NODES')
    site.check_run(args.run)
    output = site.prepare_output(args)
    master = os.environ.get("BURST_MASTER") or nodes[0].rpartition("@")[2]
    port = int(os.environ.get("BURST_PORT") or random.randrange(10000, 30000))
    meeting = node.Meeting(len(nodes), master, port)
    commands = [_connect(args, output, meeting, *one) for one in enumerate(nodes)]
    if args.dry_run:
        print(*map(shlex.join, commands), sep="\n")
        return 0
    signals = Signals()
    return run_logged(lambda log: _run_nodes(nodes, commands, signals, log), output)


def _connect(
    args: argparse.Namespace, output: Path, meeting: node.Meeting, rank: int, host: str
) -> list[str]:
    """Return the command that starts a node from here."""
    image = os.environ.get("BURST_IMAGE")
    here, variables = Path.cwd(), site.variables_for_nodes()
    container = []
    if image:
        settings = [word for name in variables for word in ("--env", name)]
        volumes = [word for place in site.mounts(output) for word in ("--volume", place)]
        container = ["docker", "run", "--rm", "--init", "--interactive", "--network", "host"]
        container += [*site.words("BURST_DOCKER_OPTIONS", DOCKER), *settings, *volumes]
        container += ["--workdir", str(here), image]
    python = site.python_of_training(in_container=bool(image))
    more = ("--node-rank", str(rank), "--end-with-input")
    given = [f"{name}={value}" for name, value in variables.items()]
    remote = ["env", *given, *container, python, *node.command(args, output, meeting, *more)]
    line = f"cd {shlex.quote(str(here))} && exec {shlex.join(remote)}"
    return [*site.words("BURST_SSH", SSH), host, shlex.join(["bash", "-c", line])]


def _run_nodes(
    nodes: Sequence[str], commands: Sequence[Sequence[str]], signals: Signals, log: int
) -> int:
    """Run a command for each node to its end.

    Every connection's input is a pipe that only this process writes to. When it lets go of it,
    however it ends, the input of every node ends, and with it the ranks there.
    """
    connections = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        for command in commands
    ]
    running, failed = dict(zip(connections, nodes, strict=True)), 0
    while running:
        for connection in [one for one in running if one.poll() is not None]:
            name, status = running.pop(connection), status_of(connection)
            if status and not failed:
                failed = status
                say(f"{name} ended with status {status}, so all nodes are ended", output=log)
        if failed or signals.ended:
            _let_go(connections)
        elif signals.warned:
            signals.warned = False
            _warn(connections)
        time.sleep(POLL_SECONDS)
    return failed or (TERMINATED if signals.ended else 0)


def _let_go(connections: Connections) -> None:
    for connection in connections:
        assert connection.stdin is not None
        with suppress(OSError):
            connection.stdin.close()


def _warn(connections: Connections) -> None:
    for connection in connections:
        assert connection.stdin is not None
        with suppress(OSError):
            os.write(connection.stdin.fileno(), b"the time is soon over\n")
