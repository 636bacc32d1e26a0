"""Models beside dense GPTs, and the search over sizes: by hand and by what it finds. (fast)"""

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_burst.loss.chunk_size import MIB, Sizes, choose
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.tools.flags import hybrid_form, parsed
from megatron_burst.tools.gpu_check.stage import Device
from megatron_burst.tools.live_bytes import LiveBytes
from megatron_burst.tools.model import Part, model_of
from megatron_burst.tools.plan import measure, memory, savings, step, timing
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.ranking import candidate, unchosen
from megatron_burst.tools.plan.reading import loss_chunking, workload_of
from megatron_burst.tools.plan.scans import said_of_scans, sent_for_scans, taken_by_scans
from megatron_burst.tools.plan.search import Wish, _kernel_seconds, _schedules, search, sizes
from megatron_burst.tools.plan.states import gathered, states
from megatron_burst.tools.plan.working_set import working_set
from megatron_burst.tools.plan.workload import Workload
from megatron_burst.transport import ports as ports_of_here
from tests.tools.conftest import Printed
from tests.transport.test_groups import torchrun_node
from tests.workers import Team, WorkerPool

CONFIGS = Configs.read()
RATES = ("forward_tflops", "backward_tflops", "linear_tflops", "memory_gb_s", "host_gb_s")
H100 = CONFIGS.cluster("h100")
FLAGS = CONFIGS.flags_of("_long") | {"seq-length": 32768, "global-batch-size": 8}


def load_of(model: str, gpus: int, **flags: object) -> Workload:
    given = {name.replace("_", "-"): value for name, value in flags.items()}
    return workload_of(FLAGS | CONFIGS.model(model) | given, H100, gpus)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("deepseek_v3", 685, 38), ("qwen3_30b_a3b", 30.5, 3.3), ("nemotron_h_8b", 8.1, 8.1)],
)
def test_sizes_are_those_that_their_makers_name(name: str, billions: float, active: float) -> None:
    model = model_of(CONFIGS.model(name))
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    met = sum(part.count * part.active for part in model.parts.values())
    assert (met + 2 * model.head_parameters) / 1e9 == pytest.approx(active, rel=0.15)


def test_layers_of_a_pattern_are_counted_with_their_mtp_heads() -> None:
    given = CONFIGS.model("nemotron_h_8b") | {"hybrid-layer-pattern": "M-*-|GE*E/*-"}
    given |= {"num-experts": 4, "moe-ffn-hidden-size": 100}
    model = model_of(given)
    counts = {name: part.count for name, part in model.parts.items()}
    expected = {"attention": 3, "mlp": 3, "experts": 2, "mamba": 1, "delta": 1, "mtp": 1}
    assert counts == expected
    experts: Part = model.parts["experts"]
    assert experts.parameters == 4096 * (2 * 4 * 100 + 4) and experts.active == 4096 * (400 + 4)


def test_learned_positions_are_whole_on_every_rank_of_the_first_stage() -> None:
    """Megatron's default; of a million positions of 4096 numbers 2 bytes each, and gradients."""
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    sizes |= {"pipeline_model_parallel_size": 2, "max_position_embeddings": 2**20}
    loads = [
        load_of("llama3_8b", 16, position_embedding_type=kind, **sizes)
        for kind in ("rope", "learned_absolute")
    ]
    for stage, more in ((0, 2**32), (1, 0)):
        rope, learned = (states(load, stage) for load in loads)
        assert learned.weights - rope.weights == learned.gradients - rope.gradients == 2 * more
    unsaid = {n: v for n, v in CONFIGS.model("llama3_8b").items() if "position" not in n}
    unsaid |= {"max-position-embeddings": 2**20}
    assert model_of(unsaid).parameters == loads[1].model.parameters
    assert model_of(unsaid | {"use-rotary-position-embeddings": True}).positions == 0


def test_two_layers_of_a_pattern_have_one_input_and_all_are_gathered() -> None:
    """26 of 52 layers of Nemotron-H. Megatron-FSDP has what is ahead of its layers of any kind.

    The largest MLP, 2 h f, and attention, 2 h (h + k): 5e8 numbers ahead are three of these.
    """
    load = load_of("nemotron_h_8b", 8, context_parallel_size=8, recompute_num_layers=2)
    assert memory.predict(load).inputs == 26 * 4096 * 4096 * 2
    sharded = load_of("nemotron_h_8b", 8, recompute_num_layers=2, use_megatron_fsdp=True)
    layer = 2 * 4096 * 21504 + 2 * 4096 * (4096 + 1024)
    assert gathered(sharded) == 2 * (2 * 4096 * 131072 + (4 + 6) * layer)


