"""The models of Megatron to which our hooks attach."""

from collections.abc import Iterable
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel

LanguageModel = GPTModel | HybridModel


def mtp_layers(model: Any) -> Iterable[Any]:
    """Return the layers of multi-token prediction on this stage of a model."""
    layers: Iterable[Any] = getattr(getattr(model, "mtp", None), "layers", ())
    return layers


def need_language_models(flag: str, models: Iterable[Any]) -> None:
    """Raise a ValueError for a model whose layers a flag cannot reach."""
    for model in models:
        if not isinstance(model, LanguageModel):
            raise ValueError(
                f"{flag} needs a GPTModel or HybridModel, not a {type(model).__name__}"
            )
