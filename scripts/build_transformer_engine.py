#!/usr/bin/env python3
"""Makes TransformerEngine importable on a machine without a GPU, a driver and a CUDA toolkit.

    .venv/bin/python scripts/build_transformer_engine.py

Its kernels come ready-made; its bindings to torch are compiled here, by g++ alone, unoptimized and
one file at a time (about 10 minutes of one core). Layers can then be built, saved and loaded; they
cannot compute. The last line printed sets the variables with which this Python finds it; nothing is
installed into its environment.

pip fetches the version that the extra `gpu` of pyproject.toml names, and the CUDA headers that
torch leaves out; 2 GB of disk. Run again, the script goes on where it was interrupted.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TORCH = Path(torch.__file__).parent
EXTENSION = "transformer_engine_torch"
FLAGS = "-std=c++20 -O0 -g0 -fPIC -fvisibility=hidden -DTORCH_API_INCLUDE_EXTENSION_H".split()
LIBRARIES = "-lc10 -ltorch -ltorch_cpu -ltorch_cuda -lc10_cuda -ltorch_python".split()
CHECK = "import torch, transformer_engine as t, transformer_engine.pytorch; print(t.__version__)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "where to work (default: build/transformer_engine)"
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "build/transformer_engine", help=what
    )
    directory = parser.parse_args().directory.resolve()
    if lacking := missing():
        sys.exit("TransformerEngine cannot be built here:\n  " + "\n  ".join(lacking))
    version = pinned_version()
    # What is there is used again, as long as it is for the same versions.
    directory /= f"{version}-torch{metadata.version('torch')}-{sys.implementation.cache_tag}"
    source = once(directory / "source", download_source, version) / f"{EXTENSION}-{version}"
    headers = once(directory / "headers", install_headers)
    site = once(directory / "site", install_packages, version)
    includes = include_flags(source, headers)
    link(compile_all(source, directory / "objects", includes), site)
    variables = {"PYTHONPATH": str(site)}
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        variables["LD_LIBRARY_PATH"] = str(once(directory / "no_driver", make_driver_stub))
    imported = run([sys.executable, "-W", "ignore", "-c", CHECK], os.environ | variables)
    print(f"TransformerEngine {imported.strip()} can be imported with", flush=True)
    print("export", *(f"{name}={value}" for name, value in variables.items()))


def missing() -> list[str]:
    """What this machine lacks, and how to get it."""
    lacking = []
    if not shutil.which("g++"):
        lacking.append("no g++ on PATH: install a C++20 compiler (Debian, Ubuntu: g++)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacking.append(f"no headers of {sys.executable} (Debian, Ubuntu: python3-dev)")
    if not str(torch.version.cuda).startswith("13."):
        lacking.append(f"torch is built for CUDA {torch.version.cuda}, this script knows 13 alone")
    return lacking


def pinned_version() -> str:
    """The version that the extra `gpu` names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [requirement] = project["optional-dependencies"]["gpu"]
    return requirement.split("==")[1]


def once(directory: Path, make: Callable[..., None], *arguments: str) -> Path:
    """Let `make` fill a directory, unless an earlier run has."""
    if not directory.exists():
        unfinished = directory.with_name(f"unfinished_{directory.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished, *arguments)
        unfinished.rename(directory)
    return directory


def download_source(directory: Path, version: str) -> None:
    """The bindings' source, unpacked."""
    # Without isolation, or pip would install a second torch to ask the source for its name.
    options = "--no-deps --no-build-isolation --no-binary :all:".split()
    pip("download", *options, "--dest", str(directory), f"{EXTENSION}=={version}")
    archive = directory / f"{EXTENSION}-{version}.tar.gz"
    shutil.unpack_archive(archive, directory, filter="data")


def install_headers(directory: Path) -> None:
    """The CUDA headers that torch's own packages leave out."""
    names = [f"{name}=={torch.version.cuda}.*" for name in ("nvidia-cuda-crt", "nvidia-cuda-cccl")]
    pip("install", "--no-deps", "--target", str(directory), *names)


def install_packages(site: Path, version: str) -> None:
    """TransformerEngine's Python and kernels, and what it imports beside torch."""
    constraints = site.with_name("constraints.txt")  # no second version of what is here already
    installed = sorted({f"{d.name}=={d.version}" for d in metadata.distributions()})
    constraints.write_text("\n".join(line for line in installed if "+" not in line))
    for names in (
        ["--no-deps", f"transformer-engine=={version}", f"transformer-engine-cu13=={version}"],
        ["--no-deps", "nvdlfw-inspect"],  # its only requirement beside torch is pyyaml
        ["--constraint", str(constraints), "pyyaml", "pydantic", "onnx", "onnxscript"],
    ):
        pip("install", "--upgrade", "--target", str(site), *names)


def include_flags(source: Path, headers: Path) -> list[str]:
    common = source / "common_headers"
    here = [common, common / "common", common / "common/include", source / "csrc"]
    here += [headers / "nvidia/cu13/include", headers / "nvidia/cu13/include/cccl"]
    here += [TORCH.parent / "nvidia" / name / "include" for name in ("cu13", "cudnn", "nccl")]
    include = TORCH / "include"
    others = [include, include / "torch/csrc/api/include", sysconfig.get_path("include")]
    return [f"-I{path}" for path in here] + [f"-isystem{path}" for path in others]


def compile_all(source: Path, build: Path, includes: list[str]) -> list[Path]:
    """Compile what is not compiled yet, one after the other; return the object files."""
    build.mkdir(exist_ok=True)
    command = ["g++", *FLAGS, f"-DTORCH_EXTENSION_NAME={EXTENSION}", *includes]
    header = build / "all.h"  # compiled once: torch's headers take longer than any file
    header.write_text('#include "common.h"\n#include "extensions.h"\n')
    files = sorted((source / "csrc").rglob("*.cpp"))
    jobs = [([str(header), "-x", "c++-header"], header.with_suffix(".h.gch"))]
    for file in files:
        name = str(file.relative_to(source / "csrc")).replace("/", "_")
        jobs.append((["-include", str(header), "-c", str(file)], build / f"{name}.o"))
    for number, (arguments, target) in enumerate(jobs, start=1):
        start = time.monotonic()
        if not target.exists():
            unfinished = target.with_name(f"unfinished_{target.name}")
            run([*command, *arguments, "-o", str(unfinished)])
            unfinished.rename(target)
        seconds = time.monotonic() - start
        print(f"{number}/{len(jobs)} {target.name} {seconds:.0f} s", flush=True)
    return [target for _, target in jobs[1:]]


def link(objects: Iterable[Path], site: Path) -> None:
    libraries = TORCH / "lib"
    target = site / f"{EXTENSION}{sysconfig.get_config_var('EXT_SUFFIX')}"
    where = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    run(["g++", "-shared", "-o", str(target), *map(str, objects), *where, *LIBRARIES])


def make_driver_stub(directory: Path) -> None:
    """A driver without functions: TransformerEngine's library will not load without one."""
    library = directory / "libcuda.so.1"
    options = ["-shared", f"-Wl,-soname,{library.name}", "-o", str(library)]
    run(["g++", *options, "-x", "c++", os.devnull])


def pip(*arguments: str) -> None:
    print("pip", *arguments, flush=True)
    run([sys.executable, "-m", "pip", *arguments])


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """What the command prints; the end of this script, with what it said, where it fails."""
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\nfailed:\n{result.stdout[-4000:]}{result.stderr[-8000:]}")
    return result.stdout


if __name__ == "__main__":
    main()