def test_latents_travel_where_training_sends_them() -> None:
    flags = {"context_parallel_size": 16, "tensor_model_parallel_size": 8, "burst_topology": "flat"}
    load = load_of("deepseek_v3", 128, sequence_parallel=True, burst_backward="kv", **flags)
    heads = replace(load, config=replace(load.config, mla="heads"))
    latents, wide = (timing.attention_passes(each)[0].sent for each in (load, heads))
    assert wide / latents == pytest.approx(128 // 8 * (192 + 128) / 576)
    latents, wide = (timing.buffer_bytes(each.ring) for each in (load, heads))
    assert wide / latents == pytest.approx(128 // 8 * (192 + 128) / 576)
    shapes = [timing.chosen(each.ring)[1] for each in (load, heads)]
    assert [shape.sends_raw for shape in shapes] == [False, True]  # a product is summed wide


@pytest.mark.parametrize(
    "more",
    [
        {"use_megatron_fsdp": True},
        {"fp8_format": "hybrid"},
        {"recompute_granularity": "selective"},
    ],
)
def test_latents_stay_where_training_sends_none(more: dict[str, object]) -> None:
    flags = {"context_parallel_size": 16, "tensor_model_parallel_size": 8, "burst_topology": "flat"}
    load = load_of("deepseek_v3", 128, sequence_parallel=True, burst_backward="kv", **flags, **more)
    assert timing.chosen(load.ring)[1].latents is None
    with pytest.raises(ValueError, match="--burst-mla latent cannot run this"):
        load_of("deepseek_v3", 16, burst_mla="latent", use_megatron_fsdp=True)


def test_a_pipeline_waits_while_it_fills_and_holds_micro_batches() -> None:
    flat = load_of("llama3_8b", 8, global_batch_size=64)
    deep = load_of("llama3_8b", 8, global_batch_size=64, pipeline_model_parallel_size=4)
    parts = {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2}
    both = load_of("llama3_8b", 8, global_batch_size=64, **parts)
    seconds = [step.predict(each).seconds for each in (flat, deep, both)]
    assert seconds[0] < seconds[2] < seconds[1]
    inputs = [memory.predict(each).inputs for each in (flat, deep, both)]
    # The first of four stages has a quarter of the layers and four micro-batches.
    assert inputs[1] == inputs[0] < inputs[2]


def test_a_stage_has_one_input_of_those_that_are_on_the_host() -> None:
    """Of the last of four stages a quarter of it was counted."""
    stages = {"pipeline_model_parallel_size": 4, "recompute_offload": True}
    load = load_of("llama3_8b", 8, global_batch_size=64, **stages)
    assert {memory._of_stage(load, n).inputs for n in (0, 3)} == {load.hidden_bytes}


def test_stages_of_a_hybrid_model_are_written_into_its_pattern() -> None:
    def written(virtual: int = 1, **flags: object) -> dict[str, Any]:
        given = {name.replace("_", "-"): value for name, value in flags.items()}
        whole = hybrid_form(FLAGS | CONFIGS.model("llama3_8b")) | {"global-batch-size": 64} | given
        way = candidate(whole, H100, 8)
        assert way.load.virtual == virtual
        words = shlex.split(way.command())
        found = parsed(words[words.index("megatron_burst.pretrain") + 1 :])
        assert not any("virtual" in name for name in found), "Megatron refuses them"
        return found

    name, parts = "hybrid-layer-pattern", "num-virtual-stages-per-pipeline-rank"
    assert written()[name] == "*-" * 32
    assert written(pipeline_model_parallel_size=4)[name] == "|".join(["*-" * 8] * 4)
    inner = {"pipeline_model_parallel_size": 4, parts: 2}
    assert written(2, **inner)[name] == "|".join(["*-" * 4] * 8)
    apart = "|".join(["*-" * 8, "*" * 8 + "-" * 8, "-*" * 8, "*-" * 8])
    pipeline = {"pipeline_model_parallel_size": 2, "hybrid_layer_pattern": apart}
    assert written(2, **pipeline)[name] == apart


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("M-*-|-M*-", ""),
        ("M-M-|M-M-", ""),
        ("*-*E|*E*E", ""),  # as `cut` parts it, so that a command that is printed is read again
        ("*-*-*-|*-*-", "*-*-*-, *-*-"),
        ("M-*-|M-M-", "M-*-, M-M-"),
        ("*-*E*E|*E*E", "*-*E*E, *E*E"),
        ("M-*-M-*-/MM", "MTP beside"),  # the layers of its heads are none of a stage's
        ("M-M-/**", "MTP beside"),
    ],
)
def test_parts_of_a_pattern_have_as_many_layers_of_each_kind(pattern: str, reason: str) -> None:
    flags: dict[str, Any] = {"hybrid_layer_pattern": pattern, "pipeline_model_parallel_size": 2}
    flags |= {"recompute_num_layers": 2, "global_batch_size": 64}
    if reason:
        with pytest.raises(ValueError, match=re.escape(reason)):
            load_of("nemotron_h_8b", 8, **flags)
        return
    load = load_of("nemotron_h_8b", 8, **flags)
    assert load.virtual == 1 and memory.predict(load).inputs and not memory.lacks(load)


@pytest.mark.parametrize(("layers", "stages", "each"), [(32, 4, 4), (32, 2, 2), (12, 2, 3)])
def test_parts_of_a_stage_are_counted_by_its_layers(layers: int, stages: int, each: int) -> None:
    parts = {"num_layers_per_virtual_pipeline_stage": each, "num_layers": layers}
    load = load_of("llama3_8b", 8, **parts, pipeline_model_parallel_size=stages)
    assert load.virtual == layers // stages // each


