"""The one formula of FLOPs, by hand, and peaks by the names of devices. (fast tier)"""

from typing import Any

import pytest

from megatron_burst.tools.flags import flags_of, heads_of
from megatron_burst.tools.flops import attention_flops, logged_step_flops, peak_tflops
from megatron_burst.tools.model import model_of


def test_the_formula_of_the_mfu() -> None:
    arguments = {
        "hidden_size": "8",
        "ffn_hidden_size": "32",
        "kv_channels": "4",
        "num_layers": "3",
        "padded_vocab_size": "100",
        "seq_length": "16",
        "global_batch_size": "2",
        "num_attention_heads": "2",
        "num_query_groups": "1",
        "group_query_attention": "True",
        "swiglu": "True",
    }
    # q, k, v, out; three matrices of the MLP; scores and values of (16 + 1) / 2 keys; the head.
    layer = 2 * 8 * (8 + 4 + 4 + 8) + 2 * 3 * 8 * 32 + 2 * 2 * 2 * 4 * 8.5
    assert logged_step_flops(arguments) == 3 * 2 * 16 * (3 * layer + 2 * 8 * 100)
    assert logged_step_flops(arguments | {"num_experts": "8"}) is None
    assert logged_step_flops(arguments | {"sft": "True"}) is None, "its sequences are packed"
    assert logged_step_flops(arguments | {"num_experts": "None", "window_size": "(3, 0)"}) is None


@pytest.mark.parametrize(
    ("more", "matrices", "width"),
    [
        ({}, 2, 4 * 4096),
        ({"swiglu": True}, 3, 10880),  # 4 x 4096 x 2 / 3, down to a multiple of 64
        ({"quick-geglu": True}, 3, 4 * 4096),
        ({"swiglu": True, "ffn-hidden-size": 14336}, 3, 14336),
    ],
)
def test_an_mlp_has_the_matrices_and_the_width_that_megatron_gives_it(
    more: dict[str, Any], matrices: int, width: int
) -> None:
    sizes = {"num-layers": 1, "hidden-size": 4096, "num-attention-heads": 32, "vocab-size": 128}
    model = model_of(sizes | more)
    assert model.others["mlp"].parameters == matrices * 4096 * width
    gated = matrices == 3
    assert model.others["mlp"].at_work == (5 / 3 if gated else 3 / 2)
    eager = "no-bias-swiglu-fusion" if "swiglu" in more else "no-bias-gelu-fusion"
    alive = model_of(sizes | more | {eager: True}).others["mlp"].at_work
    assert alive == (7 / 3 if gated else 3 / 2)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("AMD EPYC 7742 64-Core Processor", None),
    ],
)
def test_peaks_by_the_name_of_a_device(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak


def test_attention_has_two_products_forward_and_five_backward() -> None:
    assert attention_flops(10, 3, 4, 6) == 2 * 10 * 3 * (4 + 6)
    # dV and dP have the values' size, scores, dQ and dK that of the keys.
    assert attention_flops(10, 3, 4, 6, backward=True) == 2 * 10 * 3 * (2 * 6 + 3 * 4)


def test_heads_are_read_of_arguments_as_megatron_keeps_and_as_it_logs_them() -> None:
    kept = {
        "num_attention_heads": 8,
        "multi_latent_attention": True,
        "group_query_attention": False,
    }
    assert heads_of(flags_of({**kept, "v_head_dim": 96, "kv_channels": None})) == (8, 8, 192, 96)
    logged = {"num_attention_heads": "8", "multi_latent_attention": "False", "kv_channels": "64"}
    found = heads_of(flags_of({**logged, "group_query_attention": "True", "num_query_groups": "2"}))
    assert found == (8, 2, 64, 64)
    assert found.of_rank(4) == (2, 1), "no rank is without a kv head"
