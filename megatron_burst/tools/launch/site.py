"""The settings of a site and of a run: env file, network, Python, mounts, output."""

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from megatron_burst.tools import hardware
from megatron_burst.tools.flags import flags_in, variables
from megatron_burst.tools.launch.processes import say
from megatron_burst.transport import lock

ROOT = Path(__file__).resolve().parents[3]
CHECKOUT = (ROOT / "pyproject.toml").exists()  # and not an installed wheel
LAUNCH = ("-m", "megatron_burst.tools.launch")  # `megatron_burst launch` wants rich
# Of torchrun: else it meets at the machine's own name, and waits where that has no address.
ONE_MACHINE = ("--local-addr", "localhost", "--standalone")
FOR_NODES = re.compile(r"(BURST|MEGATRON_BURST|NCCL|GLOO|CUDA|OMP|TORCH|PYTORCH|NVTE)_")
ANYWHERE = "198.51.100.1"  # kept for documentation: the way to it is the default route


def load_env() -> None:
    """Read scripts/env.sh, or the file that BURST_ENV names, into this environment.

    What the environment already says wins where the file writes `: "${X:=value}"`. The package
    is found by all that is started from here, also if it is a checkout that is not installed.

    Raises:
        ValueError: the file that BURST_ENV names cannot be read, or the file fails.
    """
    named = os.environ.get("BURST_ENV")
    file = Path(named).absolute() if named else ROOT / "scripts" / "env.sh"
    if os.access(file, os.R_OK):
        # Below sshd bash reads ~/.bashrc, too, which -e and -u are not for.
        how = 'set -a; source "$1" >&2; exec env -0'
        command = ["bash", "--norc", "-euc", how, "bash", str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE)
        if done.returncode or not done.stdout:  # or it ended the shell
            raise ValueError(f"{file} ended with status {done.returncode}")
        lines = os.fsdecode(done.stdout).split("\0")
        settings = dict(line.split("=", 1) for line in lines if "=" in line)
        for name in os.environ.keys() - settings.keys():
            del os.environ[name]  # the file unsets it
        os.environ.update(settings)
    elif named:
        raise ValueError(f"BURST_ENV={named} cannot be read")
    paths = os.environ.get("PYTHONPATH", "").split(":")
    if CHECKOUT and str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = ":".join([str(ROOT), *filter(None, paths)])


def defaults(flags: Sequence[str]) -> dict[str, str]:
    """Return the settings of a training with these flags of Megatron that the environment lacks."""
    settings = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}]: "}
    settings = {name: value for name, value in settings.items() if not os.environ.get(name)}
    return settings | variables(flags_in(flags), os.environ)


def network_settings(master: str) -> dict[str, str]:
    """Return the settings that the environment lacks; `master` is the first node."""
    try:
        socket.getaddrinfo(master, None)
    except OSError as error:
        say(f"the ranks wait until the first node, {master}, has an address here: {error}")
    settings = dict[str, str]()
    if device := device_towards(master):  # NCCL takes a name alone for the beginning of names
        settings = {"NCCL_SOCKET_IFNAME": f"={device}", "GLOO_SOCKET_IFNAME": device}
    if ports := hardware.fastest_ports(hardware.SYSFS):
        settings["NCCL_IB_HCA"] = f"={','.join(ports)}"
    return {name: value for name, value in settings.items() if not os.environ.get(name)}


def device_towards(host: str) -> str:
    """Return the device by which this node reaches a host; on it, the one with its address.

    /etc/hosts makes many hosts' own names a loopback: then that of the default route, or the only
    one that has an address.
    """
    for target in (host, ANYWHERE):
        with suppress(OSError):
            family, kind, *_, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # which sends nothing
                own = probe.getsockname()[0]
            if not own.startswith(("127.", "::1")):
                return next(iter(_devices("to", own)), "")
    found = _devices("up", "scope", "global")
    return found[0] if len(found) == 1 else ""


def _devices(*which: str) -> list[str]:
    rows = json.loads(hardware.output("ip", "-j", "address", "show", *which) or "[]")
    return [str(row["ifname"]) for row in rows if row]


def words(variable: str, default: str = "") -> list[str]:
    """Return the words of a setting, split as a shell does.

    Raises:
        ValueError: a quote in it has no end.
    """
    value = os.environ.get(variable) or default
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{variable}={value}: {error}") from error


def python_of_training(*, in_container: bool = False) -> str:
    """Return the Python of the ranks: in a container the image's own."""
    return os.environ.get("BURST_PYTHON") or ("python3" if in_container else sys.executable)


def mounts(output: Path) -> list[str]:
    """Return what a container needs of this machine, each once, as docker wants it.

    Raises:
        ValueError: a path has a comma or a colon, which end it there.
    """
    needed = {str(Path.cwd()), str(output), *([str(ROOT)] if CHECKOUT else [])}
    env_file = os.environ.get("BURST_ENV")
    if env_file and Path(env_file).is_file():
        needed.add(str(Path(env_file).absolute()))
    if wrong := [path for path in needed if {",", ":"} & {*path}]:
        raise ValueError(f"{wrong[0]}: a path with a comma or a colon cannot be mounted")
    own = os.environ.get("BURST_MOUNTS", "")
    return [f"{path}:{path}" for path in sorted(needed)] + list(filter(None, own.split(",")))


def command_line(args: argparse.Namespace) -> str:
    """Return how the run was started."""
    return shlex.join(["megatron-burst", "launch", *args.command])


def output_of(args: argparse.Namespace) -> Path:
    """Return the directory of the run."""
    name = f"runs/{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    return Path(args.output or name).absolute()


def prepare_output(args: argparse.Namespace, output: Path) -> None:
    """Make the directory of a run that nothing refuses, with the command.

    Raises:
        InUseError: another job runs there.
    """
    output.mkdir(parents=True, exist_ok=True)
    lock.hold(output, say=say)
    (output / "status").unlink(missing_ok=True)
    (output / "command.txt").write_text(f"{command_line(args)}\n")