def test_what_bounds_a_search_is_the_pairs_that_a_window_leaves() -> None:
    loads = [load_of("llama3_8b", 8, window_size=text) for text in ("-1,0", "4095,0")]
    full, some = map(_kernel_seconds, loads)
    pairs = 32768 * 32769 / 2, 32768 * 4096 - 4096 * 4095 / 2
    assert some / full == pytest.approx(pairs[1] / pairs[0])


@pytest.mark.parametrize("text", ["4095,0", "(4095, 0)"])
def test_a_window_is_read_as_megatron_reads_it(text: str) -> None:
    assert load_of("llama3_8b", 8, window_size=text).window == 4095


@pytest.mark.parametrize("parallel", [{}, {"sequence-parallel": True}])
def test_chunks_of_the_loss_are_those_that_a_gpu_takes(parallel: dict[str, bool]) -> None:
    given = FLAGS | CONFIGS.model("llama3_8b") | {"tensor-model-parallel-size": 8} | parallel
    given |= {"grad-reduce-in-bf16": True, "lm-head-memory-mb": 256}
    sizes = Sizes(
        tokens=32768,
        vocabulary=129024 // 8,  # padded to 128 x 8
        hidden=4096,
        dtype=torch.bfloat16,
        ranks=8,
        parts=8 if parallel else 1,  # as `apply` has them
        fused=True,
        sums_apart=True,
        kept_apart=True,
    )
    found = choose(sizes, None, 256 * MIB)
    assert loss_chunking(given) == found and found.rows


def test_experts_are_shared_out_and_their_tokens_are_sent() -> None:
    alone, spread = (load_of("qwen3_30b_a3b", 8, expert_model_parallel_size=n) for n in (1, 8))
    model = alone.model
    weights = [memory.predict(each).weights for each in (alone, spread)]
    assert weights[0] - weights[1] == pytest.approx(2 * 7 / 8 * model.expert_parameters, rel=1e-6)
    waits = [step.weights_seconds(each, 0.0) for each in (alone, spread)]
    assert waits[1] < 0.3 * waits[0], "each rank has an eighth of the experts"
    # Each rank updates an eighth of the model either way, and sends as much from the host and back.
    quick = replace(H100, within_rate=math.inf)
    for each in (alone, spread):
        seconds = step.weights_seconds(replace(each, cluster=quick), 0.0)
        assert seconds == pytest.approx(32 * model.parameters / 8 / H100.memory_rate)
        copied = step.host_copies(replace(each, offload=1.0), 0.0, 0.0).seconds
        numbers = model.parameters / 8 * (each.gradient_bytes + 2)
        assert copied == pytest.approx(numbers / H100.host_rate)
    slow = replace(spread, cluster=replace(H100, within_rate=1e9))
    moved = 32768 * 2 * 8 * 2048 * 2 * 7 / 8  # to 8 experts and back, of 8 ranks
    more = step.layers_seconds(slow) - step.layers_seconds(spread)
    passes = 48 * 3  # forward, again, backward
    assert more == pytest.approx(passes * moved * (1e-9 - 1 / H100.within_rate), rel=1e-6)


def test_what_saves_memory_or_time_does() -> None:
    base = load_of("llama3_8b", 8)
    whole = replace(base, recompute=False)
    mlp = replace(whole, selective=frozenset({"mlp"}))
    assert memory.predict(mlp).inputs < memory.predict(whole).inputs
    times = [step.layers_seconds(each) for each in (whole, mlp, base)]
    assert times == sorted(times) and len(set(times)) == 3
    assert step.layers_seconds(replace(base, fp8=True)) < times[2]
    two = replace(base, micro=2, sequences=16)
    attention = [sum(p.seconds for p in timing.attention_passes(x)) for x in (base, two)]
    assert attention[1] == pytest.approx(2 * attention[0], rel=0.01)
    hosted = replace(base, recompute_offload=True)
    assert memory.predict(hosted).inputs < memory.predict(base).inputs
    apart = load_of("llama3_8b", 8, tensor_model_parallel_size=2)
    together = load_of("llama3_8b", 8, tensor_model_parallel_size=2, sequence_parallel=True)
    inputs = [memory.predict(each).inputs for each in (apart, together)]
    assert inputs[0] == 2 * inputs[1]


def test_documents_are_less_work_and_balance_spreads_it() -> None:
    packed = {"dataloader_inter_document_masking": True, "documents_mean": 8192}
    flags = {"context_parallel_size": 8}
    loads = [
        load_of("llama3_8b", 8, **flags),
        load_of("llama3_8b", 8, **flags, **packed),
        load_of("llama3_8b", 8, **flags, **packed, burst_layout="balanced"),
    ]
    whole, uneven, balanced = (timing.attention_passes(each)[0].kernels for each in loads)
    assert balanced < uneven < whole


