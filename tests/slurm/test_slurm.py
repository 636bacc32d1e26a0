"""scripts/launch.slurm on a real Slurm, two nodes on this machine. (slow tier)

Skipped, with the reason, where Slurm is not installed or cannot run.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from megatron_burst.tools.runlog import read_scalars
from tests.scripts.stand_ins import ROOT, Machine, gone, place
from tests.slurm.cluster import NODES, SlurmCluster, SlurmError, links, slurm_cluster
from tests.training.conftest import make_corpus
from tests.training.launcher import BURST, MODEL, train

pytestmark = pytest.mark.slow

LAUNCH = str(ROOT / "scripts" / "launch.slurm")
STEPS = 8
SAVED_EVERY = 3
TOLERANCE = 1e-4
DONE = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with ExitStack() as made:
        try:
            cluster = made.enter_context(slurm_cluster())
        except (SlurmError, links.LinkError) as error:
            pytest.skip(f"no Slurm of two nodes here: {error}")
        yield cluster


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return place(tmp_path)


class Job:
    """A submitted job and what it leaves behind."""

    def __init__(self, cluster: SlurmCluster, output: Path, *flags: str, **variables: str) -> None:
        self.cluster, self.output = cluster, output
        options = ("--nodes", "2", "--ranks-per-node", "2", "--output", str(output))
        given = {"BURST_ENV": "/dev/null", "MEGATRON_BURST_CPU": "1", **variables}
        printed = cluster.run(LAUNCH, *options, *flags, **given)
        self.number = int(printed.split()[-1])

    @property
    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    @property
    def running(self) -> bool:
        return self.state == "RUNNING"

    @property
    def restarts(self) -> int:
        return int(self.cluster.job(self.number)["Restarts"])

    @property
    def log(self) -> str:
        """What the script and the ranks printed, in all starts."""
        file = self.output / f"slurm-{self.number}.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            self.cluster.wait_for(what, condition, 300)
        except SlurmError as error:
            raise AssertionError(f"{error}\n{self.log[-4000:]}") from error

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: f" iteration {step:8d}/" in self.log)

    def end(self) -> str:
        self.wait_for("the end of the job", lambda: self.state in DONE)
        return self.state


# ---- training


def logged(log: str) -> dict[int, float]:
    """The loss of every step."""
    found = re.findall(r" iteration +(\d+)/.*? lm loss: (\S+)", log)
    return {int(step): float(loss) for step, loss in found}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    library = Path(re.__file__).parent
    data = make_corpus(tmp_path_factory.mktemp("corpus"), "--input", str(library))
    return (*data, *BURST, "--calculate-per-token-loss", "--train-iters", str(STEPS))


def submit(cluster: SlurmCluster, output: Path, *flags: str, **variables: str) -> Job:
    """Train the toy model on two nodes of two ranks."""
    return Job(
        *(cluster, output, *MODEL, *flags),
        *("--context-parallel-size", "4", "--burst-topology", "double"),
        BURST_PYTHON=sys.executable,
        **variables,
    )


def compare(job: Job, found: dict[int, float], expected: dict[int, float]) -> None:
    assert "double ring of 2 nodes x 2 ranks" in job.log
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    difference = max(abs(found[step] / expected[step] - 1) for step in found)
    print(f"largest difference of {STEPS} losses: {difference:.1e}; {found}")
    assert difference < TOLERANCE


def test_two_nodes_have_the_losses_of_one_rank(
    cluster: SlurmCluster, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    job = submit(cluster, tmp_path / "two-nodes", *flags)
    expected = train(tmp_path / "one-rank", 1, *flags).losses  # meanwhile
    assert job.end() == "COMPLETED", job.log[-4000:]
    assert job.restarts == 0
    compare(job, dict(read_scalars(job.output / "tensorboard")["lm loss"]), expected)


def test_after_a_killed_node_the_losses_are_still_those_of_one_rank(
    cluster: SlurmCluster, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    saved = str(tmp_path / "saved")
    saving = ("--save", saved, "--load", saved, "--save-interval", str(SAVED_EVERY))
    job = submit(cluster, tmp_path / "two-nodes", *flags, *saving)
    expected = train(tmp_path / "one-rank", 1, *flags).losses  # meanwhile
    job.wait_for_step(SAVED_EVERY + 1)
    cluster.kill_node(NODES[1])
    job.wait_for("the job leaves the dead node", lambda: job.state in ("PENDING", *DONE))
    cluster.start_node(NODES[1])
    assert job.end() == "COMPLETED", job.log[-4000:]
    assert job.restarts == 1
    first, second = job.log.split("started 1 time(s) before")
    resumed = min(logged(second))
    assert resumed > 1 and resumed % SAVED_EVERY == 1  # from a checkpoint
    # Of the second step after that Megatron logs the mean with the first: TensorBoard has its loss.
    after = dict(read_scalars(job.output / "tensorboard")["lm loss"])
    compare(job, logged(first) | after, expected)


def test_a_warning_before_the_time_limit_saves(
    cluster: SlurmCluster, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """As sbatch's --signal=USR1@SECONDS sends it: to every process of the job's steps."""
    saving = ("--save", str(tmp_path / "saved"), "--train-iters", "9999")
    handler = ("--exit-signal-handler", "--exit-signal", "SIGUSR1")
    job = submit(cluster, tmp_path / "out", *flags, *saving, *handler)
    job.wait_for_step(2)
    cluster.run("scancel", "--signal=USR1", str(job.number))
    assert job.end() == "COMPLETED", job.log[-4000:]
    last = int((tmp_path / "saved/latest_checkpointed_iteration.txt").read_text())
    assert 2 <= last < 9999


def test_a_chain_goes_on_until_the_training_is_done(
    cluster: SlurmCluster, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """As the default --signal=B:USR1@300 warns it: the batch script alone."""
    saved = tmp_path / "saved"
    saving = ("--save", str(saved), "--load", str(saved), "--save-interval", "9999", "--chain")
    more = (*saving, "--train-iters", "9999")
    job = submit(cluster, tmp_path / "out", *flags, *more, BURST_REQUEUES="0")
    starts = []
    for restarts in (0, 1):
        cluster.wait_for("it runs", lambda n=restarts: job.restarts == n and job.running, 200)
        behind = f"started {restarts} time(s) before"
        cluster.wait_for("a step", lambda t=behind: logged(job.log.partition(t)[2]), 200)
        cluster.run("scancel", "--batch", "--signal=USR1", str(job.number))
        cluster.wait_for("it is in the queue again", lambda n=restarts: job.restarts > n, 200)
        starts.append(min(logged(job.log.partition(behind)[2])))
        assert int((saved / "latest_checkpointed_iteration.txt").read_text()) > starts[-1]
    assert starts[0] == 1 < starts[1]
    cluster.run("scancel", str(job.number))
    assert job.end() == "CANCELLED"


def test_the_sbatch_file_of_the_tutorial_trains(cluster: SlurmCluster, tmp_path: Path) -> None:
    script, log = ROOT / "scripts" / "llama3_8b_128k.sbatch", tmp_path / "log.txt"
    small = (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 "
        "--num-query-groups 2 --vocab-size 256 --seq-length 256 --max-position-embeddings 256 "
        "--train-iters 3 --global-batch-size 2 --context-parallel-size 4 --lr-warmup-fraction 0"
    )
    saved = tmp_path / "saved"
    printed = cluster.run(
        *"sbatch --nodes 2 --gpus-per-node 0 --time 8".split(),
        *("--output", str(log), "--chdir", str(ROOT), str(script), *small.split()),
        **{"MEGATRON_BURST_CPU": "1", "RANKS": "2", "CHECKPOINTS": str(saved)},
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    number = int(printed.split()[-1])
    cluster.wait_for("its end", lambda: cluster.job(number)["JobState"] in DONE, 300)
    said = log.read_text(errors="replace")
    assert cluster.job(number)["JobState"] == "COMPLETED", said[-4000:]
    assert sorted(logged(said)) == [1, 2, 3]
    assert "burst attention: burst on 4 ranks (balanced" in said
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "3"


# ---- ends of a job, with a stand-in for torchrun


def stand_in(machine: Machine) -> dict[str, str]:
    names = ("STAND_INS", "REAL_PYTHON", "BURST_PYTHON")
    return {name: machine.environment[name] for name in names}


def test_a_failed_node_ends_the_other_and_goes_into_the_queue_as_often_as_said(
    cluster: SlurmCluster, machine: Machine
) -> None:
    more = {"FAIL_ON": NODES[1], "HANG": "1", "BURST_REQUEUES": "1"}
    job = Job(cluster, machine.folder / "out", **stand_in(machine), **more)
    assert job.end() == "FAILED"
    assert job.restarts == 1
    assert f"({NODES[0]}): the ranks of this node ended with status 143" in job.log
    assert "puts job" in job.log and "1 time(s) already" in job.log
    assert not_running(machine)


def test_a_job_that_never_made_a_step_fails_at_once(
    cluster: SlurmCluster, machine: Machine
) -> None:
    job = Job(cluster, machine.folder / "out", "--fail-early", **stand_in(machine))
    assert job.end() == "FAILED"
    assert job.restarts == 0
    assert "it fails before its first step\n" in job.log  # nothing of what it said is lost
    assert "of this node ended with status 9" in job.log
    assert "launch: it failed before a step was logged" in job.log


def test_of_an_array_one_job_goes_into_the_queue_again(
    cluster: SlurmCluster, machine: Machine
) -> None:
    """The last one, which has the number of all; the first is through by then."""
    machine.training(
        "echo ' iteration        1/       9 |'",
        "if [[ $SLURM_ARRAY_TASK_ID-${SLURM_RESTART_COUNT-} == 1- ]]; then sleep 5; exit 7; fi",
    )
    given = {"BURST_ENV": "/dev/null", "BURST_RANKS_PER_NODE": "1", "BURST_ROOT": str(ROOT)}
    place = ("--chdir", str(machine.folder), "--output", "%a.txt", "--nodes=1", "--array=0-1")
    cluster.run("sbatch", *place, LAUNCH, **stand_in(machine), **given)
    cluster.wait_for("the end of both", lambda: not cluster.run("squeue", "-h"), 200)
    starts = [machine.text(f"{number}.txt").count("time(s) before") for number in (0, 1)]
    assert starts == [1, 2]


@pytest.mark.parametrize("around", ["salloc --nodes 2 --ntasks 4", "srun --nodes 1 --exclusive"])
def test_a_node_has_one_task_whatever_the_job_was_asked_for(
    cluster: SlurmCluster, machine: Machine, around: str
) -> None:
    """More tasks than nodes, or a step that has all of the job, as of srun --pty."""
    more = {**stand_in(machine), "BURST_ENV": "/dev/null", "BURST_RANKS_PER_NODE": "2"}
    said = cluster.run(*around.split(), LAUNCH, "--output", str(machine.folder / "out"), **more)
    assert said.count(" iteration        1/") == int(around.split()[2])


def test_a_cancelled_job_stays_cancelled_and_leaves_nothing(
    cluster: SlurmCluster, machine: Machine
) -> None:
    job = Job(cluster, machine.folder / "out", **stand_in(machine), HANG="1")
    job.wait_for_step(3)
    cluster.run("scancel", str(job.number))
    assert job.end() == "CANCELLED"
    cluster.wait_for("the ranks end", lambda: not_running(machine), 60)
    time.sleep(1)
    assert (job.state, job.restarts) == ("CANCELLED", 0)


def not_running(machine: Machine) -> bool:
    pids = [int(file.read_text()) for file in machine.folder.glob("hanging-*")]
    return bool(pids) and all(map(gone, pids))


# ---- the cluster itself


def test_nothing_of_the_cluster_is_left_behind(cluster: SlurmCluster) -> None:
    code = """
import sys, time
sys.path.append("scripts/bench")
from tests.slurm.cluster import slurm_cluster
with slurm_cluster() as cluster:
    print(cluster.directory, flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    directory = process.stdout.readline().decode().strip()
    assert Path(directory).exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM
    assert not Path(directory).exists()
    assert not [name for name in links.namespaces() if name.startswith(f"burst{process.pid}-")]
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            assert directory.encode() not in file.read_bytes()
