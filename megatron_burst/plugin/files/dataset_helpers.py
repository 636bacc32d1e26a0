"""Compiles the data-set helpers of a Megatron-LM checkout for the Python that runs.

Megatron's own Makefile takes the `python3` and `python3-config` on PATH, which may be of another
Python, and never compiles again.
"""

import fcntl
import importlib
import logging
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

logger = logging.getLogger(__name__)

_BUILT = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_on_every_node() -> None:
    """Stand in for Megatron's `_compile_dependencies`, which one rank of the job runs.

    A collective call. Every rank looks for itself, so that each ends (SystemExit) with the reason
    where its node lacks something, and none waits for a rank that has ended.
    """
    from megatron.core.datasets import utils

    try:
        build(Path(utils.__file__).parent)
    except ValueError as error:
        sys.exit(f"megatron_burst: {error}")
    dist.barrier()  # nobody imports what another node still replaces


def build(folder: Path) -> None:
    """Compile `helpers.cpp` in `folder`, megatron/core/datasets, unless that was done already.

    Of the processes of a machine that call this one compiles and the others wait for it.

    Raises:
        ValueError: it does not compile, with what that takes.
    """
    if is_built(folder):
        return
    with _alone(folder):
        if not is_built(folder):
            _make(folder)
    importlib.invalidate_caches()


def is_built(folder: Path) -> bool:
    """Say whether there are helpers for this Python that are not older than their source.

    The wheel of megatron-core ships both, written in any order; only a checkout has a Makefile.
    """
    if not (folder / "Makefile").is_file():
        return True
    built, source = folder / _BUILT, folder / "helpers.cpp"
    return built.is_file() and built.stat().st_mtime_ns >= source.stat().st_mtime_ns


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process of this user and machine is in here for `folder`."""
    number = zlib.crc32(str(folder.resolve()).encode())
    name = f"megatron_burst-{os.getuid()}-{number:08x}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield


def _make(folder: Path) -> None:
    """Run the Makefile, whose variables would else ask the Python on PATH."""
    version, source = platform.python_version(), folder / "helpers.cpp"
    logger.info("compiling %s for Python %s", source, version)
    includes = f"CPPFLAGS=$(shell {shlex.quote(sys.executable)} -m pybind11 --includes)"
    try:
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            new = Path(beside) / _BUILT
            name = f"LIBNAME={new.parent.name}/helpers_cpp"
            suffix = f"LIBEXT={new.name.removeprefix('helpers_cpp')}"
            command = ["make", "-C", str(folder), name, suffix, includes]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                new.replace(folder / _BUILT)  # whole, also where several machines share the folder
                return
            error = f"{shlex.join(command)}\n{done.stderr[-2000:]}"
    except OSError as failed:
        error = str(failed)
    raise ValueError(
        f"{source} does not compile for Python {version}, which takes make, a C++ compiler and "
        "Python's headers (Debian, Ubuntu: apt-get install make g++ "
        f"python{sys.version_info[0]}.{sys.version_info[1]}-dev) and pybind11 ({sys.executable} -m "
        f"pip install pybind11): {error}"
    )
