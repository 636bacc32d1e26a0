"""Trains on the nodes of a Slurm job: submits itself, and in the job starts torchrun on each."""

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

from megatron_burst.tools.launch import node, site
from megatron_burst.tools.launch.processes import run_logged, say

ABOUT = """Trains on the nodes of a Slurm job.

  megatron-burst launch slurm --nodes 4 --run 14b_1m_32gpu_a800 --save C --load C --save-interval 9
  sbatch --nodes 4 [sbatch options] scripts/launch.slurm [options] [Megatron flags]

Outside of a job it submits itself, within one (sbatch, salloc) it runs there; sbatch wants the root
of the repository, or BURST_ROOT. A rank or node that dies ends the job on every node; what goes
back into the queue, containers and the settings of a site: docs/cluster.md.
"""
BATCH = ("--job-name=megatron-burst", "--ntasks-per-node=1", "--exclusive", "--requeue")
STEP = re.compile(rb" iteration +\d+/")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is Slurm's."""
    parser.add_argument("--nodes", type=int, metavar="N", help="how many nodes")
    text = "wait for the job and end with its status"
    parser.add_argument("--wait", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Submit a job, or be one; return its status."""
    return _be_job(args) if "SLURM_JOB_ID" in os.environ else _submit(args)


def _srun(args: argparse.Namespace, output: Path, nodes: int, master: str, port: int) -> list[str]:
    """Return the command of the job: one task a node."""
    image = os.environ.get("BURST_IMAGE", "")
    # All tasks of a job end when one fails. Without --cpu-bind=none a node's only task, torchrun
    # with all ranks, may be bound to one core.
    options = ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=600", "--cpu-bind=none"]
    options += ["--mpi=none", *site.words("BURST_SRUN_OPTIONS")]
    if image:
        mounts = ",".join(site.mounts(output))
        options += [f"--container-image={image}", f"--container-mounts={mounts}"]
        options += [f"--container-workdir={Path.cwd()}"]
    python = site.python_of_training(in_container=bool(image))
    task = node.command(args, output, *node.meeting(nodes, master, port))
    return ["srun", f"--nodes={nodes}", *options, python, *task]


# ---- outside of a job


def _submit(args: argparse.Namespace) -> int:
    if not args.nodes:
        raise ValueError("say how many nodes: --nodes N")
    output = site.prepare_output(args, runs=False)
    given = ["--output", str(output), *node.given(args)]
    command = ["sbatch", "--nodes", str(args.nodes), *(["--wait"] if args.wait else [])]
    command += ["--output", str(output / "slurm-%j.txt")]
    if script := os.environ.get("BURST_BATCH_SCRIPT"):  # scripts/launch.slurm, with its own options
        command += [script, *given]
    else:
        again = [site.python_of_training(), *site.LAUNCH, "slurm", *given]
        command += [*BATCH, "--open-mode=append", "--wrap", shlex.join(again)]
    os.environ["BURST_ROOT"] = str(site.ROOT)
    if not args.dry_run:
        os.execvp(command[0], command)
    where = args.nodes, "FIRST_NODE", 10000
    print(shlex.join(["env", f"BURST_ROOT={site.ROOT}", *command]))
    print("# in the job:", shlex.join(_srun(args, output, *where)), sep="\n")
    print("# on every node:", flush=True)
    task = node.command(args, output, *node.meeting(*where), "--dry-run")
    return subprocess.call([site.python_of_training(), *task])


# ---- in the job


def _be_job(args: argparse.Namespace) -> int:
    job, size = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_JOB_NUM_NODES"])
    if args.nodes not in (None, size):
        text = f"--nodes {args.nodes}, but this job has {size}; start it outside of the job"
        raise ValueError(text)
    # The same output after it was put into the queue again.
    output = site.prepare_output(args, f"runs/slurm-{job}")
    nodes = os.environ["SLURM_JOB_NODELIST"]
    hosts = subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True).split()
    master = os.environ.get("BURST_MASTER") or hosts[0]
    command = _srun(args, output, size, master, 10000 + int(job) % 20000)
    if args.dry_run:
        print(shlex.join(command))
        return 0
    log = output / "log.txt"
    before = log.stat().st_size if log.exists() else 0
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    # Slurm repeats a signal that it could not deliver to a dead node, to the step of that number.
    # So that it does not meet this start's step, that gets a number that no earlier start had.
    for _ in range(restarts):
        subprocess.call(["srun", "--nodes=1", "--ntasks=1", "--mpi=none", "true"])
    say(f"job {job} on {nodes}, started {restarts} time(s) before")
    status = run_logged([(nodes, command)], output, by_input=False)
    if status == 0 or os.environ.get("ENVIRONMENT") != "BATCH":
        return status
    return 0 if _requeue(job, restarts, log, before) else status


def _requeue(job: str, restarts: int, log: Path, before: int) -> bool:
    """Put a job that failed into the queue again, or say why not; return whether it is there."""
    limit = int(os.environ.get("BURST_REQUEUES") or 3)
    state = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], stdout=subprocess.PIPE)
    with log.open("rb") as file:
        file.seek(before)  # behind what earlier starts wrote
        made_a_step = any(map(STEP.search, file))
    if not made_a_step:
        say("it failed before its first step, so it is not put into the queue again")
    elif restarts >= limit:
        say(f"it was put into the queue again {restarts} time(s) already (BURST_REQUEUES)")
    elif state.stdout.strip() != b"RUNNING":
        say("it was cancelled or its time is over, so it is not put into the queue again")
    else:
        say(f"puts job {job} into the queue again")
        (log.parent / "status").unlink(missing_ok=True)
        return subprocess.call(["scontrol", "requeue", job]) == 0
    return False
