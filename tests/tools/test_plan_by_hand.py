"""`plan` for sixteen settings beside what a reader reckons from the models' papers. (fast tier)

One GPU's part of a step, every layer recomputed. Tokens of a rank n = N / CP; a layer has A numbers
in its matrices that meet a token, of which a GPU has 1 / TP.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_burst.tools.command import main
from megatron_burst.tools.plan.configs import Configs
from tests.tools.conftest import Printed

GIB, MIB, K = 2**30, 2**20, 1024


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
    norms: bool = False  # of queries and keys

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
QWEN3_8B = Sizes(36, 4096, 32, 8, 128, 12288, 151936, norms=True)
QWEN3_32B = Sizes(64, 5120, 64, 8, 128, 25600, 151936, norms=True)
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
    "llama3_8b 8k": (LLAMA3_8B, "h100", 64, 1, 8, 1, 1, 8 * K),
    "llama3_8b 16k": (LLAMA3_8B, "h100", 64, 1, 8, 1, 1, 16 * K),
    "70b 16k": (LLAMA_70B, "h100", 64, 8, 2, 1, 1, 16 * K),
    # A rank's gradients and weights take 0.69 s of its NIC, longer than all computing: 0.4 s.
    "70b 4k": (LLAMA_70B, "h100", 64, 8, 2, 1, 1, 4 * K),
}


class Messages(NamedTuple):
    """What NCCL makes of a setting, by docs/design/nccl.md."""

    heads: int  # ranks of the all-to-all that the first row has
    rate: float  # GB/s of its bytes, of both ways of one pass
    buffers: int  # MiB: a channel from a peer of the node takes 10 and one to it 2, of others 4


# Ours have as many channels, a power of two, as 768 MiB allow: with 1, 3, 7 peers 32, 16, 8. In a
# message of an all-to-all, half of a pass to one peer, each channel has up to 16 MiB: of 10 MiB one
# of 36.7 GB/s (B200: 40) for each of 7 peers, of 20 and 40 MiB all 8. A ring over nodes has a group
# for reads and one for gradients, of 4 channels each: 2 x 4 x 4 = 32 MiB.
MESSAGES = {
    "llama3_8b 64k": Messages(8, 7 * 36.7, 7 * 8 * 12),
    "llama3_8b 128k": Messages(8, 8 * 36.7, 7 * 8 * 12),
    "llama3_8b 128k B200": Messages(8, 8 * 40, 7 * 8 * 12),
    "llama3_8b 1M": Messages(8, 8 * 36.7, 7 * 8 * 12 + 32),
    # Over four nodes: 24 of 31 parts by half a NIC of 22 GB/s; a channel a peer, 8 in all.
    "llama2_7b 256k": Messages(32, 11 * 31 / 24, 7 * 12 + 8 * 4),
    "qwen3_8b 512k": Messages(8, 8 * 36.7, 7 * 8 * 12 + 32),
    "qwen3_32b 128k": Messages(1, 1, 32),
    "qwen3_32b 512k": Messages(2, 720, 32 * 12 + 32),
    "70b 256k": Messages(1, 1, 32),
    "qwen3_30b_a3b 128k": Messages(8, 8 * 36.7, 7 * 8 * 12),
    "qwen3_30b_a3b 64k": Messages(8, 7 * 40, 7 * 8 * 12),
    "qwen3_235b_a22b 128k": Messages(2, 360, 32 * 12 + 32),
    # 12 channels for 3 peers reach what NVLink does; a ring of 2 within the node: 2 x 32 channels.
    "llama3_8b 8k": Messages(4, 360, 3 * 16 * 12 + 2 * 32 * 12),
    "llama3_8b 16k": Messages(8, 7 * 36.7, 7 * 8 * 12),
    "70b 16k": Messages(1, 1, 32),
    "70b 4k": Messages(2, 45, 4 * 4),
}


def planned(name: str, printed: Printed, more: str = "") -> dict[str, Any]:
    _, cluster, gpus, tensor, context, pipeline, expert, tokens = SETTINGS[name]
    asked = f"plan --model {name.split()[0]} --cluster {cluster} --gpus {gpus} --fractions 1"
    asked += f" --seq-length {tokens} --json -- --context-parallel-size {context}"
    asked += f" --tensor-model-parallel-size {tensor} --expert-model-parallel-size {expert}"
    asked += f" --pipeline-model-parallel-size {pipeline}" + " --sequence-parallel" * (tensor > 1)
    first: dict[str, Any] = json.loads(printed(f"{asked} {more}"))[0]
    return first


def memory(name: str) -> dict[str, float]:
    """GiB of the last pipeline stage, which has the head.

    Weights and gradients have 2 bytes, optimizer states 12 of the numbers that a rank owns of its
    data- and context-parallel ranks; each recomputed layer keeps its input. The layer at work has
    five tensors as wide as that, q, k, v and the output, and inside the MLP 5 of its width: gate
    and up, 2, their gradient, 2, and that of their product, 1, where SwiGLU is one kernel. Norms of
    queries and keys keep what q, k and v lie in, and a copy of q.
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
    kept = (2 + 2 * model.norms) * (model.heads + model.kv_heads) * model.head
    layer_at_work = 2 * n * (5 * model.hidden + kept + 5 * model.ffn) / GIB
    is_plain = tensor == 1 and not model.experts
    return {
        **({"layer": layer_at_work} if is_plain else {}),
        **({"loss": loss(name)} if pipeline == 1 else {}),
        "nccl": MESSAGES[name].buffers * MIB / GIB,
        "weights": 2 * (dense + experts) / GIB,
        "gradients": 2 * (dense + experts) / GIB,
        "optimizer": 12 * (dense / shards + experts / owners) / GIB,
        "inputs": 2 * model.layers / pipeline * n * model.hidden / tensor / GIB,
    }


