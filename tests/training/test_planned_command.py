"""What `megatron-burst plan --search` prints is started as it is printed. (slow)"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_burst.tools.command import main
from tests.training.launcher import LONGEST, environment

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --hybrid-layer-pattern *E*E"
SAVED = """--context-parallel-size 2 --use-megatron-fsdp --ckpt-format fsdp_dtensor
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 2
    --lm-head-loss chunked --recompute-offload --mlp-chunks 2"""
PLACES = {
    "all savings": SAVED,
    "pipeline": "--pipeline-model-parallel-size 2 --context-parallel-size 2",
    "experts": f"--context-parallel-size 2 --expert-model-parallel-size 2 {EXPERTS}",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_the_command_that_is_found_trains(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "plan --model toy --cluster cpu --gpus 4 --seq-length 256 --fractions 0 --json"
    words = f"{asked} --search pp ep -- --train-iters 2 {' '.join(PLACES[place].split())}"
    assert main(words.split()) == 0
    line = json.loads(capsys.readouterr().out)[0]["command"]
    assert set(PLACES[place].split()) <= set(shlex.split(line.replace("|", "")))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        line,
        shell=True,
        cwd=tmp_path,
        env=environment() | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-6000:]}"
    assert re.search(r"iteration +2/ +2 .*lm loss", done.stdout), done.stdout[-6000:]