def test_a_search_finds_what_fits_and_is_no_worse_than_any_way_that_is_tried() -> None:
    given = {name: value for name, value in FLAGS.items() if name != "global-batch-size"}
    found = search(given | CONFIGS.model("llama3_8b"), H100, 8, Wish([0, 1]))
    assert 1 < len(found) <= 10 and not any(each.lacks for each in found)
    rates = [each.time.tokens_per_gpu for each in found]
    assert all(1.02 * rate >= max(rates[i:]) for i, rate in enumerate(rates)), "but for ties"
    usual = load_of("llama3_8b", 8, context_parallel_size=8, recompute_attention_fraction=0)
    assert max(rates) >= step.predict(usual).tokens_per_gpu
    assert "--tensor-model-parallel-size" in found[0].command()


def test_a_search_says_where_it_ends_and_whose_memory_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = FLAGS | CONFIGS.model("llama3_8b") | {"tensor-model-parallel-size": 1}
    hosted = {**given, "recompute-offload": True, "context-parallel-size": 8}
    with pytest.raises(ValueError, match="of a host are needed, and 0 may be counted: more nodes"):
        search(hosted, replace(H100, host_memory=1.0), 8, Wish((1,)))
    monkeypatch.setattr("megatron_burst.tools.plan.search._CLOCKS", 0)
    assert search(given, H100, 8, Wish((1,)))
    assert "--search ends at its limit, after 1 of " in capsys.readouterr().err


def test_heads_are_shared_out_over_nodes_where_the_ranks_allow_it() -> None:
    load = load_of("llama3_8b", 32, context_parallel_size=32)
    assert load.degrees == [1, 2, 4, 8, 16, 32] and load.ranks_per_node == 8
    tried = [way.get("burst-head-parallel-size") for way in _schedules(load)]
    assert tried == [1, 1, 2, 2, 4, 4, 8, 16, None], "double rings within a node alone, and ulysses"


@pytest.mark.parametrize("asked", [(), ("pp",), ("ep",), ("pp", "ep")])
def test_pipelines_and_experts_are_tried_where_they_are_asked_for(asked: tuple[str, ...]) -> None:
    names = {"pp": "pipeline-model-parallel-size", "ep": "expert-model-parallel-size"}
    tried = {name for each in sizes({}, 8, asked) for name in each}
    assert tried & {*names.values()} == {names[short] for short in asked}


def test_stages_with_parts_are_several_and_are_searched() -> None:
    """Megatron refuses parts of one stage, and other numbers of micro-batches than groups have."""
    parts = {"num-virtual-stages-per-pipeline-rank": 2, "context-parallel-size": 1}
    given = FLAGS | CONFIGS.model("llama3_8b") | parts
    with pytest.raises(ValueError, match="2 parts of a stage: Megatron wants several stages"):
        workload_of(given, H100, 8)
    del given["global-batch-size"]
    loads = [
        workload_of({**given, **each}, H100, 8)
        for each in sizes(parts, 8, ("pp",))
        if each.get("pipeline-model-parallel-size")
    ]
    assert {load.pipeline for load in loads} == {2, 4, 8}


def test_a_search_leaves_the_chunks_of_the_loss_to_their_default(printed: Printed) -> None:
    """The default is the least memory with which logits are made once, not a third time."""

    def command(own: str = "") -> str:
        words = "plan --model llama3_8b --cluster h100 --gpus 8 --seq-length 65536 --fractions 0"
        words += " --search --json -- --context-parallel-size 8 --tensor-model-parallel-size 1 "
        return str(json.loads(printed(words + own))[0]["command"])

    assert "--lm-head" not in command().replace("--lm-head-loss chunked", "")
    assert "--lm-head-memory-mb 600" in command("--lm-head-memory-mb 600")
    given = FLAGS | CONFIGS.model("llama3_8b")
    least = {name: value for name, value in given.items() if name != "lm-head-memory-mb"}
    limits = ({"lm-head-memory-mb": 5120}, {}, {"lm-head-memory-mb": 2800})
    chunkings = [loss_chunking(least | limit) for limit in limits]
    assert [each and each.products for each in chunkings] == [3, 3, 5]


@pytest.mark.parametrize("missing", [300, 1200])  # MiB
def test_chunks_of_the_loss_are_smaller_where_else_it_would_not_fit(missing: int) -> None:
    sizes = {"context-parallel-size": 8, "tensor-model-parallel-size": 1, "seq-length": 8192}
    given = {**FLAGS, **CONFIGS.model("llama3_8b"), **sizes, "context-parallel-algo": "ulysses"}
    given |= {"recompute-offload": False, "use-megatron-fsdp": False}  # which would save more
    asked = given | {"lm-head-memory-mb": 5120}
    del given["lm-head-memory-mb"]
    load = workload_of(given, H100, 8)
    usual = memory.predict(load)
    assert usual.loss > usual.layer + 1200 * MIB
    less = replace(H100, memory=(usual.total - missing * MIB) / memory.usable(H100) * H100.memory)
    found = search(given, less, 8, Wish([0]))[0]
    limit = int(found.flags["lm-head-memory-mb"])
    room = (load.loss_bytes + usual.nccl - found.memory.nccl) / MIB - missing
    assert room - 2 < limit <= room
    assert not found.lacks and found.load.head_products == 5  # logits are made three times
    assert f"--lm-head-memory-mb {limit}" in found.command()
    kept = search(asked, less, 8, Wish([0]))
    assert kept and all(each.flags["lm-head-memory-mb"] == 5120 for each in kept), "as it is given"