def test_an_activation_that_nothing_compiles_leaves_more_alive(printed: Printed) -> None:
    """Twice the width of a SwiGLU, once more what its product made: 2 bytes each."""
    model, _, _, _, context, _, _, tokens = SETTINGS["llama3_8b 128k"]
    rows = [planned("llama3_8b 128k", printed, more) for more in ("", "--no-bias-swiglu-fusion")]
    usual, eager = (row["memory_parts"]["layer"] for row in rows)
    assert eager - usual == 2 * 2 * model.ffn * tokens // context


def test_a_rank_alone_has_no_sums_of_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    """One tile's dQ, dK and dV are the results, in 2 bytes, of K's and V's half as much again.

    Beside them 4 tensors as wide as the hidden states, q, k, v and the output, a kernel's workspace
    of 8 bytes a number of q, and rotary embeddings of 12 a number of a head.
    """
    asked = (
        "plan --model llama3_8b --cluster h100 --gpus 1 --seq-length 131072 --json --fractions 1"
    )
    assert main([*asked.split(), "--", "--mlp-chunks", "auto", "--recompute-offload"]) == 1
    (row, *_) = json.loads(capsys.readouterr().out)
    q, kv = 4096, 2 * 8 * 128
    a_token = 2 * (4 * 4096 + q + kv + q) + 2 * (q + 1.5 * kv) + 8 * q + 12 * 128
    assert row["memory_parts"]["layer"] == pytest.approx(131072 * a_token, rel=1e-3)


def loss(name: str) -> float:
    """GiB, in even chunks within 5 GiB (configs/runs.toml), by docs/design/loss.md.

    A token of a chunk has 2 bytes of each logit and 6 of each hidden number, over tensor-parallel
    ranks 12; dW in float32 stays, as gradients have 2 bytes. Beside it are the last layer's output,
    its norm's and the gradient. Llama-3 8B, 16k tokens a rank: 281,088 bytes a token, dW 2,004 MiB;
    of 4,392 MiB two chunks, so 2,004 + 2,196 + 3 x 128 = 4,584 MiB.
    """
    model, _, _, tensor, context, _, _, tokens = SETTINGS[name]
    n, rows = tokens // context, model.vocabulary / tensor
    a_token = 2 * rows + (6 if tensor == 1 else 12) * model.hidden
    sums = 4 * rows * model.hidden
    chunks = math.ceil(n * a_token / (5 * GIB - sums))
    states = 2 * n * model.hidden * (3 if tensor == 1 else 3 / tensor + 1)
    return (sums + n * a_token / chunks + states) / GIB


