"""Trains on the nodes of a Slurm job: submits launch.slurm, which starts torchrun on each."""

import argparse
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from megatron_burst.tools.launch import node, site
from megatron_burst.tools.options import split_at_dashes

ABOUT = """Trains on the nodes of a Slurm job.

  megatron-burst launch slurm --nodes 4 --run 14b_1m_32gpu_a800 --save C --load C --save-interval 9
  sbatch --nodes 4 [sbatch options] scripts/launch.slurm [options] [Megatron flags]

Outside of a job it submits itself, which takes Python; within one (sbatch, salloc) it runs there.
sbatch wants the root of the repository, or BURST_ROOT. A rank or node that dies ends the job on
every node; what goes back into the queue, containers and the settings of a site: docs/cluster.md.
"""
SCRIPT = Path(__file__).with_name("launch.slurm")
# Megatron has none of these.
_OF_SBATCH = """
    -A -C -J -p -q -t -w -x --account --array --begin --constraint --dependency --exclude
    --exclusive --gres --job-name --mem --nodelist --partition --qos --reservation --signal --time
""".split()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is Slurm's."""
    parser.add_argument("--nodes", type=int, metavar="N", help="how many nodes")
    text = "wait for the job and end with its status"
    parser.add_argument("--wait", action="store_true", help=text)
    text = "save before the job's time is over (sbatch --signal, default: 300 s), and go back into "
    text += "the queue, until the training is done"
    parser.add_argument("--chain", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Submit a job, or be one; return what a dry run ends with."""
    # scripts/launch.slurm, which may have options of sbatch of its own
    script = os.environ.get("BURST_BATCH_SCRIPT") or str(SCRIPT)
    image = bool(os.environ.get("BURST_IMAGE"))
    own = {
        "BURST_ROOT": str(site.ROOT),
        "BURST_PYTHON": site.python_of_training(in_container=image),
    }
    os.environ.update(own)
    if "SLURM_JOB_ID" in os.environ:
        os.execvp("bash", ["bash", script, *args.command[1:]])
    if not args.nodes:
        raise ValueError("say how many nodes: --nodes N")
    if not args.dry_run and not shutil.which("sbatch"):
        raise ValueError("there is no sbatch here: submit on a login node, or `launch ssh`")
    words, _ = split_at_dashes(args.command)
    if word := next((word for word in words if word.partition("=")[0] in _OF_SBATCH), ""):
        how = f"sbatch --nodes {args.nodes} {word} … {script}, or SBATCH_… in scripts/env.sh"
        raise ValueError(f"{word} is an option of sbatch: {how}; what is Megatron's goes behind --")
    output = site.output_of(args)
    if {"%", "\\"} & {*str(output)}:
        raise ValueError(f"{output}: in --output a % or \\ has a meaning for sbatch")
    os.environ["BURST_COMMAND"] = site.command_line(args)  # for the job, which writes it down
    given = [*["--chain"] * args.chain, "--output", str(output), *node.given(args)]
    wait = ["--wait"] if args.wait else []
    command = ["sbatch", "--nodes", str(args.nodes), *wait]
    command += ["--output", str(output / "slurm-%j.txt"), script, *given]
    in_job = _in_job(args.nodes, script, *given)
    if in_job.returncode:  # it has said why
        return in_job.returncode
    if not args.dry_run:
        output.mkdir(parents=True, exist_ok=True)  # for the file of sbatch
        os.execvp(command[0], command)
    print(shlex.join(["env", *(f"{name}={value}" for name, value in own.items()), *command]))
    print("# in the job:", in_job.stdout.rstrip(), sep="\n")
    print("# on every node, which adds its network devices:", flush=True)
    task = node.command(args, output, *node.meeting(args.nodes, "FIRST_NODE", 10000), "--dry-run")
    return subprocess.call([site.python_of_training(), *task])


def _in_job(nodes: int, script: str, *given: str) -> subprocess.CompletedProcess[str]:
    """Let the script say what the job will start, or why it will start nothing."""
    job = {"SLURM_JOB_ID": "0", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": ""}
    words, environment = ["bash", script, "--dry-run", *given], os.environ | job
    return subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True)
