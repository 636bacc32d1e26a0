"""A Slurm of two nodes on this machine: real daemons in network namespaces of their own.

Each node has its own address, host name and /etc/hosts; the controller and munge run where the
switch between them is. Every file is in one new directory below /tmp, every process in one of the
namespaces: the machine's own Slurm or munge, if it runs one, is neither used nor touched, and at
the end, however it comes, all of it is removed. Needs root, iproute2 and the packages slurm-wlm and
munge of Debian or Ubuntu.
"""

import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import shaped_links as links  # noqa: E402

CONTROLLER = "ctl"
NODES = ("nA", "nB")
DAEMONS = ("slurmctld", "slurmd", "munged")
MBIT = math.inf

# A killed node is noticed after SlurmdTimeout; a requeued job begins after cred_expire.
CONFIGURATION = """
ClusterName=burst
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
KillWait=2
MessageTimeout=20
TCPTimeout=5
SlurmctldParameters=idle_on_node_suspend
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdSpoolDir={directory}/spool-%n
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
"""
NODE = "NodeName={name} NodeAddr={address} CPUs=2 State=UNKNOWN\n"
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\nCgroupMountpoint={directory}/cgroup\n"


class SlurmError(RuntimeError):
    """The cluster cannot be made here, or did not do what was waited for; the message says what."""


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """A running cluster; the names of its nodes are NODES."""

    directory: Path
    links: links.Cluster
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find this cluster and no other."""
        own = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        return {**own, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def namespace(self, host: str) -> str:
        return self.links.switch if host == CONTROLLER else self.links.namespace(NODES.index(host))

    def address(self, host: str) -> str:
        return links.SWITCH_ADDRESS if host == CONTROLLER else self.links.address(NODES.index(host))

    def run(self, *command: str, host: str = CONTROLLER, **variables: str) -> str:
        """Run a command on a host and return what it printed; SlurmError if it fails."""
        done = subprocess.run(
            self._on(host, *command),
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise SlurmError(f"`{' '.join(command)}`: {done.stderr}{done.stdout}")
        return done.stdout

    def start_node(self, name: str) -> None:
        """Switch a node on, also one that was killed."""
        self._start(name, "slurmd", "-D")

    def kill_node(self, name: str) -> None:
        """End every process of the node at once, as a power cut does."""
        _kill_all(self.namespace(name))

    def job(self, number: int) -> dict[str, str]:
        """Return what Slurm knows of a job: JobState, Restarts and so on."""
        for attempt in (1, 2, 3):
            try:
                text = self.run("scontrol", "show", "job", str(number))
                return dict(re.findall(r"(\S+?)=(\S*)", text))
            except SlurmError as error:  # the controller has no time on a busy machine
                if attempt == 3 or "timed out" not in str(error):
                    raise
        raise AssertionError

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition holds; SlurmError with the daemons' logs if it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise SlurmError(f"not within {seconds:.0f} s: {what}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the last lines of every daemon's log."""
        files = sorted(self.directory.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in files)

    def _on(self, host: str, *command: str) -> list[str]:
        # Not `ip netns exec`: it mounts a fresh /sys, where slurmd finds no cgroup file system.
        hosts = self.directory / "hosts"
        enter = f'hostname {host}; mount --bind {hosts} /etc/hosts; exec "$@"'
        inside = ["nsenter", f"--net=/run/netns/{self.namespace(host)}", "unshare", "--mount"]
        return [*inside, "--uts", "sh", "-c", enter, "sh", *command]

    def _start(self, host: str, *command: str) -> None:
        # The output goes to a file: a daemon that holds a pipe would keep its reader waiting.
        with (self.directory / f"{host}-{command[0]}.log").open("a") as log:
            process = subprocess.Popen(
                self._on(host, *command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.daemons.append(process)


def refuse_where_impossible() -> None:
    """Raise an error that says what is missing for a cluster."""
    missing = [daemon for daemon in DAEMONS if not shutil.which(daemon)]
    if missing:
        raise SlurmError(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    links.refuse_where_impossible()


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Start the cluster and remove it however the block ends; SIGTERM ends the block.

    Raises:
        SlurmError, links.LinkError: what is missing here, or which daemon did not start.
    """
    refuse_where_impossible()
    with ExitStack() as made:
        # Short, for Slurm's sockets: their paths have at most 108 characters.
        directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        made.callback(shutil.rmtree, directory)
        cluster = SlurmCluster(directory, made.enter_context(links.shaped_links(2, 1, MBIT)))
        made.callback(_end, cluster)
        _write_files(cluster)
        _start_daemons(cluster)
        yield cluster


def _write_files(cluster: SlurmCluster) -> None:
    directory = cluster.directory
    for name in ("munge", "state", "cgroup", *(f"spool-{node}" for node in NODES)):
        (directory / name).mkdir(mode=0o755)
    directory.chmod(0o755)  # munge asks for it
    hosts = [f"{cluster.address(name)} {name}" for name in (CONTROLLER, *NODES)]
    (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    values = {"controller": CONTROLLER, "address": cluster.address(CONTROLLER)}
    text = CONFIGURATION.format(directory=directory, **values)
    text += "".join(NODE.format(name=node, address=cluster.address(node)) for node in NODES)
    text += f"PartitionName=test Nodes={','.join(NODES)} Default=YES MaxTime=10\n"
    (directory / "slurm.conf").write_text(text)
    (directory / "cgroup.conf").write_text(CGROUPS.format(directory=directory))


def _start_daemons(cluster: SlurmCluster) -> None:
    munge = cluster.directory / "munge"
    cluster.run("mungekey", "--create", f"--keyfile={munge}/key")
    files = {"socket": "socket", "key-file": "key", "seed-file": "seed", "pid-file": "pid"}
    options = [f"--{option}={munge / name}" for option, name in files.items()]
    cluster._start(CONTROLLER, "munged", "--foreground", f"--log-file={munge}/log", *options)
    cluster.wait_for("munged's socket", (munge / "socket").exists, 10)
    cluster._start(CONTROLLER, "slurmctld", "-D")
    for node in NODES:
        cluster.start_node(node)

    def idle() -> bool:
        try:
            return cluster.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES)
        except SlurmError:
            return False

    cluster.wait_for("both nodes are idle", idle, 30)


def _end(cluster: SlurmCluster) -> None:
    for host in (*NODES, CONTROLLER):
        _kill_all(cluster.namespace(host))
    for daemon in cluster.daemons:
        daemon.wait()


def _kill_all(namespace: str) -> None:
    """End the processes of a namespace and wait until they are gone."""
    deadline = None
    while pids := subprocess.check_output(["ip", "netns", "pids", namespace], text=True).split():
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = deadline or time.monotonic() + 60
        if time.monotonic() > deadline:
            raise SlurmError(f"processes {pids} of {namespace} do not end")
        time.sleep(0.05)