def sent(name: str) -> float:
    """Bytes of a rank for attention of a layer: two forwards and a backward.

    An all-to-all over U ranks sends (U - 1) / U of q, k, v and the output, kv heads copied where
    they are fewer than U. A ring of R sends K and V to R - 1 ranks in each pass, and as many bytes
    of gradients. Llama-3 8B, 1M tokens over 32 ranks: n = 32768; 3 x 560 MiB over U = 8, and over
    R = 4 of 128 MiB 4 x 3: 3,216 MiB.
    """
    model, _, _, tensor, context, _, _, tokens = SETTINGS[name]
    size = MESSAGES[name].heads
    row = tokens // context * model.head * 2 * 2
    kv_heads = max(model.kv_heads / tensor, 1 if size == 1 else size)
    over_heads = row * (model.heads / tensor + kv_heads) * (size - 1) / size
    return 3 * over_heads + 4 * (context // size - 1) * row * kv_heads


def waiting(name: str) -> float:
    """Seconds of messages that nothing hides, of a stage and a micro-batch.

    All-to-alls over heads: their bytes, and all of them read and written before and after. A layer
    gathers and scatters hidden states over TP ranks 7 times for attention and 7 for its MLP.
    Experts: a rank's tokens go to 8 of them and come back, in both forwards and the backward; TP
    ranks that share an expert gather what came. Llama-3 8B, 128k tokens: 280 MiB a pass, 1.00 ms at
    294 GB/s and 0.40 ms of memory, 3 x 32 times: 0.134 s.
    """
    model, cluster, _, tensor, context, pipeline, expert, tokens = SETTINGS[name]
    machine, size = Configs.read().cluster(cluster), MESSAGES[name].heads
    n = tokens // context
    kv_heads = max(model.kv_heads / tensor, size)
    held = n * (model.heads / tensor + kv_heads) * model.head * 2 * 2 * (size > 1)
    a_layer = 3 * held * (size - 1) / size / MESSAGES[name].rate / 1e9
    a_layer += 3 * 4 * held / machine.memory_rate
    hidden = 2 * n * model.hidden
    a_layer += (7 if model.experts else 14) * hidden * (tensor - 1) / tensor / machine.within_rate
    if model.experts:
        both_ways = 2 * 8 * hidden / tensor
        near = min(expert, 8 // tensor)
        links = both_ways * (near - 1) / expert / machine.within_rate
        if expert > near:
            links = both_ways * (expert - near) / expert / machine.nic_rate
        a_layer += 3 * (links + (tensor - 1) * both_ways / machine.within_rate)
    return a_layer * model.layers / pipeline


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
def test_the_first_row_is_that_by_hand(name: str, printed: Printed) -> None:
    """Each rank has owned numbers' gradients scattered and weights gathered, 4 bytes of each.

    A ring waits up to 5 % of a step for who has most to do, which is not reckoned here.
    """
    model, cluster, gpus, tensor, context, pipeline, _, _ = SETTINGS[name]
    machine, row = Configs.read().cluster(cluster), planned(name, printed)
    for part, gib in memory(name).items():
        assert row["memory_parts"][part] / GIB == pytest.approx(gib, rel=0.1), part
    seconds = row["bounds"]["computing"] * row["seconds_a_step"]
    assert seconds == pytest.approx(computing(name), rel=0.1)
    assert row["head_parallel_size"] == MESSAGES[name].heads
    assert row["sent_bytes_a_layer"] == pytest.approx(sent(name), rel=1e-3)
    waited = pipeline * waiting(name)
    step = pipeline * computing(name) + waited
    if not model.experts:
        owned = (model.layers * model.meets + 2 * model.vocabulary * model.hidden) / tensor
        shards = gpus // tensor
        ring = min(machine.within_rate, 8 // tensor * machine.nic_rate / machine.gpus_per_nic)
        ring = machine.within_rate if gpus == 8 else ring
        exposed = max(0.0, 4 * owned * (shards - 1) / shards / ring - step)
        waited, step = waited + exposed, step + exposed + 32 * owned / shards / machine.memory_rate
    all_of_it = row["seconds_a_step"]
    rings = 0.05 * all_of_it * (context > MESSAGES[name].heads)
    assert row["bounds"]["messages"] * all_of_it == pytest.approx(waited, rel=0.1, abs=rings)
    assert all_of_it == pytest.approx(step, rel=0.1)


def test_the_optimizer_in_the_hosts_memory_is_that_by_hand(printed: Printed) -> None:
    """Llama-3 8B on 8 GPUs: each owns 1.004e9 numbers, of which gradients leave and weights come.

    4 bytes at 50 GB/s take 0.080 s; updates, 0.158 s for 1e9 (configs/published.toml), 1.27 s.
    """
    row = planned(
        "llama3_8b 64k", printed, "--optimizer-cpu-offload --use-precision-aware-optimizer"
    )
    host = row["bounds"]["host"] * row["seconds_a_step"]
    assert host == pytest.approx(4 * 8.03e9 / 8 / 50e9 + 0.158 * 8.03, rel=0.02)


def test_the_readmes_bytes_to_other_nodes_are_those_by_hand() -> None:
    """K and V of 16384 tokens, 8 heads of 128, are 64 MiB: of two forwards and, with gradients as
    wide, a backward 4 times as much goes to all but the own of 32 ranks, or of 4 behind U = 8."""
    ring, behind = 4 * 31 * 64, 4 * 3 * 64
    page = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"by `plan` | {ring} | {ring} | - | {behind} | {behind} |" in page
