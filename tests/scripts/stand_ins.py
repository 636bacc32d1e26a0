"""Stand-ins for ssh, docker, Slurm, nvidia-smi and Python, for tests of the shell scripts.

`place` puts them into a folder that comes first on PATH. Hosts are told apart by what `uname -n`
says.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"

# Runs what it is given on "another host"; from a host called "dead" there is no answer.
# So does one that is shared, which leaves a process that holds the output.
SSH = """
if [[ $* != *ControlMaster=no* ]]; then sleep 250 & fi # longer than a test
while [[ $1 == -* ]]; do if [[ $1 == -o ]]; then shift; fi; shift; done
host=${1#*@}; shift
if [[ $host == dead ]]; then echo "ssh: connect to host dead: No route to host" >&2; exit 255; fi
if [[ $host == *chatty ]]; then echo "welcome to $host"; fi
if [[ $host == only_chatty ]]; then exit; fi
FAKE_HOST=$host exec bash -c "$*"
"""
# The command follows the image. Variables named by --env pass, all others do not.
DOCKER = """
echo "docker $*" >>"$STAND_INS/docker.log"
kept=(PATH="$PATH" FAKE_HOST="${FAKE_HOST:-}" STAND_INS="$STAND_INS" REAL_PYTHON="$REAL_PYTHON")
shift
while [[ $1 == -* ]]; do
    case $1 in
        --env) kept+=("$2=${!2}"); shift ;;
        --volume | --workdir | --network | --gpus | --ipc) shift ;;
    esac
    shift
done
shift
exec env -i "${kept[@]}" "$@"
"""
UNAME = 'echo "${FAKE_HOST:-here}"'
# `python` of the training: writes down its arguments and what it should know, then behaves as told.
PYTHON = """
case $* in
    "-c import sys; sys.exit"* | "-m megatron_burst.tools."*) exec "$REAL_PYTHON" "$@" ;;
    *'burst plan --list nosuch'*) echo "no model, cluster or run matches ${*: -1}" >&2; exit 1 ;;
    *'burst plan --list llama'*) printf '%s\\n' models: '  llama'; exit ;;
    *'burst plan --list'*) printf '%s\\n' models: '  toy' runs: '  toy' '  toy_long'; exit ;;
    "-m megatron_burst compare "*)
        (shift 3; IFS="|"; echo "$*") >>"$STAND_INS/compared"
        if [[ $* == *"--fail-in $5" ]]; then exit 1; fi
        if [[ $* == *--hang ]]; then echo $$ >"$STAND_INS/hanging"; exec sleep 600; fi
        exit ;;
    *--fail-early*) echo "it fails before its first step"; exit 9 ;;
esac
host=$(uname -n)
printf '%s\\n' "$@" >"$STAND_INS/arguments-$host"
env >"$STAND_INS/environment-$host"
echo " iteration        1/       9 | from $host"
for number in 2 3; do echo " iteration        $number/       9 | from $host"; done
if [[ -n ${FAIL_ON:-} && $host == $FAIL_ON ]]; then
    # Where another host shall hang it does so first: what has not begun cannot be told to end.
    until [[ -z ${HANG:-} ]] || compgen -G "$STAND_INS/hanging-*" >/dev/null; do sleep 0.1; done
    echo "$host fails"
    exit 7
fi
if [[ -n ${LEAVE_BEHIND:-} ]]; then setsid sleep 987 & echo $! >"$STAND_INS/left"; fi
if [[ -n ${HANG:-} ]]; then # without a trap: bash loses a signal that comes while it sets one
    echo $$ >"$STAND_INS/new-$host"
    mv -- "$STAND_INS/new-$host" "$STAND_INS/hanging-$host"
    exec sleep 600
fi
"""
SCONTROL = """
echo "scontrol $*" >>"$STAND_INS/slurm.log"
if [[ $1 == show ]]; then printf '%s\\n' n1 n2; fi
"""
# Of an array two jobs: 42, which has the number of all, and 43.
SQUEUE = """
case $* in
    *%T) printf '%s\\n' '43 PENDING' "42 ${QUEUE_STATE-RUNNING}" ;;
    *%i) printf '%s\\n' '43 42_0' '42 42_1' ;;
    *) printf '%s\\n' PENDING RUNNING ;;
