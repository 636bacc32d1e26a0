"""Models that a script builds by its own `model_provider`: our parts go in as they are built."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.identity_op import IdentityOp

from megatron_burst.plugin.attention.core_attention import BurstCoreAttention
from megatron_burst.plugin.attention.layer_algorithms import MEGATRONS
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.calls import before_calls
from megatron_burst.plugin.layer_spec import LayerSpecProvider, mtp_spec, stack_spec
from megatron_burst.plugin.models import need_language_models

type _Rewrite = Callable[[Any, Mapping[str, Any]], Any]  # of a spec, by the other arguments

REMEDY = (
    "build a GPTModel or HybridModel by gpt_config_from_args, hybrid_config_from_args or the "
    "model_provider of Megatron's pretrain(), give the layers of another model "
    "megatron_burst.plugin.layer_spec.burst_layer_spec, or drop the flags"
)


def with_our_parts(
    model_provider: Callable[..., Any],
    shared: SharedState | None,
    hooks: list[Callable[[list[Any]], list[Any]]],
) -> Callable[..., Any]:
    """Return Megatron's `model_provider`, our attention in its specs, with `hooks` on its model.

    Whatever the script is, the constructors of GPTModel and HybridModel, which those of subclasses
    call, take the specs. They are Megatron's again when the model is built.
    """

    @functools.wraps(model_provider)
    def provide(*given: Any, **options: Any) -> Any:
        with _specs_rewritten(shared):
            models = [model_provider(*given, **options)]
        for hook in hooks:
            models = hook(models)
        return models[0]

    return provide


@contextmanager
def _specs_rewritten(shared: SharedState | None) -> Iterator[None]:
    def layers(spec: Any, given: Mapping[str, Any]) -> Any:
        return LayerSpecProvider(spec, shared)(given["config"], given.get("vp_stage"))

    of_gpt: dict[str, _Rewrite] = {
        "transformer_layer_spec": layers,
        "mtp_block_spec": lambda spec, _: mtp_spec(spec, shared),
    }
    of_hybrid: dict[str, _Rewrite] = {"hybrid_stack_spec": lambda spec, _: stack_spec(spec, shared)}
    with _constructor(GPTModel, of_gpt), _constructor(HybridModel, of_hybrid):
        yield


@contextmanager
def _constructor(model: type, rewrites: Mapping[str, _Rewrite]) -> Iterator[None]:
    """Change these arguments of a model's constructor on their way to it."""
    megatrons = model.__init__  # type: ignore[misc]
    signature = inspect.signature(megatrons)

    @functools.wraps(megatrons)
    def construct(self: Any, *given: Any, **options: Any) -> None:
        bound = signature.bind(self, *given, **options)
        for name in rewrites.keys() & bound.arguments.keys():
            if bound.arguments[name] is not None:
                bound.arguments[name] = rewrites[name](bound.arguments[name], bound.arguments)
        megatrons(*bound.args, **bound.kwargs)

    model.__init__ = construct  # type: ignore[misc]
    try:
        yield
    finally:
        model.__init__ = megatrons  # type: ignore[misc]


def check_attention(models: list[Any], shared: SharedState) -> None:
    """Raise a ValueError for a model that has attention, none of it ours, though it should be.

    And for one to whose layers nobody says when Megatron recomputes them, though results are kept.
    """
    for model in models:
        attentions, kind = [*_core_attentions(model)], type(model).__name__
        if attentions and not any(isinstance(each, BurstCoreAttention) for each in attentions):
            raise ValueError(
                f"--context-parallel-algo {shared.config.algorithm}: the {kind} that was built has "
                f"{type(attentions[0]).__name__} for its attention, and nothing of ours: {REMEDY}"
            )
    if shared.checkpoints is not None:
        need_language_models("--recompute-attention-fraction", models)


def documents_must_come(models: list[Any], flag: str) -> list[Any]:
    """Let the first training forward have documents, where a flag asks for them: a hook.

    Megatron's pretrain_gpt.py leaves them out of schedule plans, dev's altogether.
    """

    def check(model: Any, given: Mapping[str, Any]) -> None:
        if not model.training or model in seen:
            return
        if given.get("packed_seq_params") is None:
            raise ValueError(
                f"{flag}: this script gives the model no documents (packed_seq_params is None): "
                "take megatron_burst.pretrain, or drop the flag"
            )
        seen.add(model)

    seen: set[Any] = set()
    for model in models:
        before_calls(model, check)
    return models


def _core_attentions(model: Any) -> Iterator[Any]:
    """Yield those that --cp-comm-type does not leave to Megatron."""
    for module in model.modules():
        attention = getattr(module, "core_attention", None)
        if attention is not None and not isinstance(attention, IdentityOp):
            names = module.config.cp_comm_type
            if not (isinstance(names, list) and set(names) & {*MEGATRONS}):
                yield attention
