"""What every launcher does before Megatron is imported: choose the platform, check, attach."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_burst.cpu_platform import platform as cpu_platform
from megatron_burst.cpu_platform.torch_adam import with_torch_adam
from megatron_burst.data_checks.dataset_helpers import compile_on_every_node
from megatron_burst.plugin import compat
from megatron_burst.plugin.arguments import asks_for_us
from megatron_burst.transport import failure

logger = logging.getLogger(__name__)

_SEGMENTS = (
    "PYTORCH_CUDA_ALLOC_CONF is not set: with expandable_segments:True, which goes with all but "
    "CUDA graphs and --use-nccl-ub, less of the GPU is reserved for nothing"
)


@contextmanager
def started(*, own_entry: bool = False) -> Iterator[None]:
    """Run a training after `start`; if either fails, report that once a job."""
    with failure.reported():
        start(own_entry=own_entry)
        yield


def start(*, own_entry: bool = False) -> None:
    """Make this process ready to run a training script of Megatron with the plug-in.

    The one call that all ways to launch make, `patches/` among them. Activates the CPU platform
    where there is no GPU, and attaches our flags and layer spec where the command line asks for
    them. Where neither is wanted it does and says nothing; else it mends what Megatron lacks
    without Apex, TransformerEngine or a checkout.

    Args:
        own_entry: whether our own entry runs, which needs no flag to be asked for.

    Raises:
        SystemExit: Megatron is missing, mixed from two places, or lacks what ours is attached to;
            or this node of several has no CUDA device; with the reason.
    """
    wanted = own_entry or asks_for_us(sys.argv[1:])
    on_cpu = cpu_platform.cpu_platform_wanted()
    if not (wanted or on_cpu):
        return
    _show_our_log()
    try:
        version = compat.check_megatron_version()
        if on_cpu:
            cpu_platform.check_job()
        logger.info("megatron-core %s in %s", version, compat.megatron_folder())
        if on_cpu:
            cpu_platform.activate()
        elif not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
            logger.info(_SEGMENTS)
        if wanted:
            from megatron_burst.plugin import attachment_points  # imports Megatron

            attachment_points.check()
    except ValueError as error:
        sys.exit(f"megatron_burst: {error}")
    mend_wheel()
    if wanted:
        from megatron_burst.data_checks.look import look_at_files
        from megatron_burst.plugin.attach import attach

        attach(look_at_files, own_entry=own_entry)


def mend_wheel() -> None:
    """Put what is ours in the place of what fails without Apex, TransformerEngine or a checkout.

    Once Megatron can be imported, before its training loop starts; again it does nothing.
    """
    from megatron.training import initialize, training

    initialize._compile_dependencies = compile_on_every_node
    compat.wrap(training, "get_megatron_optimizer", with_torch_adam)


def _show_our_log() -> None:
    """Print our log lines on the first rank; Megatron shows warnings alone."""
    logger = logging.getLogger("megatron_burst")
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[megatron_burst] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
