"""Check on GPUs what needs them: kernels, rings, speed, memory, loss, recompute, NCCL, a training.

Nine stages of at most ten minutes each on an H100, without a network; only the last needs
megatron-core. Writes DIR/gpu-check.md and DIR/gpu-check.json after every stage. With --device cpu
the same runs on small sizes and nothing is asked of times. The exit status is 1 if a stage failed.
"""

from pathlib import Path

from megatron_burst.tools import options

RANKS = 2, 4, 8
# Modules of tools/gpu_check with a `check(device)`, whose first line says what it proves, and a
# `REMEDY`.
STAGES = "machine kernels rings tiles memory loss recompute ranks training".split()


def parser() -> options.Parser:
    """Return what reads the words."""
    made = options.Parser(
        "gpu-check",
        __doc__,
        "megatron-burst gpu-check",
        "megatron-burst gpu-check --stage 2 3 --output runs/gpu-check-h100",
        "megatron-burst gpu-check --stage 8 --ranks 8",
        "megatron-burst gpu-check --device cpu",
    )
    add, numbers = made.add_argument, range(1, len(STAGES) + 1)
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(STAGES, start=1))
    text = f"only these (default: all): {listed}"
    add("--stage", type=int, nargs="+", choices=numbers, default=numbers, metavar="N", help=text)
    text = "of stage 8 (default: as many as there are GPUs; 4 on a CPU, or over gloo on one GPU)"
    add("--ranks", type=int, choices=RANKS, help=text)
    text = "a directory (default: runs/gpu-check)"
    add("--output", type=Path, default=Path("runs/gpu-check"), metavar="DIR", help=text)
    return made
