"""The oldest torch that serves."""

import torch

OLDEST = (2, 9)  # before, cuDNN's attention takes and returns another log-sum-exp


def check_torch_version() -> None:
    """Raise an ImportError that says what to install if this torch is too old.

    A pre-release of the oldest one, as NVIDIA's images have it, passes.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"megatron_burst needs torch {oldest} or newer, and {torch.__version__} is installed: "
            f"pip install 'torch>={oldest}', or take a newer image"
        )
