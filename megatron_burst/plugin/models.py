"""The models of Megatron to which our hooks attach."""

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel

LanguageModel = GPTModel | HybridModel
NAMES = "GPTModel or HybridModel"
