"""Runs a training script of Megatron-LM as it is, on the CPU platform and with nothing attached."""

import runpy
import sys

from megatron_burst.plugin.cpu import platform as cpu_platform

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    cpu_platform.activate()
    runpy.run_path(sys.argv[0], run_name="__main__")