def test_a_search_goes_on_where_mlps_cannot_be_cut() -> None:
    """It ended with their refusal beside FP8 where a way lacks memory without them."""
    sizes = {"context-parallel-size": 8, "tensor-model-parallel-size": 1, "seq-length": 2**19}
    given = {**FLAGS, **CONFIGS.model("llama3_8b"), **sizes, "fp8-format": "hybrid"}
    found = search(given, H100, 8, Wish([0]))
    assert found and all(each.load.mlp_chunks == 1 for each in found)


def test_flags_of_ours_are_kept_where_a_baseline_does_as_well() -> None:
    """The best row was that of `ulysses`, which takes none of them, under the name of our own."""
    sizes = {"context-parallel-size": 8, "tensor-model-parallel-size": 1, "seq-length": 65536}
    given = {**FLAGS, **CONFIGS.model("llama3_8b"), **sizes, "burst-memory-mb": 20000}
    found = search(given, H100, 8, Wish([0]), 2)
    assert found[0].is_usual and found[0].twins == ("ulysses",)
    assert all(each.flags["burst-memory-mb"] == 20000 for each in found)


def test_what_fits_nowhere_is_told_what_would(printed: Printed) -> None:
    words = "plan --model 70b --cluster h100 --gpus 1 --seq-length 1048576 --search --fractions 0"
    said = printed(words, 1)
    assert "nothing fits: at least " in said and " GPUs would do with as many tokens" in said


def test_hosts_smaller_than_a_node_are_told_where_the_node_ends() -> None:
    flags = FLAGS | CONFIGS.model("llama3_8b") | {"context-parallel-size": 8}
    given = {name: value for name, value in flags.items() if name != "global-batch-size"}
    (best, *_) = search(given, CONFIGS.cluster("gb200"), 8, Wish([0]))
    assert "--nnodes 2" in best.command() and "--burst-ranks-per-node 8" in best.command()
    packed = {"dataloader-inter-document-masking": True, "documents-mean": 8192}
    command = candidate(flags | packed, CONFIGS.cluster("gb200"), 8).command()
    assert "documents-mean" not in command and "--burst-ranks-per-node 8" in command


def test_a_measured_machine_is_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    ports = [("4: ACTIVE", "400 Gb/sec (4X NDR)")] * 4 + [("4: ACTIVE", "25 Gb/sec (1X EDR)")]
    network = [{"name": f"{i}:1", "state": s, "rate": r} for i, (s, r) in enumerate(ports)]
    network += [{"name": "9:1", "state": "1: DOWN", "rate": "800 Gb/sec"}]
    network += [{"name": "eth0", "state": "ACTIVE", "rate": "900 Mb/s"}]
    monkeypatch.setattr(ports_of_here, "network", lambda _: network)
    assert measure.hardware.fastest_ports() == {f"{i}:1": 400.0 for i in range(4)}
    path = tmp_path / "here.toml"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun's
    assert f"--cluster {path}" in printed(f"plan --measure {path}")
    found = CONFIGS.cluster(str(path))
    assert found.name == "here" and found.forward_rate > 0 and found.host_rate > 0
    if not torch.cuda.is_available():
        assert found.gpus_per_node == 2
        assert found.memory == pytest.approx(found.host_memory / 2, rel=0.02)
    assert printed("plan --measure here", 1)
    assert "there is no folder" in printed(f"plan --measure {tmp_path}/none/here.toml", 1)


