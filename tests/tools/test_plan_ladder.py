"""The ladder: how far sequences go, its counts beside step_memory.py's, its command. (fast tier)"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import million
import pytest
from pages import filled

from megatron_burst.tools.flags import arguments
from megatron_burst.tools.plan import ladder, memory, savings, step
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.reading import workload_of
from tests.tier import slow_if
from tests.tools.conftest import Printed

ROOT = Path(__file__).parents[2]

CONFIGS = Configs.read()
H100 = CONFIGS.cluster("h100")


def given(model: str, **more: Any) -> dict[str, Any]:
    flags = CONFIGS.flags_of("_long") | CONFIGS.model(model) | {"seq-length": 2**20}
    return flags | {name.replace("_", "-"): value for name, value in more.items()}


@pytest.fixture(scope="module", autouse=True)
def climbs_once() -> Iterator[None]:
    """Several tests ask for the same ladders."""
    known: dict[str, list[ladder.Rung]] = {}
    climb = ladder.climb

    def once(*given: Any) -> list[ladder.Rung]:
        if repr(given) not in known:
            known[repr(given)] = climb(*given)
        return known[repr(given)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "climb", once)
        yield


@pytest.mark.parametrize(
    ("model", "tokens"), [("llama3_8b", 4.5e6), ("qwen3_32b", 1.5e6), ("70b", 1.3e6)]
)
def test_how_far_a_sequence_goes(model: str, tokens: float) -> None:
    """On the ladders of the page."""
    gpus = million.JOBS[model]
    rungs = million._climb(model, gpus)
    lengths = [rung.longest for rung in rungs[:-1]]  # the optimizer on the host is another way
    assert lengths == sorted(lengths)
    best = max(rungs, key=lambda rung: rung.longest)
    assert best.longest >= tokens, f"{best.name}: {best.longest}"
    assert not memory.lacks(best.way.load)
    assert best.way.load.config.head_parallel_size == 1  # not left to training's clock
    longer = ladder.sized(best.flags, best.longest + 2**16)
    assert memory.lacks(workload_of(longer, H100, gpus))


def test_a_sequence_may_be_longer_than_67_million_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "lacks", lambda load: load.tokens > 10**8)
    flags = given("llama3_8b", context_parallel_size=8)
    assert ladder._longest(flags, H100, 8) == 10**8 // 2**16 * 2**16


def test_ranks_of_an_odd_factor_have_lengths_that_they_divide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = [*savings.rungs(given("llama3_8b"))]
    monkeypatch.setattr(ladder, "rungs", lambda _: every[::5])
    rungs = ladder.climb(given("llama3_8b"), H100, 24)
    assert all(each.longest and each.longest % 48 == 0 for each in rungs)
    assert rungs[0].load.tokens == 1048608, "the least multiple of 48 from 2**20 on"


def test_sizes_that_are_given_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context-parallel size was replaced by all ranks that tensor parallelism leaves."""
    monkeypatch.setattr(ladder, "rungs", lambda flags: [*savings.rungs(flags)][-1:])
    for pipeline in (1, 2):
        asked = given("llama3_8b", context_parallel_size=2, pipeline_model_parallel_size=pipeline)
        (rung,) = ladder.climb(asked, H100, 8)
        sizes = rung.load.tensor, rung.load.context, rung.load.pipeline
        assert sizes == (4 // pipeline, 2, pipeline) and rung.longest


def test_sizes_that_do_not_go_with_the_rest_are_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 8 tensor-parallel ranks 14B has 5 heads each, which two ranks cannot share out."""
    monkeypatch.setattr(ladder, "rungs", lambda flags: [*savings.rungs(flags)][:1])
    (rung,) = ladder.climb(given("14b", burst_head_parallel_size=2), H100, 16)
    assert rung.load.tensor == 4


@pytest.mark.parametrize(
    ("more", "row"), [({"fp8_format": "hybrid"}, 3), ({"pipeline_model_parallel_size": 2}, 5)]
)
def test_a_saving_that_does_not_go_with_the_rest_is_left_out(
    more: dict[str, Any],
    row: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """MLPs in chunks beside FP8, and Megatron-FSDP over stages, which ended the whole ladder."""
    asked = given("llama3_8b", tensor_model_parallel_size=1, **more)
    every = [*savings.rungs(asked)][row - 1 : row + 2]
    monkeypatch.setattr(ladder, "rungs", lambda _: every)
    found = ladder.climb(asked, H100, 8)
    assert [rung.name for rung in found] == [every[0][0], every[2][0]]
    assert every[1][0] in capsys.readouterr().err


@pytest.mark.parametrize("pattern", [None, "*-" * 32])
def test_every_rung_recomputes_all_layers_in_words_that_megatron_takes(pattern: str | None) -> None:
    """Of selective recompute its method and its number of layers are missing."""
    flags = {
        **given("llama3_8b", hybrid_layer_pattern=pattern),
        "recompute-granularity": "selective",
    }
    flags = {
        n: v for n, v in flags.items() if n not in ("recompute-method", "recompute-num-layers")
    }
    flags = {n: v for n, v in flags.items() if v is not None} | {"recompute-modules": "mlp"}
    for _, rung in savings.rungs(flags):
        words = {n.removeprefix("recompute-"): v for n, v in rung.items() if "recompute-" in n}
        words.pop("offload", None)
        layers = 2 if pattern else 1
        assert words == {"granularity": "full", "method": "uniform", "num-layers": layers}


def test_every_rung_is_within_5_per_cent_of_what_lives_in_a_step() -> None:
    """Of the counts on the page of recompute, which test_step_memory.py compares with a step."""
    page = (ROOT / "docs" / "recompute.md").read_text().partition("## What lives in a step")[2]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    counted = [max(float(cell.strip("*")) for cell in row[1:5]) for row in rows[1:6]]
    more = {"num_layers": 4, "tensor_model_parallel_size": 1, "lm_head_memory_mb": 512}
    found = []
    for rung in ladder.climb(given("llama3_8b", **more), H100, 8)[: len(counted)]:
        load = rung.load
        parts = memory.predict(load)
        found.append((parts.inputs + max(parts.layer, parts.loss)) / (load.local_tokens * 8192))
    assert found == pytest.approx(counted, rel=0.05)


PLAIN = 8, ""  # kv heads; and what else is not Llama's
FAST = {(4, 4, True, *PLAIN), (8, 0, True, *PLAIN), (8, 1, False, *PLAIN)}
FAST |= {(8, 2, True, *PLAIN), (8, 4, True, 4, "")}
STEPS = [(tensor, rung, True, *PLAIN) for tensor in (1, 2, 4, 8) for rung in (0, 2, 4)]
STEPS += [(tensor, rung, False, *PLAIN) for tensor in (2, 4, 8) for rung in (1, 4)]
STEPS += [(4, rung, True, 8, "ungated") for rung in (1, 4)]
STEPS += [(tensor, 4, True, tensor // 2, kind) for tensor in (4, 8) for kind in ("", "norms")]


@pytest.mark.parametrize("case", slow_if({*STEPS} - FAST, STEPS))
def test_tensor_parallel_steps_are_within_5_per_cent_of_the_count(
    case: tuple[int, int, bool, int, str],
) -> None:
    """On 8 GPUs, of a row of the ladder, with and without sequence parallelism.

    Where kv heads are fewer than ranks, each gathers q, k and v of all, and with norms keeps them.
    """
    tensor, rung, shares_rows, kv_heads, kind = case
    pytest.importorskip("megatron.core.models.gpt")
    from step_memory import SAVINGS, Settings, measure

    tokens, ranks = 131072, 8 // tensor
    sizes = {"tensor_model_parallel_size": tensor, "context_parallel_size": ranks}
    more = {"sequence_parallel": shares_rows and tensor > 1}
    model = {"num_query_groups": kv_heads, "qk_layernorm": kind == "norms"}
    model |= {"num_layers": 2, "swiglu": kind != "ungated"}
    flags = given("llama3_8b", lm_head_memory_mb=512, **model, **sizes, **more)
    _, asked = list(savings.rungs(flags))[rung]
    found = memory.predict(workload_of(ladder.sized(asked, tokens * ranks), H100, 8))
    heads = {"kv_heads": kv_heads, "qk_norm": kind == "norms", "gated": kind != "ungated"}
    step = Settings(2, tokens, ranks, tensor, **heads, **more, savings=frozenset(SAVINGS[:rung]))
    counted = measure(step).peak
    assert found.inputs + max(found.layer, found.loss) == pytest.approx(counted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "selective"])
@pytest.mark.parametrize(
    ("tensor", "shares_rows", "kv_heads", "norms"),
    [(1, True, 8, False), (4, True, 8, False), (4, False, 8, False)]
    + [(1, True, 8, True), (1, True, 32, True), (8, True, 4, False), (8, True, 4, True)],
)
def test_what_a_layer_saves_is_within_1_per_cent_of_the_count(
    tensor: int, shares_rows: bool, kv_heads: int, norms: bool, recompute: str | None
) -> None:
    """Without recompute and with that of attention alone, which takes more."""
    pytest.importorskip("megatron.core.models.gpt")
    from step_memory import Settings, shares

    sizes = {"tensor_model_parallel_size": tensor, "context_parallel_size": 8 // tensor}
    more = {"sequence_parallel": shares_rows and tensor > 1}
    model = {"num_layers": 1, "num_query_groups": kv_heads, "qk_layernorm": norms}
    flags = given("llama3_8b", **model, recompute_granularity=recompute, **sizes, **more)
    load = workload_of(ladder.sized(flags, 131072 * 8 // tensor), H100, 8)
    heads = {"kv_heads": kv_heads, "qk_norm": norms}
    how = {"recompute": recompute, "fused": True}
    step = Settings(2, 131072, 8 // tensor, tensor, **more, **heads, **how)
    assert memory.predict(load).inputs == pytest.approx(shares(step)[1]["forward"], rel=0.01)


@pytest.mark.slow
def test_a_rank_alone_is_within_5_per_cent_of_the_count() -> None:
    pytest.importorskip("megatron.core.models.gpt")
    from step_memory import SAVINGS, Settings, measure

    sizes = {"tensor_model_parallel_size": 1, "context_parallel_size": 1}
    flags = given("llama3_8b", num_layers=2, lm_head_memory_mb=512, **sizes)
    _, asked = list(savings.rungs(flags))[3]
    found = memory.predict(workload_of(ladder.sized(asked, 131072), H100, 1))
    step = Settings(2, 131072, 1, savings=frozenset(SAVINGS[:3]))
    assert found.inputs + found.layer == pytest.approx(measure(step).peak, rel=0.05)


def test_the_table_is_read_on_100_columns(printed: Printed) -> None:
    text = printed("plan --model llama3_8b --cluster h100 --gpus 8 --ladder")
    table, _, command = text.partition(" on every node:\n")
    assert max(map(len, table.splitlines())) <= 100
    assert "weights sharded (Megatron-FSDP)" in table and "1048576 tokens" in table
    assert command.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun ")
    assert "--use-megatron-fsdp" in command
    said = printed("plan --model 70b --cluster h100 --gpus 1 --ladder", 1)
    assert "no sequence fits on 1 GPUs" in said


def test_megatron_accepts_the_commands(detached: None, printed: Printed) -> None:
    """Megatron-FSDP refuses the setting that context parallelism without it asks for."""
    pytest.importorskip("megatron.training")
    rows = json.loads(printed("plan --model llama3_8b --cluster h100 --gpus 8 --ladder --json"))
    page = (ROOT / "docs" / "million.md").read_text()
    block = page.partition("```bash\n")[2].partition("```")[0]
    assert sorted(shlex.split(block.replace("\\\n", ""))) == sorted(
        shlex.split(rows[-2]["command"])
    )
    for row in rows[-2:]:
        words = shlex.split(row["command"])
        assert (words[0] == "CUDA_DEVICE_MAX_CONNECTIONS=1") != ("--use-megatron-fsdp" in words)
        said = printed([*"doctor --gpus-per-node 8 --cluster h100 --".split(), *words])
        assert "memory:" not in said, said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"use-megatron-fsdp": True, "optimizer-cpu-offload": True}, "first step ends with an"),
        ({"use-megatron-fsdp": True, "pipeline-model-parallel-size": 2}, "is not modelled"),
        (
            {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim"},
            "optim_grads_params alone",
        ),
        ({"optimizer-cpu-offload": True, "optimizer-offload-fraction": 2}, "between 0 and 1"),
        ({"mtp-num-layers": 1, "pipeline-model-parallel-size": 2}, "last stage has all of it"),
        ({"num-experts": 8, "moe-layer-freq": 0}, "--moe-layer-freq 0 is not a positive"),
        ({"num-distributed-optimizer-instances": 2}, "instances 2 cannot be predicted here"),
        ({"optimizer": "muon"}, "--optimizer muon cannot be predicted here: adam alone"),
        ({"megatron-fsdp-main-grads-dtype": "fp32"}, "predicted here: auto and bf16 alone"),
        ({"cpu-offloading-num-layers": 4}, "4 cannot be predicted here: what it moves is not"),
        ({"fp8-param-gather": True}, "weights of 16 bits alone are counted"),
        ({"fp32-residual-connection": True}, "hidden states as wide as weights alone"),
        ({"mtp-num-layers": 2, "mtp-use-repeated-layer": True}, "with weights of its own"),
        ({"tensor-parallel-num-weight-shards": 8}, "weights that tensor parallelism alone"),
        ({"step-batch-size-schedule": "0:8 1B:16"}, "give the --global-batch-size"),
        ({"use-megatron-fsdp": True, "use-nccl-ub": True}, "its double buffers are not counted"),
        ({"moe-paged-stash": True}, "what it moves is not counted"),
        (
            {"use-megatron-fsdp": True, "suggested-communication-unit-size": 10**8},
            "100000000: it is counted to gather ahead as much as by default",
        ),
    ],
)
def test_what_is_not_modelled_is_said(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        workload_of({**given("llama3_8b", global_batch_size=8), **flags}, H100, 8)


def test_what_megatron_takes_without_being_told_is_modelled() -> None:
    usual = {"optimizer": "adam", "exp-avg-dtype": "fp32", "exp-avg-sq-dtype": "fp32"}
    usual |= {"num-distributed-optimizer-instances": "1", "mtp-num-layers": "1"}
    usual |= {"megatron-fsdp-main-grads-dtype": "bf16"}  # the weights' own
    flags = given("llama3_8b", global_batch_size=8) | usual
    assert workload_of(flags, H100, 8).model.mtp == 1


def test_copies_are_exposed_as_far_as_no_layer_hides_them() -> None:
    flags = given("llama3_8b", context_parallel_size=8, recompute_offload=True)
    quick, slow = (CONFIGS.cluster("h100", host_gb_s=rate) for rate in (100, 1))
    short = {**flags, "seq-length": 65536}
    copies = [step.predict(workload_of(f, c, 8)).copies for f, c in ((flags, quick), (short, slow))]
    assert copies[0].exposed == 0 < copies[0].seconds
    assert 0 < copies[1].exposed < copies[1].seconds


def test_an_input_comes_back_beside_the_projections_of_queries_keys_and_values() -> None:
    """By hand: 131072 tokens of 8192 bytes at 25 GB/s, and 4 FLOPs a weight of 4096 x 6144."""
    flags = given("llama3_8b", context_parallel_size=8, recompute_offload=True)
    del flags["recompute-attention-fraction"]
    load = workload_of(flags, CONFIGS.cluster("h100", host_gb_s=25), 8)
    copy = 131072 * 8192 / 25e9
    window = 131072 * 4 * 4096 * 6144 / load.cluster.linear_rate
    assert window < copy
    found = step.host_copies(load, 100.0, 100.0)
    assert found.seconds == pytest.approx(2 * 32 * copy)
    assert found.exposed == pytest.approx(32 * (copy - window))


def test_the_page_says_what_the_planner_counts() -> None:
    page = (ROOT / "docs" / "million.md").read_text()
    assert filled(page, million.parts()) == page


def test_doctor_names_the_saving_that_is_missing(detached: None, printed: Printed) -> None:
    pytest.importorskip("megatron.training")

    sizes = {"lm_head_memory_mb": False, "context_parallel_size": 8, "global_batch_size": 1}
    *_, (_, longest), _ = savings.rungs(given("llama3_8b", **sizes))

    def said(*without: str) -> str:
        flags = {name: value for name, value in longest.items() if name not in without}
        words = arguments(ladder.sized(flags, 4 * 2**20))
        asked = "doctor --gpus-per-node 8 --cluster h100 -- python -m megatron_burst.pretrain"
        return printed([*asked.split(), *words])

    assert "memory:" not in said()
    found = said("mlp-chunks")
    assert "that may be counted on h100 -> --mlp-chunks auto" in found
