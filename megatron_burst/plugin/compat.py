"""What Megatron lacks without Apex, TransformerEngine or a source checkout, made good.

Nothing here imports Megatron until it is called: `cpu_platform.activate` has to come first.
"""

import argparse
import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_burst.plugin.files import dataset_helpers
from megatron_burst.plugin.spec_walk import rewrite_spec

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)

# What was run, by (MAJOR, MINOR) of megatron/core/package_info.py.
SUPPORTED_MEGATRON: Mapping[tuple[int, int], str] = {
    (0, 19): "0.19",
    (0, 20): "0.20, main of August 2026 (d98e8a64)",
}

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


class SequenceParallelNorm:
    """torch's LayerNorm or RMSNorm with the constructor of Megatron's `WrappedTorchNorm`.

    Calling the class returns the torch module itself. Its parameters carry `sequence_parallel =
    config.sequence_parallel`: under sequence parallelism every TP rank normalises its own tokens,
    and Megatron sums the gradients of parameters marked so over the TP ranks.
    """

    def __new__(  # type: ignore[misc]
        cls,
        config: "TransformerConfig",
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> torch.nn.Module:
        """Build the norm `config.normalization` names; ValueError for what torch cannot do.

        The last three arguments are there for Megatron's callers and unused, as in Megatron.
        """
        _check_norm_config(config)
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"--normalization {config.normalization}: torch's norms are {', '.join(kinds)}"
            )
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _check_norm_config(config: "TransformerConfig") -> None:
    refused = {
        "layernorm_zero_centered_gamma": "drop --apply-layernorm-1p",
        "persist_layer_norm": "pass --no-persist-layer-norm",
        "memory_efficient_layer_norm": "drop --use-memory-efficient-layer-norm",
    }
    for field, remedy in refused.items():
        if getattr(config, field):
            raise ValueError(f"torch's norms cannot do {field}: {remedy}, or use TransformerEngine")


def with_sequence_parallel_norm(spec: Any) -> Any:
    """Copy of a layer or block spec in which `SequenceParallelNorm` replaces `WrappedTorchNorm`.

    The norm behind the last layer is part of a block spec, not of a layer spec: see `block_spec`.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def rewrite(name: str, value: Any) -> Any:
        return SequenceParallelNorm if value is WrappedTorchNorm else value

    return rewrite_spec(spec, rewrite)


def block_spec(
    spec: Any, config: "TransformerConfig", vp_stage: int | None = None
) -> "TransformerBlockSubmodules":
    """The block spec of this pipeline stage for a layer spec, norms replaced.

    A layer spec leaves the norm behind the last layer to Megatron. Without TransformerEngine it
    takes Apex's LayerNorm where Apex is there, for RMSNorm, too, which that one is not; else its
    own `WrappedTorchNorm`, which refuses sequence parallelism. A block spec is returned with its
    norms replaced. Call it after model parallelism is initialised.
    """
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if not isinstance(spec, transformer_block.TransformerBlockSubmodules):
        last: Any = transformer_block.LayerNormImpl
        if last is FusedLayerNorm and config.normalization != "LayerNorm":
            last = WrappedTorchNorm
        spec = transformer_block.TransformerBlockSubmodules(
            layer_specs=[spec] * transformer_block.get_num_layers_to_build(config, vp_stage),
            layer_norm=last,
        )
    return with_sequence_parallel_norm(spec)


def set_defaults_without_transformer_engine(parser: argparse.ArgumentParser) -> None:
    """Make Megatron's local layers the default where TransformerEngine is not installed.

    What Apex brings of the rest stays on. Flags that the user gives still win.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    of_apex = {
        name
        for name, extension in APEX_EXTENSIONS.items()
        if importlib.util.find_spec(extension) is not None
    }
    logger.info(
        "TransformerEngine is not installed: Megatron's local layers are the default%s",
        f", with Apex for {', '.join(sorted(of_apex))}" if of_apex else "",
    )
    parser.set_defaults(
        **{k: v for k, v in DEFAULTS_WITHOUT_TRANSFORMER_ENGINE.items() if k not in of_apex}
    )


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Double the bare percent signs in help texts, one of Megatron's, that make `--help` fail."""
    for action in parser._actions:
        try:
            str(action.help) % vars(action)
        except (ValueError, TypeError):
            action.help = str(action.help).replace("%", "%%")


def mend_wheel() -> None:
    """Put `with_torch_adam` around the function it describes, and `dataset_helpers` into place.

    Called by the launchers on any platform, before Megatron's training loop starts; again it does
    nothing.
    """
    from megatron.core.datasets import utils
    from megatron.training import initialize, training

    if utils.compile_helpers is dataset_helpers.compile_helpers:
        return
    utils.compile_helpers = dataset_helpers.compile_helpers
    initialize._compile_dependencies = dataset_helpers.compile_on_every_node
    training.get_megatron_optimizer = with_torch_adam(training.get_megatron_optimizer)


