"""The stage of gpu-check that starts ranks, and what it makes of their figures. (fast tier)"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_burst.tools.gpu_check import command, one_of_ranks, ranks
from megatron_burst.tools.gpu_check.stage import Device
from tests.workers import Team, WorkerPool


def test_ranks_that_do_not_end_are_ended() -> None:
    """By SIGTERM, which torchrun passes on to its ranks; they have sessions of their own."""
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit('told to end'));"
    printed, errors = ranks.finished([sys.executable, "-c", f"{code} time.sleep(60)"], {}, 1.5)
    assert not printed and errors == "told to end\n\nnot at its end after 1.5 s"


def test_ranks_end_with_what_has_started_them() -> None:
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    with pytest.raises(SystemExit, match="143"):
        ranks.finished([sys.executable, "-c", code], {})


def of_ranks(team: Team) -> dict[str, Any]:
    return one_of_ranks.measure(Device(torch.device("cpu"), Path()), team.context)


def test_ranks_measure_their_messages(workers: WorkerPool) -> None:
    """K and V in bfloat16, and layers of the flat ring, of four ranks of the mesh, too."""
    found, *_ = workers.run(4, of_ranks)
    bare, layers = found["messages"], found["layers"]
    assert [*layers] == ["kv ring, flat", "kv ring, mesh"]
    assert bare["bytes"] == 2 * 32 * 4 * 16 * 2 and min(bare.values()) > 0
    for layer in layers.values():
        assert 0 < layer["host"] <= layer["layer"]
        assert layer["documented"] > 4 * 32 * 4 * 16 * 2


LAYER = {"host": 1e-3, "layer": 4e-3, "alone": 3e-3, "before": 0, "connected": 2**20}
LAYER |= {"used": 2**21, "retries": 0, "reserved": 12, "documented": 10}
BARE = {"bytes": 4e9, "alone": 1.0, "before": 1.25, "in": 2.0}
BARE |= {"tile": 1.6, "tile, before": 2.5, "tile, in": 2.0}
AS_IT_IS = {"messages": BARE, "layers": {"kv ring, flat": LAYER}}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    """Eight GPUs, as far as the stage of ranks asks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(ranks, "loaded", lambda: (2, 28, 9))
    return Device(torch.device("cuda"), tmp_path, 8)


def test_every_setting_is_tried_and_the_best_is_chosen(
    node: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def finished(words: list[str], settings: dict[str, str]) -> Any:
        assert words[7] == "8" and words[10:12] == ["cuda", "nccl"]
        tried.append((*words[12:], *settings.items()))
        if settings.get("NCCL_CGA_CLUSTER_SIZE"):
            return "", "cluster refused"
        layer = LAYER | {"layer": 3e-3 if settings == {"NCCL_MAX_CTAS": "8"} else 4e-3}
        return json.dumps(AS_IT_IS | {"layers": {"kv ring, flat": layer}}), ""

    monkeypatch.setattr(ranks, "finished", finished)
    checks = {check.name: check for check in ranks.check(node)}
    wanted = [(axis, value) for axis, (_, *some) in ranks._AXES.items() for value in some]
    margins = [(value,) for axis, value in wanted if axis == ranks._MARGIN]
    others = [("8", (axis, value)) for axis, value in wanted if axis != ranks._MARGIN]
    assert tried == [("8", "compare"), *margins, *others]
    faults = [name for name, check in checks.items() if not check.passed]
    assert faults == ["NCCL_CGA_CLUSTER_SIZE 4"]
    assert checks["choice: NCCL_MAX_CTAS"].found.startswith("8, ")
    assert checks["choice: NCCL_CGA_CLUSTER_SIZE"].found.startswith("as it is, 1.000")
    assert checks["a message posted before a tile"].found == (
        "0.80 of its rate alone, landed at 0.50 of the tile, which took 1.56 of its time alone"
    )
    memory = checks["kv ring, flat: memory of communicators"].found
    assert memory == "1 MiB connected, 2 MiB after the first layer"
    assert checks["kv ring, flat: reserved over the documented peak"].found == "1.2"


def test_what_is_no_faster_than_it_is_is_not_chosen() -> None:
    assert ranks.chosen({"as it is": 1.0, "8": 0.99}) == "as it is, 1.000 of the time of as it is"
    assert ranks.chosen({"8": 1.0, "16": 0.9, "32": 0.95}) == "16, 0.900 of the time of 8"


def test_one_gpu_says_which_nccl_serves_it(node: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo results are compared all the same; where one NCCL serves two, nothing is chosen."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    given: list[Any] = []

    def finished(*words: Any) -> tuple[str, str]:
        given.append(words)
        compared = {"results": {"x": {"results": {"a": FOUND}, "problems": []}}}
        return json.dumps(AS_IT_IS | compared if "nccl" in words[0] else compared), ""

    monkeypatch.setattr(ranks, "finished", finished)
    why, wrong, settings = ranks.check(replace(node, ranks=4))
    said = "left out: 1 GPU cannot show it, 2.28.9 takes no two ranks on one, 2.30.7 does"
    said += ": LD_PRELOAD its libnccl.so.2"
    assert (why.found, why.passed) == (said, True)
    assert not wrong.passed and wrong.name.startswith("4 ranks over gloo, x: 1 cases")
    assert given.pop()[0][11] == "gloo" and settings.found.startswith("not timed")
    assert ranks.refusal(2, 1, (2, 30, 7)) == ""
    assert ranks.refusal(4, 1, (2, 30, 7)) == "NCCL 2.30.7 takes two ranks on a GPU"
    monkeypatch.setattr(ranks, "loaded", lambda: (2, 31, 1))
    *_, settings = ranks.check(replace(node, ranks=2))
    ((words, environment),) = given
    assert words[11] == "nccl" and settings.found.startswith("not timed")
    assert environment == {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}


@pytest.mark.parametrize(
    ("gpus", "nccl", "expected"),
    [(0, None, 4), (1, (2, 28, 9), 4), (1, (2, 30, 7), 2), (3, None, 2), (8, None, 8)],
)
def test_how_many_ranks_there_are(
    monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: Any, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(command, "loaded", lambda: nccl)
    assert command._ranks("cuda" if gpus else "cpu") == expected


FOUND = {"out": {"error": 0.5, "allowed": 1.0}, "dq": {"error": 3.0, "allowed": 2.0}}


def test_the_findings_of_several_ranks_are_judged() -> None:
    (wrong,) = ranks.judge("x", {"results": {"a": FOUND}, "problems": []})
    assert not wrong.passed and wrong.found == "1.5 of what is allowed (dq; a)"
    fine = {"results": {"a": {"out": FOUND["out"]}}, "problems": ["a cannot run: why"]}
    problem, right = ranks.judge("x", fine)
    assert right.passed and not problem.passed and problem.found == "a cannot run: why"
    (nothing,) = ranks.judge("x", {"results": {}, "problems": []})
    assert not nothing.passed
    logged = f"NCCL INFO {{0}}\n{json.dumps(fine)}a:1 NCCL INFO Destroy COMPLETE\n"
    assert ranks.parsed("x", logged, "") == (fine, [])
    _, (crash,) = ranks.parsed("x", "", "ranks died")
    assert not crash.passed and "ranks died" in crash.found
