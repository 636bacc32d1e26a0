"""`plan` for twelve settings beside what a reader reckons from the models' papers. (fast tier)

One GPU's part of a step, every layer recomputed. Tokens of a rank n = N / CP; a layer has A numbers
in its matrices that meet a token, of which a GPU has 1 / TP.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from megatron_burst.tools.command import main
from megatron_burst.tools.plan.configs import Configs

GIB, K = 2**30, 1024


class Sizes(NamedTuple):
    """Of a model, from its paper or its card."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int  # numbers of one
    ffn: int  # of the MLP, gated: three matrices; of all experts of a token
    vocabulary: int
    experts: int = 0
    expert_ffn: int = 0  # of one expert

    @property
    def attention(self) -> int:
        """q and the output, k and v."""
        return 2 * self.hidden * self.head * (self.heads + self.kv_heads)

    @property
    def meets(self) -> int:
        """The numbers of a layer's matrices that meet a token."""
        return self.attention + self.hidden * (3 * self.ffn + self.experts)

    @property
    def saved(self) -> int:
        """Numbers of a token in a layer: five as wide as the input (it, norms, sums), q and k
        before and after rotary, v, the output; of the MLP two products and what goes on."""
        rotary = 3 * self.heads + 3 * self.kv_heads
        moved = 2 * (self.ffn // self.expert_ffn) * self.hidden if self.experts else 0
        return 5 * self.hidden + rotary * self.head + 3 * self.ffn + moved


LLAMA3_8B = Sizes(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA2_7B = Sizes(32, 4096, 32, 32, 128, 11008, 32000)
LLAMA_70B = Sizes(80, 8192, 64, 8, 128, 28672, 128256)
QWEN3_8B = Sizes(36, 4096, 32, 8, 128, 12288, 151936)
QWEN3_32B = Sizes(64, 5120, 64, 8, 128, 25600, 151936)
QWEN3_30B = Sizes(48, 2048, 32, 4, 128, 8 * 768, 151936, 128, 768)
QWEN3_235B = Sizes(94, 4096, 64, 4, 128, 8 * 1536, 151936, 128, 1536)

# Model, cluster, GPUs, TP, CP, PP, EP, tokens.
SETTINGS: Mapping[str, tuple[Sizes, str, int, int, int, int, int, int]] = {
    "llama3_8b 64k": (LLAMA3_8B, "h100", 8, 1, 8, 1, 1, 64 * K),
    "llama3_8b 128k": (LLAMA3_8B, "h100", 64, 1, 8, 1, 1, 128 * K),
    "llama3_8b 128k B200": (LLAMA3_8B, "b200", 8, 1, 8, 1, 1, 128 * K),
    "llama3_8b 1M": (LLAMA3_8B, "h200", 32, 1, 32, 1, 1, 1024 * K),
    "llama2_7b 256k": (LLAMA2_7B, "a800", 32, 1, 32, 1, 1, 256 * K),
    "qwen3_8b 512k": (QWEN3_8B, "h100", 16, 1, 16, 1, 1, 512 * K),
    "qwen3_32b 128k": (QWEN3_32B, "h100", 64, 8, 8, 1, 1, 128 * K),
    "qwen3_32b 512k": (QWEN3_32B, "b200", 64, 4, 16, 1, 1, 512 * K),
    "70b 256k": (LLAMA_70B, "h200", 64, 8, 8, 1, 1, 256 * K),
    "qwen3_30b_a3b 128k": (QWEN3_30B, "h100", 64, 1, 8, 1, 8, 128 * K),
    "qwen3_30b_a3b 64k": (QWEN3_30B, "b200", 32, 1, 8, 1, 8, 64 * K),
    "qwen3_235b_a22b 128k": (QWEN3_235B, "h200", 256, 4, 8, 2, 16, 128 * K),
}


def planned(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    _, cluster, gpus, tensor, context, pipeline, expert, tokens = SETTINGS[name]
    asked = f"plan --model {name.split()[0]} --cluster {cluster} --gpus {gpus} --fractions 1"
    asked += f" --seq-length {tokens} --json -- --context-parallel-size {context}"
    asked += f" --tensor-model-parallel-size {tensor} --expert-model-parallel-size {expert}"
    asked += f" --pipeline-model-parallel-size {pipeline}" + " --sequence-parallel" * (tensor > 1)
    assert main(asked.split()) == 0
    first: dict[str, Any] = json.loads(capsys.readouterr().out)[0]
    return first


def memory(name: str) -> dict[str, float]:
    """GiB of the last pipeline stage, which has the head.

    Weights and gradients have 2 bytes, optimizer states 12 of the numbers that a rank owns of its
    data- and context-parallel ranks; each recomputed layer keeps its input. The layer at work has
    five tensors as wide as that, q, k, v and the output, and inside the MLP 7 of its width: what
    it saves, 3, and gradients of the products and between them.
    """
    model, _, gpus, tensor, context, pipeline, expert, tokens = SETTINGS[name]
    n, ends = tokens // context, model.vocabulary * model.hidden * (2 if pipeline == 1 else 1)
    of_experts = 3 * model.experts * model.hidden * model.expert_ffn * model.layers / pipeline
    layer = model.attention + model.hidden * model.experts
    layer += 0 if model.experts else 3 * model.hidden * model.ffn
    dense = (model.layers * layer / pipeline + ends) / tensor
    shards = gpus // tensor // pipeline
    # TP ranks share out each expert, so one of EP has its part of TP x EP.
    experts, owners = of_experts / expert / tensor, shards / expert
    kept = 2 * (model.heads + model.kv_heads) * model.head
    layer_at_work = 2 * n * (5 * model.hidden + kept + 7 * model.ffn) / GIB
    is_plain = tensor == 1 and not model.experts
    return {
        **({"layer": layer_at_work} if is_plain else {}),
        "weights": 2 * (dense + experts) / GIB,
        "gradients": 2 * (dense + experts) / GIB,
        "optimizer": 12 * (dense / shards + experts / owners) / GIB,
        "inputs": 2 * model.layers / pipeline * n * model.hidden / tensor / GIB,
    }


def computing(name: str) -> float:
    """Seconds of one micro-batch in the layers of a stage, and of its head.

    A recomputed layer's matrices meet a token 4 times (2 forward, 2 backward), with 2 FLOPs each;
    what it saves is written and read as often. Causal attention is N^2 / 2 pairs of a head, 4 FLOPs
    a number forward, twice, and 10 backward. The head's logits are made once: 3 products.
    """
    model, cluster, _, tensor, context, pipeline, _, tokens = SETTINGS[name]
    machine, n = Configs.read().cluster(cluster), tokens / context / tensor
    products = 4 * 2 * model.meets * n / machine.linear_rate
    traffic = 4 * 2 * 2 * model.saved * n / machine.memory_rate
    pairs = tokens**2 / 2 * model.heads * model.head / context / tensor
    attention = pairs * (2 * 4 / machine.forward_rate + 10 / machine.backward_rate)
    head = 3 * 2 * model.vocabulary * model.hidden * n / machine.linear_rate
    # The host launches a layer's experts when it has heard how many tokens came to each.
    launched = 4 * machine.experts_seconds if model.experts else 0.0
    return model.layers / pipeline * (products + traffic + attention + launched) + head


@pytest.mark.parametrize("name", SETTINGS)
def test_the_first_rows_parts_are_those_by_hand(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = planned(name, capsys)
    for part, gib in memory(name).items():
        assert row["memory_parts"][part] / GIB == pytest.approx(gib, rel=0.1), part
    seconds = row["bounds"]["computing"] * row["seconds_a_step"]
    assert seconds == pytest.approx(computing(name), rel=0.1)
