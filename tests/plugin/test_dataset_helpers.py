"""Helpers of a checkout: for which Python, when again, by whom, and what is missing. (fast tier)"""

import os
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_burst.plugin.files import dataset_helpers
from megatron_burst.plugin.files.dataset_helpers import build, is_built

# Of Megatron's Makefile the variables, and a compiler that takes a moment, notes its arguments and
# makes what follows -o.
MAKEFILE = """
LIBNAME = helpers_cpp
LIBEXT = $(shell python3-config --extension-suffix)
CPPFLAGS = $(shell python3 -m pybind11 --includes)
$(LIBNAME)$(LIBEXT): helpers.cpp
\tnoting-c++ $(CPPFLAGS) $< -o $@
"""
COMPILER = """#!/bin/sh
sleep 0.1
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
    build(checkout)
    made = checkout / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert {path.name for path in checkout.iterdir()} == {"Makefile", "helpers.cpp", made.name}
    (call,) = calls(checkout)
    assert f"-I{sysconfig.get_path('include')} " in call and "pybind11" in call
    assert "another" not in call


def test_they_are_made_again_where_the_source_is_newer_but_not_in_the_wheel(checkout: Path) -> None:
    build(checkout)
    build(checkout)
    assert len(calls(checkout)) == 1
    later = time.time() + 10
    os.utime(checkout / "helpers.cpp", (later, later))
    assert not is_built(checkout)
    (checkout / "Makefile").rename(checkout / "moved")
    build(checkout)
    assert len(calls(checkout)) == 1
    (checkout / "moved").rename(checkout / "Makefile")
    build(checkout)
    assert len(calls(checkout)) == 2


def test_one_compiles_and_the_others_wait(checkout: Path) -> None:
    with ThreadPoolExecutor(4) as pool:  # each opens the lock for itself, as processes do
        list(pool.map(build, [checkout] * 4))
    assert len(calls(checkout)) == 1 and is_built(checkout)


def test_a_compiler_that_fails_is_quoted_with_what_it_takes_and_leaves_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout.parent / "noting-c++").write_text("#!/bin/sh\necho line 3 is wrong >&2; exit 1")
    with pytest.raises(ValueError, match=r"does not compile for Python 3\.") as error:
        build(checkout)
    text = str(error.value)
    assert "apt-get install make g++ python3." in text
    assert "-m pip install pybind11): make -C" in text
    assert "line 3 is wrong" in text
    assert {path.name for path in checkout.iterdir()} == {"Makefile", "helpers.cpp"}
    monkeypatch.setenv("PATH", str(checkout))
    with pytest.raises(ValueError, match="install pybind11\\): .*No such file .*'make'"):
        build(checkout)


def test_megatrons_function_is_ours_and_ends_the_process_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("megatron.training")
    from megatron.training import initialize, training

    from megatron_burst.plugin import compat

    for holder, name in (
        (initialize, "_compile_dependencies"),
        (training, "get_megatron_optimizer"),
    ):
        monkeypatch.setattr(holder, name, getattr(holder, name))
    compat.mend_wheel()
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    initialize._compile_dependencies()  # those of the wheel are there

    def fails(folder: Path) -> None:
        raise ValueError(f"{folder} lacks a compiler")

    monkeypatch.setattr(dataset_helpers, "build", fails)
    with pytest.raises(SystemExit, match="megatron_burst: .*datasets lacks a compiler"):
        initialize._compile_dependencies()  # on any rank, before it waits for others
