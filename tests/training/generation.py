"""A GPT generates with Megatron's static engine what it does with Megatron's attention; by tests.

The same on several context-parallel ranks is refused before the first token. Prints what it saw.
"""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn

ROWS, MOST = 256, 24
PROMPTS = ["abcdefg", "hij", "the fox jumps"]
KINDS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_query_groups": 2},
    "a learnt sink": {"softmax_type": "learnable"},
    "a window": {"window_size": (3, 0)},
}


def main() -> None:
    from megatron.training import arguments, initialize

    arguments.parse_and_validate_args()
    initialize.initialize_megatron(allow_no_cuda=True)
    for kind, settings in KINDS.items():
        ours = build(settings, ours=True)
        try:
            found = generated(ours)
        except ValueError as error:
            print(f"rank {dist.get_rank()} refuses {kind}: {error}", flush=True)
            continue
        stock = build(settings, ours=False)
        stock.load_state_dict(ours.state_dict())
        assert found == generated(stock), kind
        assert distinct(found) > 5, "so that a token hangs on those before it"
        print(f"{kind}: {sum(map(len, found))} tokens alike", flush=True)


def distinct(found: list[list[int]]) -> int:
    return min(len(set(tokens)) for tokens in found)


def build(settings: dict[str, Any], *, ours: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_burst import BurstConfig
    from megatron_burst.plugin.layer_spec import burst_layer_spec

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        **settings,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(
        config,
        burst_layer_spec(spec, BurstConfig()) if ours else spec,
        vocab_size=ROWS,
        max_sequence_length=128,
        position_embedding_type="rope",
    )
    for name, weight in model.named_parameters():
        if weight.ndim == 2 or name.endswith("softmax_offset"):
            nn.init.normal_(weight, std=0.5)
    return model


def generated(model: Any) -> list[list[int]]:
    """The tokens of greedy requests of several lengths, batched by the engine."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines import StaticInferenceEngine, static_engine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )

    static_engine.HAVE_TQDM = True  # a progress bar, which it has a mock of
    context = StaticInferenceContext(len(PROMPTS), 128)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), tokenizer())
    engine = StaticInferenceEngine(controller, legacy=True)
    greedy = SamplingParams(top_k=1, num_tokens_to_generate=MOST)
    requests = engine.generate(prompts=PROMPTS, sampling_params=greedy)
    return [request.generated_tokens.tolist() for request in requests]


def tokenizer() -> Any:
    return SimpleNamespace(
        vocab_size=ROWS,
        eod=-1,
        bos=None,
        tokenize=lambda text: [*text.encode()],
        detokenize=lambda tokens, **_: " ".join(map(str, tokens)),
        offsets=lambda tokens, text: [*range(len(tokens))],
    )
