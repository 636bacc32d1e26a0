"""Runs a training script of Megatron-LM as it is, on the CPU platform and with nothing attached."""

import runpy
import sys

from megatron_burst.plugin import cpu_platform

# What stands here for the defaults that our launchers set where there is no GPU.
FLAGS = """
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization --num-workers 0
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
""".split()

if __name__ == "__main__":
    sys.argv = [*sys.argv[1:], *FLAGS]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    cpu_platform.activate()
    runpy.run_path(sys.argv[0], run_name="__main__")
