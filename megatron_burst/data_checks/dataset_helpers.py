"""Compiles the data-set helpers of a Megatron-LM checkout for the Python that runs.

Megatron's own Makefile takes the `python3` and `python3-config` on PATH, which may be of another
Python.
"""

import importlib
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path


def compile_on_every_node() -> None:
    """Stand in for Megatron's `_compile_dependencies`, which compiles on one rank of the job.

    A collective call. The job's first rank compiles, then the first one of each other node, which
    has nothing to do where they share the folder. All ranks end (SystemExit) with the reason where
    a node lacks something.
    """
    import torch.distributed as dist  # which `make` does not need
    from megatron.core.datasets import utils

    for first in (True, False):
        reason = ""
        if os.environ.get("LOCAL_RANK", "0") == "0" and (dist.get_rank() == 0) is first:
            reason = make(Path(utils.__file__).parent)
        reasons = [reason] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if any(reasons):
            sys.exit(f"megatron_burst: {max(reasons)}")
    importlib.invalidate_caches()


def make(folder: Path) -> str:
    """Run the Makefile in `folder`, megatron/core/datasets, for this Python.

    The wheel of megatron-core has none: it ships the helpers. Returns why they do not compile, with
    what that takes; nothing where they do.
    """
    if not (folder / "Makefile").is_file():
        return ""
    includes = f"CPPFLAGS=$(shell {shlex.quote(sys.executable)} -m pybind11 --includes)"
    suffix = f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"
    command = ["make", "-C", str(folder), suffix, includes]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as failed:
        error = str(failed)
    else:
        error = f"{shlex.join(command)}\n{done.stderr[-2000:]}" if done.returncode else ""
    version = platform.python_version()
    return error and (
        f"{folder / 'helpers.cpp'} does not compile for Python {version}, which takes make, a C++ "
        "compiler and Python's headers (Debian, Ubuntu: apt-get install make g++ "
        f"python{sys.version_info[0]}.{sys.version_info[1]}-dev) and pybind11 ({sys.executable} -m "
        f"pip install pybind11): {error}"
    )
