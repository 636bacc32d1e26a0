"""Run an unmodified training script of Megatron-LM with the plug-in's flags.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 \\
        -m megatron_burst.run PATH/pretrain_gpt.py \\
        --context-parallel-size 4 --context-parallel-algo burst ...

or PATH/pretrain_hybrid.py with a `--hybrid-layer-pattern`.

Without a flag of the plug-in it replaces nothing of Megatron where there is a GPU.
"""

import runpy
import sys
from pathlib import Path

from megatron_burst.launch import started


def main() -> None:
    """Run the script named first on the command line as if Python had been started with it."""
    if len(sys.argv) < 2:
        sys.exit(f"megatron_burst: name a script\n\n{__doc__}")
    if sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    script = Path(sys.argv[1]).resolve()
    if not script.is_file():
        sys.exit(f"megatron_burst: there is no script {script}")
    sys.argv = sys.argv[1:]
    # As Python does for a script: what lies beside it comes first, a checkout before the wheel.
    sys.path.insert(0, str(script.parent))
    with started():
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
