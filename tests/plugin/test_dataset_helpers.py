"""Helpers of a checkout: for which Python, when again, by whom, and what is missing. (fast tier)"""

import os
import re
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_burst.data_checks import dataset_helpers
from megatron_burst.data_checks.dataset_helpers import make

# Of Megatron's Makefile the variables, and a compiler that notes its arguments and makes what
# follows -o.
MAKEFILE = """
LIBNAME = helpers_cpp
LIBEXT = $(shell python3-config --extension-suffix)
CPPFLAGS = $(shell python3 -m pybind11 --includes)
$(LIBNAME)$(LIBEXT): helpers.cpp
\tnoting-c++ $(CPPFLAGS) $< -o $@
"""
COMPILER = """#!/bin/sh
echo "$@" >>{log}
while [ "$1" != -o ]; do shift; done
echo made >"$2"
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data sets"
    folder.mkdir()
    (folder / "helpers.cpp").touch()
    (folder / "Makefile").write_text(MAKEFILE)
    compiler = tmp_path / "noting-c++"
    compiler.write_text(COMPILER.format(log=tmp_path / "log"))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return folder


def calls(checkout: Path) -> list[str]:
    log = checkout.parent / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_they_are_made_for_the_python_that_runs_whatever_path_names(checkout: Path) -> None:
    for name in ("python3", "python3-config"):
        (checkout.parent / name).write_text("#!/bin/sh\necho .cpython-27.so -I/of-another\n")
        (checkout.parent / name).chmod(0o755)
    assert make(checkout) == ""
    made = checkout / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert {path.name for path in checkout.iterdir()} == {"Makefile", "helpers.cpp", made.name}
    (call,) = calls(checkout)
    assert f"-I{sysconfig.get_path('include')} " in call and "pybind11" in call
    assert "another" not in call


def test_they_are_made_again_where_the_source_is_newer_but_not_in_the_wheel(checkout: Path) -> None:
    for _ in range(2):
        assert make(checkout) == ""
    assert len(calls(checkout)) == 1
    later = time.time() + 10
    os.utime(checkout / "helpers.cpp", (later, later))
    (checkout / "Makefile").rename(checkout / "moved")
    assert make(checkout) == "" and len(calls(checkout)) == 1
    (checkout / "moved").rename(checkout / "Makefile")
    assert make(checkout) == "" and len(calls(checkout)) == 2


def test_a_compiler_that_fails_is_quoted_with_what_it_takes_and_leaves_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout.parent / "noting-c++").write_text("#!/bin/sh\necho line 3 is wrong >&2; exit 1")
    text = make(checkout)
    assert "does not compile for Python 3." in text
    assert "apt-get install make g++ python3." in text
    assert "-m pip install pybind11): make -C" in text
    assert "line 3 is wrong" in text
    assert {path.name for path in checkout.iterdir()} == {"Makefile", "helpers.cpp"}
    monkeypatch.setenv("PATH", str(checkout))
    assert re.search(r"install pybind11\): .*No such file .*'make'", make(checkout))


@pytest.mark.parametrize("lacking", [None, 0, 2])
def test_one_rank_of_each_node_compiles_in_turn_and_all_end_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, lacking: int | None
) -> None:
    """Two nodes of two ranks, one thread each."""
    pytest.importorskip("megatron.training")
    from megatron.training import initialize, training

    from megatron_burst import launch

    for holder, name in (
        (initialize, "_compile_dependencies"),
        (training, "get_megatron_optimizer"),
    ):
        monkeypatch.setattr(holder, name, getattr(holder, name))
    launch.mend_wheel()
    compiled: list[int] = []
    here = threading.local()
    meeting, said = threading.Barrier(4), [""] * 4

    def compiles(_: Path) -> str:
        compiled.append(here.rank)
        return "it lacks a compiler" if here.rank == lacking else ""

    def gather(found: list[str], reason: str) -> None:
        said[here.rank] = reason
        meeting.wait()
        found[:] = said
        meeting.wait()

    def run(rank: int) -> str:
        here.rank = rank
        try:
            initialize._compile_dependencies()
        except SystemExit as leaving:
            return str(leaving.code)
        return "trains"

    monkeypatch.setattr(dataset_helpers, "make", compiles)
    monkeypatch.setattr("importlib.invalidate_caches", lambda: None)  # no two threads may at once
    local_rank = SimpleNamespace(get=lambda *_: str(here.rank % 2))
    monkeypatch.setattr(dataset_helpers, "os", SimpleNamespace(environ=local_rank))
    for name, value in (
        ("get_rank", lambda: here.rank),
        ("get_world_size", lambda: 4),
        ("all_gather_object", gather),
    ):
        monkeypatch.setattr(dist, name, value)
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(run, range(4)))
    assert ends == ["trains" if lacking is None else "megatron_burst: it lacks a compiler"] * 4
    assert compiled == ([0] if lacking == 0 else [0, 2])
