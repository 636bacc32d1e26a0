"""What layers with a state send, states or heads, and which of them is chosen. (fast tier)"""

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core.packed_seq_params")
from megatron_burst import BurstConfig  # noqa: E402
from megatron_burst.plugin.scans.bytes_sent import (  # noqa: E402
    ScanShape,
    sent_by_model,
    shapes_of,
)
from megatron_burst.plugin.scans.choice import sent_by_args, states_are_passed  # noqa: E402
from megatron_burst.tools.model import model_of  # noqa: E402


def test_bytes_are_those_of_the_page() -> None:
    shapes = shapes_of(lambda name, default: {"hidden_size": 4096}.get(name, default))
    mamba, delta = shapes["M"], shapes["G"]
    assert [each.fewer_from(8, 2) for each in (mamba, delta)] == [629, 1022]
    assert [each.fewer_from(2, 2) for each in (mamba, delta)] == [160, 258]
    assert [round(each.by_states(8, 2) / 2**20) for each in (mamba, delta)] == [28, 28]
    sent = [each.by_heads(16384, 8, 2) / 2**20 for each in (mamba, delta)]
    assert sent == pytest.approx([732, 450], abs=1)


def mamba_of(**sizes: int) -> ScanShape:
    return shapes_of(lambda name, default: {"hidden_size": 4096, **sizes}.get(name, default))["M"]


@pytest.mark.parametrize(
    ("groups", "ranks", "mib"), [(8, 8, 732), (1, 8, 731), (1, 16, 844), (8, 32, 996)]
)
def test_groups_that_serve_several_ranks_go_to_each(groups: int, ranks: int, mib: int) -> None:
    sent = mamba_of(mamba_num_groups=groups).by_heads(16384, ranks, 2)
    assert sent / 2**20 == pytest.approx(mib, abs=1)


def test_heads_that_megatron_cannot_exchange_are_not_chosen() -> None:
    for heads, groups, ranks, can in ((12, 4, 6, False), (12, 3, 6, True), (10, 2, 6, False)):
        shape = mamba_of(mamba_num_heads=heads, mamba_num_groups=groups)
        assert shape.divides(ranks) == can
        sent = sent_by_model("M-", {"M": shape}, 0, 64, ranks, 2)
        assert (sent.heads < math.inf) == can


NEMOTRON = SimpleNamespace(
    context_parallel_size=8,
    tensor_model_parallel_size=1,
    sequence_parallel=False,
    hidden_size=4096,
    mamba_num_heads=128,
    bf16=True,
    fp16=False,
    seq_length=8 * 16384,
    hybrid_layer_pattern="M-M*|-M-M*-/*/*",
    experimental_attention_variant=None,
    multi_latent_attention=False,
    position_embedding_type="none",
    cp_comm_type=["burst"],
    overlap_moe_expert_parallel_comm=False,
)


def passed(layout: str = "auto", *, documents: bool = False, **changed: Any) -> bool:
    args = SimpleNamespace(**{**vars(NEMOTRON), **changed})
    return states_are_passed(args, BurstConfig(layout=layout), documents=documents)


def test_auto_passes_states_where_that_sends_fewer_bytes() -> None:
    sent = sent_by_args(NEMOTRON, "M-M*-M-M*-")
    rows = 16384 * 4096 * 2
    shape = shapes_of(lambda name, default: {"hidden_size": 4096}.get(name, default))["M"]
    assert sent.states == 4 * shape.by_states(8, 2) + 4 * rows
    assert sent.heads == 4 * shape.by_heads(16384, 8, 2)
    # A token's heads in four layers less its row at four borders.
    a_token = 4 * (shape.by_heads(8, 8, 2) / 8 - 8192)
    least = math.ceil(4 * shape.by_states(8, 2) / a_token)
    assert not passed(seq_length=8 * (least - 1)) and passed(seq_length=8 * (least + 1))
    # With sequence parallelism each tensor-parallel rank moves its part of the rows.
    cut = SimpleNamespace(**vars(NEMOTRON) | {"tensor_model_parallel_size": 2})
    whole = sent_by_args(cut, "M*").states
    cut.sequence_parallel = True
    assert whole - sent_by_args(cut, "M*").states == rows


def test_the_choice_and_the_plan_count_mtps_layers(caplog: pytest.LogCaptureFixture) -> None:
    """Each depth begins and ends in attention's layout, whatever is before and behind it."""
    pattern, rows = "M-M*-/M*-/M*-", 16384 * 4096 * 2
    with caplog.at_level("INFO", "megatron_burst"):
        passed(hybrid_layer_pattern=pattern.replace("M*-/", "M|*-/", 1))
    expected = (4 * mamba_of().by_states(8, 2) + 6 * rows) / 2**20
    said = "a rank sends 880 MiB a sequence" in caplog.text
    assert round(expected) == 880 and said
    flags = {"hybrid-layer-pattern": pattern, "hidden-size": 4096, "num-attention-heads": 32}
    model = model_of(flags | {"vocab-size": 1000})
    assert model.kinds == pattern and model.mtp == 2 and model.parts["attention"].count == 3
    planned = sent_by_model(model.kinds, model.scans, rows, 16384, 8, 2)
    assert planned.states / 2**20 == expected
    assert model_of({**flags, "vocab-size": 1000, "mtp-num-layers": 3}).kinds == pattern + "/M*-"


@pytest.mark.parametrize(
    "changed",
    [
        {"context_parallel_size": 1},
        {"hybrid_layer_pattern": "*-*-"},
        {"cuda_graph_impl": "transformer_engine"},
        {"overlap_moe_expert_parallel_comm": True},
        {"cp_comm_type": ["burst", "p2p"]},
        {"position_embedding_type": "mrope"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_auto_leaves_heads_to_megatron_where_rows_cannot_move(changed: dict[str, Any]) -> None:
    assert passed() and not passed(**changed)


def test_who_names_zigzag_keeps_all_layers_in_it_but_for_documents() -> None:
    assert not passed("zigzag") and passed("zigzag", documents=True) and passed("contiguous")
    assert passed(mamba_num_heads=100, seq_length=1024), "heads that do not divide over the ranks"