def timed_messages(team: Team) -> tuple[dict[str, float], list[tuple[str, bool, int]]]:
    """The rates of two nodes of four ranks with two NICs, and every message of this rank."""
    messages: list[tuple[str, bool, int]] = []
    post = dist.batch_isend_irecv

    def noted(operations: list[Any]) -> Any:
        for each in operations:
            messages.append((each.group.group_desc, each.op is dist.isend, each.peer))
        return post(operations)

    with torchrun_node(team.rank // 4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", noted)
        patch.setattr(Device, "seconds", lambda _, run: run() or 1.0 + team.rank)
        found = measure.message_rates(Device(torch.device("cpu"), Path()), 2)
    return found, messages


def test_messages_are_timed_between_ranks_on_the_groups_of_training(workers: WorkerPool) -> None:
    said = [f"burst {channel}" for channel in (Channel.READ_WITHIN, Channel.READ_BETWEEN)]
    for rank, (found, messages) in enumerate(workers.run(range(8), timed_messages)):
        assert found == {"within_gb_s": 2**18 / 8e9, "nic_gb_s": 4 / 2 * 2**18 / 8e9}, "the slowest"
        node, other, place = rank // 4 * 4, (rank + 4) % 8, rank % 4
        ends = [(False, node + (place - 1) % 4), (True, node + (place + 1) % 4)]
        assert messages == [(said[0], *end) for end in ends] + [
            (said[1], False, other),
            (said[1], True, other),
        ]


def test_several_gpus_want_ranks_to_measure(
    monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    torchrun = "torchrun --nproc-per-node gpu -m megatron_burst plan --measure here.toml"
    assert torchrun in printed("plan --measure here.toml", 1)


def test_what_was_measured_is_let_go_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def seconds(_: Device, run: Callable[[], object]) -> float:
        held.append(live.now)
        run()
        return 1.0

    monkeypatch.setattr(Device, "seconds", seconds)
    with LiveBytes() as live:
        measure.measured(torch.device("cpu"))
    attention, _, products, *copies = held
    assert attention == 16 * MIB and products == MIB // 2 and copies == [48 * MIB] * 2


def test_a_cluster_file_is_read_or_said_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measured", lambda device: dict.fromkeys(RATES, 1.0))
    text = measure.cluster_file("two words.v2", torch.device("cpu"))
    assert torch.cuda.is_available() or "# a rank's share of the host: no GPU is here" in text
    assert "# made up: 1.5 x linear_tflops" in text
    assert "# NCCL's memory is not counted without nvlinks, channels and channel_gb_s" in text
    (path := tmp_path / "two words.v2.toml").write_text(text)
    assert CONFIGS.cluster(str(path)).name == "two words.v2"
    path.write_text(text.replace("gpus_per_node", "gpus"))
    with pytest.raises(ValueError, match="has no gpus_per_node"):
        CONFIGS.cluster(str(path))
    path.write_text(re.sub(r"nic_gb_s = .*", "nic_gb_s = 22", text))
    assert CONFIGS.cluster(str(path)).nic_rate == 22e9
    path.rename(tmp_path / "other.toml")
    with pytest.raises(ValueError, match="there is no cluster other; there are: "):
        CONFIGS.cluster(str(tmp_path / "other.toml"))


@pytest.mark.parametrize(
    ("model", "base"),
    [
        *(("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100")),
        *(("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"), ("NVIDIA H200", "h200")),
        *(("NVIDIA H100 PCIe", ""), ("NVIDIA H100 NVL", ""), ("NVIDIA L40S", "")),
    ],
)
def test_a_measured_machine_has_the_links_and_channels_of_its_gpu(
    model: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them NCCL's memory was 0 for it, in silence."""
    monkeypatch.setattr(measure, "measured", lambda device: dict.fromkeys(RATES, 1.0))
    monkeypatch.setattr(measure.hardware, "cpu_model", lambda: model)
    text = measure.cluster_file("here", torch.device("cpu"))
    (path := tmp_path / "here.toml").write_text(text)
    found, known = CONFIGS.cluster(str(path)), CONFIGS.cluster(base) if base else None
    assert ("is not counted" in text) == (known is None)
    assert found.within_rate == found.forward_rate / 1e3 == 1e9, "what was measured stays"
    assert found.nvlinks == (known.nvlinks if known else 0)
    if known is not None:
        assert (found.channels, found.channel_rate) == (known.channels, known.channel_rate)
        assert (found.peak, found.fp8_speedup) == (known.peak, known.fp8_speedup)


def test_how_documents_are_balanced_is_kept_where_all_else_is_chosen() -> None:
    given = {"burst-layout": "balanced", "burst-topology": "flat"}
    assert unchosen(given) == {}
    packed = {"dataloader-inter-document-masking": True}
    assert unchosen(given | packed) == packed | {"burst-layout": "balanced"}


def test_a_model_with_a_pattern_is_planned(printed: Printed) -> None:
    words = "plan --model nemotron_h_8b --cluster h100 --gpus 8 --fractions 0 --top 1 --seq-length"
    pattern = "M-M-M-M*-M-M-|M-M-M*-M-M-M-|M-M*-M-M-M-M-|M*-M-M-M-M-M-"
    found = printed(f"{words} 65536 -- --pipeline-model-parallel-size 4")
    assert f"--hybrid-layer-pattern '{pattern}'" in found


def test_layers_with_a_state_send_the_fewer_bytes_of_their_two_ways() -> None:
    def load(tokens: int, **flags: object) -> Workload:
        given = {"context_parallel_size": 8, "recompute_num_layers": 2, **flags}
        return load_of("nemotron_h_8b", 8, seq_length=8 * tokens, **given)

    # 10 borders of 4096 numbers a token, and in 24 layers 128 heads of 64 channels with 128
    # states of 8 groups: 18560 numbers before the scan, 8192 behind, 10240 under the convolution.
    long = load(16384)
    states = 24 * (7 * 4 * (8192 * 128 + 128) + 3 * 10240 * 2) + 10 * 16384 * 4096 * 2
    heads = 24 * 16384 * (18560 + 8192) * 2 * 7 // 8
    assert sent_for_scans(long) == (states, heads) and taken_by_scans(long) == states
    assert f"{states / 2**20:.4g} MiB where they are passed" in said_of_scans(long)
    assert taken_by_scans(load(512)) == sent_for_scans(load(512)).heads
    assert taken_by_scans(load(16384, burst_layout="zigzag")) == heads
    stay: list[dict[str, object]] = [{"cuda_graph_impl": "local"}]
    stay.append({"overlap_moe_expert_parallel_comm": True})
    assert [taken_by_scans(load(16384, **more)) for more in stay] == 2 * [heads]
    assert taken_by_scans(load(16384, micro_batch_size=2)) == 2 * states
    # All-to-alls of a node: forward, again and backward.
    saved = 3 * (heads - states) / H100.within_rate
    zigzag = load(16384, burst_layout="zigzag")
    assert step.layers_seconds(zigzag) - step.layers_seconds(long) == pytest.approx(saved)


def test_heads_that_do_not_divide_over_the_ranks_are_no_way(printed: Printed) -> None:
    """A step took an infinite time, and our first row was `inf% faster`."""
    words = "plan --model nemotron_h_8b --cluster h100 --gpus 24 --seq-length 96k --fractions 0 --"
    found = printed(f"{words} --context-parallel-size 24")
    assert "rows move, which is taken: their heads do not divide over 24" in " ".join(found.split())
    assert "against p2p: not possible, layers with a state" in found and "inf" not in found
    said = printed(f"{words} --context-parallel-size 24 --burst-layout zigzag", 1)
    assert "in Megatron's zigzag: their heads do not divide over 24" in said


def test_what_tensor_parallelism_does_not_share_out_is_on_every_rank() -> None:
    """DeepSeek-V3's projections down to latents, its layers and MTP's, and 59 routers."""
    everywhere = 62 * 7168 * (1536 + 512 + 64) + 59 * 7168 * 256
    load = load_of("deepseek_v3", 8, tensor_model_parallel_size=8, sequence_parallel=True)
    spread = load.model.parameters - everywhere
    assert states(load, 0).weights == pytest.approx(2 * (everywhere + spread / 8), rel=1e-9)
    assert step._updated(load) == pytest.approx(everywhere + spread / 8, rel=1e-9)


def test_messages_of_gradients_and_weights_are_hidden_where_megatron_is_told_to() -> None:
    """All of 7/8 of the parameters otherwise, 2 bytes of a gradient and 2 of a weight."""
    flags = {"overlap-grad-reduce": False, "overlap-param-gather": False}
    given = FLAGS | CONFIGS.model("llama3_8b") | {"context-parallel-size": 8}
    machine = replace(H100, memory_rate=math.inf)
    loads = [workload_of(given | off, machine, 8) for off in ({}, flags)]
    loads.append(workload_of(given | flags | {"use-megatron-fsdp": True}, machine, 8))
    seconds = [step.weights_seconds(load, 100.0) for load in loads]
    moved = loads[0].model.parameters * 7 / 8 * (2 + 2)
    assert seconds == [0, pytest.approx(moved / H100.within_rate), 0]


def test_a_stage_has_the_experts_of_its_own_layers() -> None:
    """Of 45 layers of experts behind 3 dense ones the last of four stages has 12."""
    flags = {"moe_layer_freq": "[0]*3+[1]*45", "pipeline_model_parallel_size": 4}
    load = load_of("qwen3_30b_a3b", 32, global_batch_size=64, **flags)
    alike = load_of("qwen3_30b_a3b", 32, global_batch_size=64, pipeline_model_parallel_size=4)
    first, last = (states(load, stage).weights for stage in (0, 3))
    assert last - first == pytest.approx(2 * load.model.expert_parameters * 3 / 45, rel=1e-6)
    dense = (load.model.of_rank(1) - alike.model.of_rank(1)) / 4
    assert last == pytest.approx(states(alike, 3).weights + 2 * dense, rel=1e-6)


def test_more_micro_batches_in_a_group_are_in_flight() -> None:
    """Of a first stage of 4, interleaved in 2 parts: (1 x 8 + 2 x 4 - 1) / 2."""
    flags = {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2}
    group = {"microbatch_group_size_per_virtual_pipeline_stage": 8}
    loads = [load_of("llama3_8b", 8, global_batch_size=64, **flags, **g) for g in ({}, group)]
    assert [memory._in_flight(load, 0) for load in loads] == [5.5, 7.5]
    with pytest.raises(ValueError, match="3 micro-batches of a rank do not go in groups of 4"):
        load_of("llama3_8b", 8, global_batch_size=6, **flags)


def test_all_nics_of_a_node_carry_its_ring_of_gradients() -> None:
    """Of 8 GPUs on 4 NICs of 22 GB/s 88 GB/s leave a node, of 8 on 8 of 45 what NVLink has."""
    machine = CONFIGS.cluster("a800")
    flags = FLAGS | CONFIGS.model("llama3_8b") | {"context-parallel-size": 32}
    load = workload_of(flags, machine, 32)
    free = replace(load, cluster=replace(machine, memory_rate=float("inf")))
    own = load.model.parameters
    moved = own * (load.gradient_bytes + 2) * 31 / 32
    assert step.weights_seconds(free, 0.0) == pytest.approx(moved / 88e9)
    halved = replace(free, tensor=4, context=8)
    assert step.weights_seconds(halved, 0.0) == pytest.approx(moved * 28 / 31 / 4 / 22e9)
    wide = replace(free, cluster=replace(free.cluster, gpus_per_nic=1, nic_rate=45e9))
    assert step.weights_seconds(wide, 0.0) == pytest.approx(moved / 160e9)
    # Weights are gathered three times and gradients scattered for each of four micro-batches.
    sharded = replace(free, zero3=True, sequences=4)
    moved = 4 * own * (load.gradient_bytes + 3 * 2) * 31 / 32
    assert step.weights_seconds(sharded, 0.0) == pytest.approx(moved / 88e9)


def experts_of(tensor: int, experts: int, dispatcher: str = "alltoall", **more: int) -> Workload:
    given = {"context-parallel-size": 8 // tensor, "sequence-parallel": tensor > 1}
    given |= {"tensor-model-parallel-size": tensor, "expert-model-parallel-size": experts}
    given |= {"moe-token-dispatcher-type": dispatcher, "recompute-granularity": "selective"}
    more = {name.replace("_", "-"): value for name, value in more.items()}
    return workload_of(FLAGS | CONFIGS.model("qwen3_30b_a3b") | given | more, H100, 8)


def test_ranks_of_an_expert_gather_what_comes_to_it() -> None:
    """Of 8 numbers of a hidden state twice, to and fro: as often again for each further rank."""
    whole = experts_of(2, 4, expert_tensor_parallel_size=1)
    cut, hidden = experts_of(2, 4), whole.model.hidden
    assert (cut.expert_tensor, whole.expert_tensor) == (2, 1)
    assert (cut.expert_shards, whole.expert_shards) == (1, 2)
    tokens = whole.local_tokens // 2  # of a tensor-parallel rank
    more = memory.predict(cut).inputs - memory.predict(whole).inputs
    assert more == pytest.approx(48 * tokens * 2 * 8 * hidden * 2, rel=1e-6)
    experts = whole.model.expert_parameters / 4
    apart = memory.predict(whole).weights - memory.predict(cut).weights
    assert apart == pytest.approx(2 * experts / 2)
    part = whole.model.parts["experts"]
    sent = tokens * 2 * 8 * hidden * 2
    times = [step._exchanged(load, part) for load in (whole, cut)]
    assert times == pytest.approx([sent * 3 / 4 / 360e9, sent * (3 / 4 + 1) / 360e9])


def test_experts_drop_what_their_activations_make_alone() -> None:
    """moe_act: 8 times 768 numbers of a token, nothing of what the dispatcher moves."""
    load = experts_of(1, 8)
    dropped = replace(load, selective=load.selective | {"moe_act"})
    less = memory.predict(load).inputs - memory.predict(dropped).inputs
    assert less == 48 * load.local_tokens * 2 * 8 * 768


def test_a_dispatcher_without_all_to_alls_gathers_every_token() -> None:
    plain = experts_of(2, 4)
    every = experts_of(2, 4, "allgather")
    unsaid = dict(FLAGS | CONFIGS.model("qwen3_30b_a3b"))
    del unsaid["moe-token-dispatcher-type"]
    assert workload_of(unsaid, H100, 8).gathers_tokens, "Megatron's default"
    hidden = plain.local_tokens // 2 * plain.model.hidden * 2
    part = plain.model.parts["experts"]
    assert step._exchanged(every, part) == pytest.approx(2 * 7 * hidden / 360e9)
    assert working_set(every) - working_set(plain) == pytest.approx(8 * hidden, rel=1e-6)
    found = search(FLAGS | CONFIGS.model("qwen3_30b_a3b"), H100, 16, Wish([0], ("ep",)), 1)
    assert "--moe-token-dispatcher-type alltoall" in found[0].command()


def test_experts_wait_for_the_host_or_hide_behind_another_micro_batch() -> None:
    slow = replace(H100, experts_seconds=1.0)
    plain = replace(experts_of(1, 8), cluster=slow)
    fast = replace(plain, cluster=replace(H100, experts_seconds=0.0))
    assert step.layers_seconds(plain) - step.layers_seconds(fast) == pytest.approx(48 * 3)
    hidden = experts_of(1, 8, overlap_moe_expert_parallel_comm=True)
    hidden = replace(hidden, cluster=fast.cluster)
    assert step.layers_seconds(hidden) < step.layers_seconds(fast)


def test_a_host_updates_the_parameters_of_its_gpus() -> None:
    given = FLAGS | CONFIGS.model("llama3_8b") | savings.OPTIMIZER
    for gpus in (4, 8, 16):
        load = workload_of(given | {"context-parallel-size": gpus}, H100, gpus)
        still = replace(load, cluster=replace(load.cluster, update_seconds=0.0))
        more = step.predict(load).seconds - step.predict(still).seconds
        of_host = load.model.parameters / max(1, gpus / 8)
        assert more == pytest.approx(of_host * load.cluster.update_seconds, rel=1e-6)


def test_heads_may_change_places_between_nodes_alone() -> None:
    """With as many tensor-parallel ranks as a node has GPUs no message of theirs is within it."""
    sizes = {"tensor_model_parallel_size": 8, "context_parallel_size": 8}
    load = load_of("70b", 64, sequence_parallel=True, context_parallel_algo="ulysses", **sizes)
    forward = timing.attention_passes(load)[0]
    assert forward.between == forward.sent > 0
