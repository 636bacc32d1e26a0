"""Trains on a list of nodes over ssh, without a scheduler."""

import argparse
import os
import random
import shlex
from pathlib import Path

from megatron_burst.tools.launch import node, site
from megatron_burst.tools.launch.processes import run_logged

ABOUT = """Trains on a list of nodes over ssh.

  megatron-burst launch ssh --nodes "node1 node2" --run 14b_1m_32gpu_a800

Python, package and current directory have the same paths on all nodes, or BURST_IMAGE is set. When
one node fails all are ended, with a message that names it, and also if this is killed: the ranks
end with the connection that started them. The settings of a site: docs/cluster.md.
"""
# A connection that it would share itself (ControlPersist) outlives it and holds its output.
SSH = "ssh -o BatchMode=yes -o ControlMaster=no -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
DOCKER = "--gpus all --ipc host"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the list of nodes."""
    text = "the first one is where the ranks meet (default: BURST_NODES, for example "
    text += '"$(megatron-burst launch check --list)")'
    parser.add_argument("--nodes", metavar='"HOST ..."', help=text)


def run(args: argparse.Namespace) -> int:
    """Train on all nodes to the end; return the status of the first that failed."""
    hosts = hosts_of(args)
    port = os.environ.get("BURST_PORT") or str(random.randrange(10000, 30000))
    if not port.isdecimal():
        raise ValueError(f"BURST_PORT={port} is no number")
    output = site.output_of(args)
    master = os.environ.get("BURST_MASTER") or hosts[0].rpartition("@")[2]
    meeting = [*node.meeting(len(hosts), master, int(port)), "--end-with-input", "--node-rank"]
    commands = [
        (host, connect(host, output, *node.command(args, output, *meeting, str(rank))))
        for rank, host in enumerate(hosts)
    ]
    if args.dry_run:
        print(*(shlex.join(command) for _, command in commands), sep="\n")
        return 0
    site.prepare_output(args, output)
    return run_logged(commands, output)


def hosts_of(args: argparse.Namespace) -> list[str]:
    """Return the nodes of --nodes or the site's settings.

    Raises:
        ValueError: there are none, or ssh would take one for an option.
    """
    given = os.environ.get("BURST_NODES", "") if args.nodes is None else args.nodes
    if not (hosts := given.split()):
        raise ValueError('say which nodes: --nodes "HOST HOST ..." or BURST_NODES')
    if wrong := [host for host in hosts if host.startswith("-")]:
        raise ValueError(f"{wrong[0]} is no name of a node")
    return hosts


def connect(host: str, output: Path, *task: str) -> list[str]:
    """Return the command that runs the Python of a node from here, in its container if it has one.

    Args:
        host: the node.
        output: what a container sees, too.
        task: the words after `python`.
    """
    image = os.environ.get("BURST_IMAGE", "")
    here = Path.cwd()
    variables = {name: value for name, value in os.environ.items() if site.FOR_NODES.match(name)}
    paths = str(site.ROOT) * site.CHECKOUT if image else os.environ.get("PYTHONPATH", "")
    variables |= {"PYTHONPATH": paths} if paths else {}
    container: list[str] = []
    if image:
        settings = [word for name in variables for word in ("--env", name)]
        volumes = [word for place in site.mounts(output) for word in ("--volume", place)]
        container = ["docker", "run", "--rm", "--init", "--interactive", "--network", "host"]
        container += [*site.words("BURST_DOCKER_OPTIONS", DOCKER), *settings, *volumes]
        container += ["--workdir", str(here), image]
    given = [f"{name}={value}" for name, value in variables.items()]
    python = site.python_of_training(in_container=bool(image))
    words = ["env", *given, *container, python, *task]
    line = f"cd {shlex.quote(str(here))} && exec {shlex.join(words)}"
    return [*site.words("BURST_SSH", SSH), host, shlex.join(["bash", "-c", line])]
