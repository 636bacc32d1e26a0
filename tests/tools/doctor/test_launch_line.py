"""A training command is taken apart, however it begins. (fast tier)"""

from pathlib import Path

import pytest

from megatron_burst.tools.doctor.checks import launcher_findings
from megatron_burst.tools.doctor.launch_line import OUR_ENTRY, LaunchLine, Target, split

FLAGS = ("--num-layers", "4", "--seq-length", "64")


@pytest.mark.parametrize(
    ("start", "program", "nodes", "ranks", "environment"),
    [
        ("", OUR_ENTRY, None, None, {}),
        (f"python -m {OUR_ENTRY}", OUR_ENTRY, None, None, {}),
        (f"torchrun --nproc-per-node 8 -m {OUR_ENTRY}", OUR_ENTRY, 1, 8, {}),
        (f"A=1 B=x /bin/torchrun --nnodes 4 -m {OUR_ENTRY}", OUR_ENTRY, 4, 1, {"A": "1", "B": "x"}),
        (
            f"srun -N 2 python -m torch.distributed.run --nnodes=2:4 --nproc_per_node=gpu "
            f"--rdzv-endpoint a:1 -m {OUR_ENTRY}",
            OUR_ENTRY,
            2,
            3,
            {},
        ),
        ("torchrun -m megatron_burst.run there/pretrain_gpt.py", "there/pretrain_gpt.py", 1, 1, {}),
        ("python -u -m megatron_burst.run x.py", "x.py", None, None, {}),
        ("numactl -m 0 python -m megatron_burst.run x.py", "x.py", None, None, {}),
        ("docker run -m 9g image torchrun --nnodes 2 -m megatron_burst.run x.py", "x.py", 2, 1, {}),
    ],
)
def test_a_command_is_parted_into_launcher_program_and_flags(
    start: str, program: str, nodes: int | None, ranks: int | None, environment: dict[str, str]
) -> None:
    line = split([*start.split(), *FLAGS], gpus_here=3)
    assert line == LaunchLine(program, FLAGS, True, nodes, ranks, environment)


def test_a_variable_means_the_nodes_that_are_known() -> None:
    for said, nodes in (("$N", 4), ("2", 2), ("$LEAST:4", 4)):
        line = split(["torchrun", "--nnodes", said, "-m", OUR_ENTRY, *FLAGS], 8, nodes=4)
        assert (line.nodes, line.ranks_per_node) == (nodes, 1)


@pytest.mark.parametrize(
    ("said", "here", "ranks"), [("gpu", 8, 8), ("gpu", 0, None), ("auto", 8, 8)]
)
def test_gpus_of_another_machine_are_not_counted(said: str, here: int, ranks: int | None) -> None:
    line = split(["torchrun", "--nproc-per-node", said, "-m", OUR_ENTRY], gpus_here=here)
    assert line.ranks_per_node == ranks
    found = [finding.remedy for finding in launcher_findings(line, Target(1, ranks or 1))]
    assert found == ([] if ranks else ["--nproc-per-node, or --gpus-per-node for a cluster"])
    assert not [*launcher_findings(line, Target(1, 8, (9, 0)))]  # the same of a cluster


def test_a_script_is_attached_if_it_starts_us_and_asks_for_us(tmp_path: Path) -> None:
    burst = ("--context-parallel-algo=burst",)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("import torch\n")
    assert not split(["python", str(script), *FLAGS, *burst]).is_attached
    script.write_text("import megatron_burst.launch\n")
    assert split(["torchrun", str(script), *FLAGS, *burst]).is_attached
    assert not split(["torchrun", str(script), *FLAGS]).is_attached
    assert split(["python", "-m", OUR_ENTRY, *FLAGS]).is_attached


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sbatch job.sh", "no training program in: sbatch job.sh"),
        ("torchrun --nproc-per-node", "torchrun: .*expected one argument"),
        ("torchrun --nnodes $NODES train.py", r"torchrun: --nnodes \$NODES is no number"),
        ("python -m megatron_burst.run", "wants a script"),
    ],
)
def test_what_is_no_training_command(command: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(command.split())
