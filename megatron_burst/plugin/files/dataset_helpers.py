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
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist

logger = logging.getLogger(__name__)

_COMPILERS = ("c++", "g++", "clang++")


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
        ValueError: what it takes is missing, with what to install, or the compiler failed.
    """
    if is_built(folder):
        return
    with _alone(folder):
        if not is_built(folder):
            _compile(folder)
    importlib.invalidate_caches()


def is_built(folder: Path) -> bool:
    """Say whether this Python can import the helpers and they are not older than their source.

    The wheel of megatron-core ships both, written in any order; only a checkout has a Makefile.
    """
    candidates = (folder / f"helpers_cpp{suffix}" for suffix in EXTENSION_SUFFIXES)
    built = next((path for path in candidates if path.is_file()), None)
    if built is None or not (folder / "Makefile").is_file():
        return built is not None
    return built.stat().st_mtime_ns >= (folder / "helpers.cpp").stat().st_mtime_ns


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process of this user and machine is in here for `folder`."""
    number = zlib.crc32(str(folder.resolve()).encode())
    name = f"megatron_burst-{os.getuid()}-{number:08x}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield


def _compile(folder: Path) -> None:
    source, version = folder / "helpers.cpp", platform.python_version()
    compiler = _compiler(source)
    logger.info("compiling %s for Python %s", source, version)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            new = Path(beside) / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
            command = [*compiler, str(source), "-o", str(new)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(
                    f"{source} does not compile for Python {version}: {shlex.join(command)}\n"
                    f"{done.stderr[-2000:]}"
                )
            new.replace(folder / new.name)  # whole, also where several machines share the folder
    except OSError as error:
        raise ValueError(f"{source} has to be compiled for Python {version}: {error}") from None


def _compiler(source: Path) -> list[str]:
    """Return the compiler with its options; ValueError with all that is missing."""
    given = shlex.split(os.environ.get("CXX", "")) or [c for c in _COMPILERS if shutil.which(c)][:1]
    headers = Path(sysconfig.get_path("include"))
    missing = []
    if not given or not shutil.which(given[0]):
        sought = given[0] if given else ", ".join(_COMPILERS)
        missing.append(f"a C++ compiler, {sought} (Debian, Ubuntu: apt-get install g++)")
    if not (headers / "Python.h").is_file():
        package = "python{}.{}-dev".format(*sys.version_info)
        missing.append(f"{headers}/Python.h (Debian, Ubuntu: apt-get install {package})")
    if find_spec("pybind11") is None:
        missing.append(f"pybind11 ({sys.executable} -m pip install pybind11)")
    if missing:
        raise ValueError(
            f"{source} has to be compiled for Python {platform.python_version()}, for which this "
            f"machine lacks {' and '.join(missing)}"
        )
    include = importlib.import_module("pybind11").get_include()
    options = "-O3 -std=c++17 -shared -fPIC".split()
    return [*given, *options, f"-I{headers}", f"-I{include}"]
