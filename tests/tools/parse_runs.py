"""Parses and validates every named run with as many ranks as it claims; prints a line of JSON.

Run by test_config.py in a process of its own, because it attaches the plug-in to Megatron's parser.
"""

import argparse
import contextlib
import functools
import inspect
import io
import json
import os
import sys

from megatron_burst import launch
from megatron_burst.tools.flags import arguments as arguments_of
from megatron_burst.tools.flags import hybrid_form
from megatron_burst.tools.plan.configs import Configs

# Refused on the CPU, where the optimizer is in the host's memory already: these are parsed alone.
OFFLOAD = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")


def main() -> None:
    # Megatron reads the source of its dataclasses for every parser that it makes.
    inspect.getsource = functools.cache(inspect.getsource)
    os.environ.update(RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    with contextlib.redirect_stdout(io.StringIO()):
        launch.start(own_entry=True)
        from megatron.training import arguments

        configs, found = Configs.read(), {}
        for name in (each for each in configs.tables if not each.startswith("_")):
            run = configs.run(name)
            os.environ["WORLD_SIZE"] = str(run.gpus)
            words = arguments_of(hybrid_form(run.flags))
            words += ["--save", "saved", "--load", "saved"]  # all that a chain of jobs wants
            sys.argv = ["train", *(word for word in words if word not in OFFLOAD)]
            found[name] = _parsed(arguments)
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        parser.parse_args(OFFLOAD)
    print(json.dumps(found))


def _parsed(arguments) -> dict[str, object]:
    try:
        args = arguments.validate_args(arguments.parse_args())
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    names = ("data_parallel_size", "context_parallel_size", "tensor_model_parallel_size")
    return {name: getattr(args, name) for name in names}
