"""What Megatron lacks without Apex, TransformerEngine or a source checkout, made good.

Nothing here imports Megatron until it is called: `cpu_platform.activate` has to come first.
"""

import argparse
import functools
import importlib.util
import logging
import re
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

# Megatron's defaults ask for CUDA extensions of TransformerEngine and Apex and stop without them.
DEFAULTS_WITHOUT_TRANSFORMER_ENGINE: Mapping[str, Any] = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
# Those that Apex serves as well, with the extension that Megatron imports for it.
APEX_EXTENSIONS: Mapping[str, str] = {
    "no_persist_layer_norm": "fast_layer_norm",
    "gradient_accumulation_fusion": "fused_weight_gradient_mlp_cuda",
    "masked_softmax_fusion": "scaled_upper_triang_masked_softmax_cuda",
}


def set_defaults_without_transformer_engine(parser: argparse.ArgumentParser) -> None:
    """Make Megatron's local layers the default where TransformerEngine is not installed.

    What Apex brings of the rest stays on. Flags that the user gives still win.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    of_apex = [k for k, v in sorted(APEX_EXTENSIONS.items()) if importlib.util.find_spec(v)]
    logger.info(
        "TransformerEngine is not installed: Megatron's local layers are the default%s",
        f", with Apex for {', '.join(of_apex)}" if of_apex else "",
    )
    parser.set_defaults(
        **{k: v for k, v in DEFAULTS_WITHOUT_TRANSFORMER_ENGINE.items() if k not in of_apex}
    )


def wrap(holder: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Put `make(function)` in the place of a function of Megatron, and return it.

    Again, it is made of Megatron's function, not of what was put there before.
    """
    present = getattr(holder, name)
    original = getattr(present, "original", present)
    ours = make(original)
    ours.original = original
    setattr(holder, name, ours)
    return ours


def around_parse_args(
    parse_args: Callable[..., Any],
    prepare: Callable[[argparse.ArgumentParser], object],
    settle: Callable[[argparse.Namespace], object],
) -> Callable[..., argparse.Namespace]:
    """Megatron's `parse_args` with `prepare` after all flags are known and `settle` before it ends.

    A ValueError of `settle` goes to `stop`.
    """

    @functools.wraps(parse_args)
    def parse(
        extra_args_provider: Callable[..., Any] | None = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser = extra_args_provider(parser) if extra_args_provider else parser
            prepare(parser)
            return parser

        args: argparse.Namespace = parse_args(add_arguments, ignore_unknown_args)
        try:
            settle(args)
        except ValueError as error:
            stop(error)
        return args

    return parse


def stop(why: ValueError) -> None:
    """End a training that is refused. The doctor, which then looks on, puts its own here."""
    sys.exit(f"megatron_burst: {why}".replace("\n", "\n  "))


def is_first_of_its_stage() -> bool:
    """Whether this rank speaks for its pipeline stage; where there are none, for the job."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return not dist.is_initialized() or dist.get_rank() == 0
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def peak_resident_bytes(device: object = None) -> int:
    """Peak resident memory of this process in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_megatron_version() -> str:
    """The version of the Megatron-Core that `import megatron.core` takes, without importing it.

    Raises ValueError where there is none, or where `megatron.core` and `megatron.training` come
    from different places (a checkout and a wheel). Whether it is one to attach to is said by
    `attachment_points`.
    """
    core, training = (_first_on_path(name) for name in ("core", "training"))
    if core is None or training is None:
        raise ValueError("megatron-core is not installed: pip install 'megatron-core==0.19.*'")
    info = core / "package_info.py"
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.MULTILINE))
    if core.parent != training.parent:
        raise ValueError(
            f"megatron.core comes from {core} and megatron.training from {training}: "
            "remove one of the two from PYTHONPATH or uninstall the wheel"
        )
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))


def megatron_folder() -> Path | None:
    """Where `import megatron.core` looks, a checkout or the wheel; None without Megatron."""
    core = _first_on_path("core")
    return None if core is None else core.parent


def _first_on_path(subpackage: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(f"megatron.{subpackage}")
    except ModuleNotFoundError:  # there is no megatron at all
        return None
    return Path(spec.origin).parent if spec and spec.origin else None