esac
"""
SBATCH = 'echo "sbatch $*" >>"$STAND_INS/slurm.log"; env | grep ^BURST >>"$STAND_INS/slurm.log"'
# One task a node; the first that fails ends the others.
SRUN = """
echo "srun $*" >>"$STAND_INS/slurm.log"
nodes=1
while [[ $1 == -* ]]; do
    case $1 in
        --nodes=*) nodes=${1#*=} ;;
        --nodelist=*) FAKE_HOST=${1#*=}; export FAKE_HOST ;;
    esac
    shift
done
if [[ $nodes == 1 ]]; then exec "$@"; fi
pids=()
for ((i = 0; i < nodes; i++)); do
    SLURM_NODEID=$i FAKE_HOST=n$((i + 1)) "$@" & pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do
    status=0
    wait -n || status=$?
    if ((status && !failed)); then failed=$status; kill "${pids[@]}" 2>/dev/null; fi
done
exit $failed
"""
# What a host's nvidia-smi says stands in a file of its name.
NVIDIA_SMI = """
file=$STAND_INS/gpus-$(uname -n)
[[ -e $file ]] || { echo "no devices were found"; exit 9; }
cat "$file"
"""
BODIES = {
    "ssh": SSH,
    "docker": DOCKER,
    "uname": UNAME,
    "python-of-training": PYTHON,
    "scontrol": SCONTROL,
    "squeue": SQUEUE,
    "sbatch": SBATCH,
    "srun": SRUN,
    "nvidia-smi": NVIDIA_SMI,
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A folder with the stand-ins, and the environment in which scripts find them."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        ours = ("BURST", "SLURM", "SBATCH", "NCCL", "GLOO", "MEGATRON_BURST")
        own = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        return own | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "STAND_INS": str(self.folder),
            "REAL_PYTHON": sys.executable,
            "BURST_PYTHON": str(self.folder / "bin" / "python-of-training"),
            "BURST_RANKS_PER_NODE": "2",
            "BURST_ENV": str(self.folder / "env.sh"),
        }

    def put(self, name: str, body: str) -> None:
        """Put a program on PATH, in the place of one of its name."""
        path = self.folder / "bin" / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body.strip()}\n")
        path.chmod(0o755)

    def run(
        self, script: str | Path, *arguments: str, expect: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in the folder, without input; return what it printed, check its status."""
        done = subprocess.run(
            [SCRIPTS / script, *arguments],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == expect, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done

    def start(
        self, script: str, *arguments: str, output: int = subprocess.PIPE, **variables: str
    ) -> subprocess.Popen[str]:
        """Start a script and return its process, in a session of its own."""
        return subprocess.Popen(
            [SCRIPTS / script, *arguments],
            cwd=self.folder,
            env=self.environment | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def arguments(self, host: str = "here") -> list[str]:
        """What torchrun would have got on a host."""
        return (self.folder / f"arguments-{host}").read_text().splitlines()

    def variables(self, host: str = "here") -> dict[str, str]:
        """The environment of torchrun on a host."""
        lines = (self.folder / f"environment-{host}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def training(self, *lines: str) -> None:
        """Say what the ranks of the job do."""
        launchers = 'case $* in *tools.launch*|*sys.exit*) exec "$REAL_PYTHON" "$@" ;; esac'
        self.put("python-of-training", "\n".join([launchers, *lines]))

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


def gone(pid: int) -> bool:
    """Whether a process has ended; one that waits for init to take its status has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for[T](condition: Callable[[], T], seconds: float = 250) -> T:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.02)
    return found


def place(folder: Path) -> Machine:
    """Write the stand-ins into folder/bin."""
    (folder / "bin").mkdir()
    machine = Machine(folder)
    for name, body in BODIES.items():
        machine.put(name, body)
    (folder / "bin" / "python3.12").symlink_to(sys.executable)
    (folder / "env.sh").write_text("")
    return machine