def with_torch_adam(build_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """`get_megatron_optimizer` whose distributed optimizers save and load torch's Adam rightly.

    Without Apex and TransformerEngine Megatron falls back to torch's Adam, whose `step` is a tensor
    in the state of every parameter. The checkpoint code of the distributed optimizer stumbles:
    - it asserts that all parameters share one `step` before it reads a checkpoint, when Adam has no
      state yet. Megatron's `init_state_fn` makes the moments alone and is not called there;
    - it takes `step` for a shard of the parameter like the moments: `dp_reshardable` reads back
      a wrong number, `fully_reshardable` ends with a KeyError;
    - it loads one `step` tensor for all parameters, to which Adam then adds once a parameter;
    - it writes into float32 shards, views of parameters, in place, which autograd refuses;
    - under Megatron-FSDP a rank skips parameters of which it has no part, and one rank's `step` is
      saved for all.

    Only the step in the param_groups is right. No hook of Megatron lies between building the
    optimizer and reading the checkpoint, so the call is wrapped and the built objects are mended.
    """

    @functools.wraps(build_optimizer)
    def build(*args: Any, **kwargs: Any) -> Any:
        optimizer = build_optimizer(*args, **kwargs)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            distributed = hasattr(part, "load_parameter_state_from_dp_reshardable")
            if distributed and isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
                _mend_distributed_optimizer(part)
        return optimizer

    return build


def _mend_distributed_optimizer(distributed: Any) -> None:
    """Carry out what `with_torch_adam` says on one of Megatron's distributed optimizers."""
    initialise_adam_state(distributed.optimizer)
    distributed.optimizer.register_load_state_dict_post_hook(give_each_parameter_its_step)
    if distributed.ddp_config.use_megatron_fsdp:
        distributed.optimizer.register_step_post_hook(count_steps_together)

    read_shards = distributed._get_main_param_and_optimizer_states
    write_shards = distributed._set_main_param_and_optimizer_states

    def read_without_step(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return {name: shard for name, shard in read_shards(parameter).items() if name != "step"}

    def write_without_step(parameter: torch.nn.Parameter, shards: dict[str, Any]) -> None:
        write_shards(parameter, {**shards, "step": None})  # None: keep the one that is there

    distributed._get_main_param_and_optimizer_states = read_without_step
    distributed._set_main_param_and_optimizer_states = write_without_step
    distributed.load_state_dict = torch.no_grad()(distributed.load_state_dict)


def initialise_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter without state what torch's Adam makes in its first step, at step 0.

    Training afterwards equals training without this call; the memory is taken a step earlier.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def give_each_parameter_its_step(optimizer: torch.optim.Optimizer) -> None:
    """Copy every parameter's `step`, so that no two parameters share one tensor."""
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()


def count_steps_together(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give every parameter the largest `step` of all, those without a gradient, too."""
    steps = [state["step"] for state in optimizer.state.values()]
    latest = max(float(step) for step in steps)
    for step in steps:
        step.fill_(latest)


def check_megatron_version() -> str:
    """The version of the Megatron-Core that `import megatron.core` takes, without importing it.

    Raises ValueError where there is none, where it is not one of `SUPPORTED_MEGATRON`, or where
    `megatron.core` and `megatron.training` come from different places (a checkout and a wheel).
    """
    core, training = (_first_on_path(name) for name in ("core", "training"))
    if core is None or training is None:
        raise ValueError("megatron-core is not installed: pip install 'megatron-core==0.19.*'")
    info = core / "package_info.py"
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.MULTILINE))
    version = ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
    if (int(numbers["MAJOR"]), int(numbers["MINOR"])) not in SUPPORTED_MEGATRON:
        raise ValueError(
            f"megatron-core {version} ({info}) is not supported; supported are: "
            f"{'; '.join(SUPPORTED_MEGATRON.values())}"
        )
    if core.parent != training.parent:
        raise ValueError(
            f"megatron.core comes from {core} and megatron.training from {training}: "
            "remove one of the two from PYTHONPATH or uninstall the wheel"
        )
    return version


def megatron_folder() -> Path | None:
    """Where `import megatron.core` looks, a checkout or the wheel; None without Megatron."""
    core = _first_on_path("core")
    return None if core is None else core.parent


def _first_on_path(subpackage: str) -> Path | None:
    megatron = importlib.util.find_spec("megatron")
    places = megatron.submodule_search_locations if megatron else None
    found = (Path(place) / subpackage for place in places or [])
    folder = next((folder for folder in found if (folder / "__init__.py").is_file()), None)
    if folder is None and megatron is not None:
        # An editable install: the place is not a folder, and a finder of its own knows the parts.
        spec = importlib.util.find_spec(f"megatron.{subpackage}")
        folder = Path(spec.origin).parent if spec and spec.origin else None
    return folder
