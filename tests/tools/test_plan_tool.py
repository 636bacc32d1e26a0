"""The planner: time and memory counted by hand, and held against measurements. (fast tier)"""

import json
from dataclasses import replace
from itertools import batched, combinations
from typing import Any

import pytest

from megatron_burst.config import BurstConfig
from megatron_burst.plans.choice.degree import degrees
from megatron_burst.tools.arguments.plan import parser
from megatron_burst.tools.command import main
from megatron_burst.tools.flags import Flags, parsed, whole
from megatron_burst.tools.model import model_of
from megatron_burst.tools.options import split_at_dashes
from megatron_burst.tools.plan import command, memory, step, timing
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.ranking import rank
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.search import Wish, _savings, search, sizes
from megatron_burst.tools.plan.workload import Workload
from tests.tools.conftest import Printed

CONFIGS = Configs.read()
HEADS, DIM, TOKENS = 4, 8, 512


def cluster(**changes: float) -> Cluster:
    rates = dict.fromkeys(("forward_rate", "backward_rate", "linear_rate", "memory_rate"), 1e12)
    given = dict(
        name="by hand",
        gpus_per_node=4,
        memory=1e9,
        **rates,
        within_rate=1e9,
        nic_rate=1e8,
        gpus_per_nic=1,
        contention=0.0,
        copy_rate=float("inf"),
        peak=1e12,
    )
    return Cluster(**{**given, **changes})


def workload(machine: Cluster, ranks: int, **config: object) -> Workload:
    flags = {"num-layers": 1, "hidden-size": HEADS * DIM, "num-attention-heads": HEADS}
    flags |= {"vocab-size": 100, "make-vocab-size-divisible-by": 1}
    return Workload(
        model=model_of(flags | {"untie-embeddings-and-output-weights": True}),
        cluster=machine,
        gpus=ranks,
        tensor=1,
        context=ranks,
        tokens=TOKENS * ranks,
        config=BurstConfig(**config),
        recompute=False,
    )


def test_without_messages_a_pass_is_its_kernels_and_sums() -> None:
    free = workload(cluster(within_rate=float("inf")), 4, algorithm="ring")
    forward, again, backward = timing.attention_passes(free)
    assert again == timing.Pass()
    for each in (forward, backward):
        # Ranks of a ring add up unequal numbers of rows.
        assert each.seconds == pytest.approx(each.kernels + each.sums, rel=0.01)
    # Causal pairs of the sequence, shared by four ranks; 2 products forward, 5 backward.
    pairs = 4 * TOKENS * (4 * TOKENS + 1) / 2 / 4
    assert forward.kernels == pytest.approx(4 * pairs * HEADS * DIM / 1e12, rel=1e-3)
    assert backward.kernels == pytest.approx(2.5 * forward.kernels)


def test_messages_that_take_longer_than_computing_are_what_a_flat_ring_waits_for() -> None:
    slow = workload(cluster(gpus_per_node=2), 4, algorithm="ring", grad_dtype="model")
    forward, _, backward = timing.attention_passes(slow)
    block = 2 * TOKENS * HEADS * DIM * 2  # K and V in bfloat16
    # Three hops, all as slow as that over the card: the last tile is computed after them.
    assert forward.seconds == pytest.approx(3 * block / 1e8, rel=0.02)
    # Reads, and gradients a step behind them on the same card, and the last on its way home.
    assert backward.seconds == pytest.approx(6 * block / 1e8, rel=0.02)
    assert forward.sent == 3 * block and backward.sent == 6 * block


def test_a_double_ring_sends_one_block_over_the_card_while_the_node_works() -> None:
    slow = workload(cluster(gpus_per_node=2), 4, algorithm="ring", topology="double")
    forward, _, _ = timing.attention_passes(slow)
    block = 2 * TOKENS * HEADS * DIM * 2
    within = block / 1e9
    # The last block of the other node comes a hop later, and is computed with.
    tile = forward.kernels / 4 + forward.sums / 4
    assert forward.seconds == pytest.approx(block / 1e8 + within + tile, rel=0.02)


def test_an_all_to_all_is_waited_for() -> None:
    load = workload(cluster(), 4, algorithm="ulysses")
    forward, _, _ = timing.attention_passes(load)
    sent = 4 * TOKENS * HEADS * DIM * 2 * 3 // 4  # of q, k, v and the output, three quarters
    assert forward.sent == sent
    repacked = 4 * (sent * 4 // 3)  # all of it is read and written, before and after
    assert forward.exposed == pytest.approx(sent / 1e9 + repacked / 1e12)


def test_a_part_of_the_forward_runs_again() -> None:
    def again(fraction: float | None, **recompute: Any) -> float:
        layout = {"layout": "segmented-zigzag"} if fraction == 0.5 else {}
        config = {"algorithm": "burst", "recompute_fraction": fraction, **layout}
        load = replace(workload(cluster(), 4, **config), **recompute)
        forward, second, _ = timing.attention_passes(load)
        return second.kernels / forward.kernels

    of_attention = frozenset({"core_attn"})
    for more in ({"recompute": True}, {"selective": of_attention}):
        assert [again(part, **more) for part in (None, 1, 0)] == [1, 1, 0]
        assert again(0.5, **more) == pytest.approx(0.25, rel=0.01)
    assert again(None, selective=frozenset({"mlp"})) == 0


def test_memory_is_counted_part_by_part() -> None:
    load = replace(workload(cluster(), 4, algorithm="ring"), recompute=True)
    found = memory.predict(load)
    parameters = 32 * (4 * HEADS * DIM) + 2 * 32 * 128 + 2 * 32 * 100
    assert found.weights == 2 * parameters and found.gradients == 4 * parameters
    assert found.optimizer == 12 * parameters // 4
    assert found.inputs == TOKENS * 32 * 2 and found.saved == 0
    sharded = memory.predict(replace(load, zero3=True, gradient_bytes=2))
    assert sharded.weights == sharded.gradients == 2 * parameters // 4 and sharded.gathered
    whole = memory.predict(replace(load, sharded=False))
    assert whole.optimizer == 12 * parameters, "without --use-distributed-optimizer"
    kept = replace(load, config=replace(load.config, recompute_fraction=0.0))
    attention = replace(kept, recompute=False, selective=frozenset({"core_attn"}))
    for each in (kept, attention):
        assert memory.predict(each).saved == TOKENS * HEADS * (DIM * 2 + 4)
    logits = memory.predict(whole_loss := replace(load, chunked_loss=False))
    assert logits.loss == TOKENS * (100 * 6 + 2 * 32 * 2)
    two = memory.predict(replace(whole_loss, model=replace(load.model, mtp=2)))
    assert two.loss == logits.loss + 2 * TOKENS * 100 * 4, "float32 softmax of each of MTP's heads"
    stored = memory.predict(replace(load, recompute=False)).inputs
    # Norms and sums; q, k, v and the output; the MLP's two products.
    assert stored == TOKENS * 2 * (4 * 32 + 4 * HEADS * DIM + 2 * 128)
    # A second pass of attention starts from q, k and v before rotary, whose v it has already.
    assert memory.predict(attention).inputs == stored + TOKENS * 2 * 2 * HEADS * DIM
    fsdp = memory.predict(replace(load, zero3=True))
    assert fsdp.gathered == 2 * (2 * 32 * 100 + 2 * (parameters - 2 * 32 * 100))  # all of it
    halved = replace(load, offload=0.5)
    assert memory.predict(halved).optimizer == found.optimizer // 2
    assert memory.host_bytes(halved) == 4 * 16 * parameters // 4 // 2
    hosted = replace(load, recompute_offload=True, cluster=cluster(host_memory=1.0))
    assert memory.host_bytes(hosted) == 4 * TOKENS * 32 * 2 and memory.lacks(hosted) == "host"


FLAGS: Flags = {
    **CONFIGS.model("7b"),
    "seq-length": 131072,
    "bf16": True,
    "use-distributed-optimizer": True,
    "recompute-granularity": "full",
    "lm-head-loss": "chunked",
    "context-parallel-size": 16,
}
AWARE: dict[str, Any] = {"use-precision-aware-optimizer": True}


@pytest.mark.parametrize(
    ("pattern", "replays"), [("*-*-", False), ("*-*-*", False), ("-*-*", True), ("*-*-|-*-*", True)]
)
def test_mlps_are_replayed_where_a_layer_is_behind_them(pattern: str, replays: bool) -> None:
    """In chunks, and in checkpoints of two layers of each part."""
    flags = {**FLAGS, "hybrid-layer-pattern": pattern, "context-parallel-size": 8}
    flags |= {"pipeline-model-parallel-size": 1 + ("|" in pattern), "global-batch-size": 2}
    assert workload_of(flags, CONFIGS.cluster("a800"), 16).replays_mlps == replays


def test_only_the_distributed_optimizer_is_sharded() -> None:
    single = {name: value for name, value in FLAGS.items() if name != "bf16"}
    machine = CONFIGS.cluster("a800")
    sharded = workload_of(single, machine, 16)
    whole = workload_of({**single, "use-distributed-optimizer": False}, machine, 16)
    assert (sharded.sharded, whole.sharded) == (True, False)
    wide = workload_of({**FLAGS, "use-distributed-optimizer": False}, machine, 16)
    assert memory.predict(wide).optimizer == 12 * wide.model.parameters
    optimizers = [memory.predict(load).optimizer for load in (sharded, whole)]
    assert optimizers[1] == pytest.approx(16 * optimizers[0])
    assert step.weights_seconds(whole, 0.0) > step.weights_seconds(sharded, 0.0)
    # Float32 gradients go twice, or once and 16-bit weights once.
    free = replace(machine, host_rate=float("inf"))
    mixed = replace(whole, cluster=free, element_bytes=2, gradient_bytes=4, offload=True)
    twice, once = (step.weights_seconds(replace(mixed, sharded=s), 0.0) for s in (False, True))
    assert twice / once == pytest.approx(8 / 6)


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({}, 12),
        ({"bf16": False}, 8),
        (AWARE, 10),
        (AWARE | {"exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "fp8"}, 5),
        (AWARE | {"fp8-recipe": "blockwise"}, 12),
        (AWARE | {"use-megatron-fsdp": True}, 12),
        (AWARE | {"optimizer-cpu-offload": True, "optimizer-offload-fraction": 0.5}, 6),
    ],
)
def test_a_precision_aware_optimizer_keeps_what_weights_lack(more: Flags, size: int) -> None:
    """Of a float32 copy 16 bits, where neither Megatron has it nor the host."""
    load = workload_of({**FLAGS, **more}, CONFIGS.cluster("a800"), 16)
    found = memory.predict(load).optimizer
    assert found == pytest.approx(size * load.model.parameters / 16)


def test_narrow_main_gradients_are_those_of_a_precision_aware_optimizer() -> None:
    narrow, machine = {"main-grads-dtype": "bf16"}, CONFIGS.cluster("a800")
    assert workload_of({**FLAGS, **AWARE, **narrow}, machine, 16).gradient_bytes == 2
    with pytest.raises(ValueError, match="bf16 cannot be predicted here: fp32 alone"):
        workload_of({**FLAGS, **narrow}, machine, 16)


def test_ranking_puts_what_fits_first_and_then_the_fastest() -> None:
    found = rank(FLAGS, CONFIGS.cluster("a800"), 16, [0, 1])
    seconds = [each.time.seconds for each in found]
    assert not any(each.lacks for each in found)
    # What is behind may be faster by a tie, no more.
    assert all(each <= 1.02 * min(seconds[i:]) for i, each in enumerate(seconds))
    ways = {(each.name, *each.twins, each.load.head_parallel, each.fraction) for each in found}
    assert len(ways) == len(found)
    names = {name for each in found for name in (each.name, *each.twins)}
    assert {name.split()[0] for name in names} == {"burst", "ring", "allgather", "ulysses"}

    def taken(name: str, fraction: str) -> float:
        (one,) = (
            each.time.seconds
            for each in found
            if name in (each.name, *each.twins)
            and each.load.head_parallel == 1
            and each.fraction == fraction
        )
        return one

    # 8192 tokens a GPU do not hide what a flat ring sends over one card.
    assert taken("burst query double", "0") < taken("burst query flat", "0")
    assert taken("burst query double", "0") < taken("ring double", "0")
    assert taken("ring double", "0") < taken("ring double", "1") < taken("ring flat", "1")
    assert "--nnodes 2" in found[0].command() and "--seq-length 131072" in found[0].command()


def test_heads_are_shared_out_over_nodes_too_as_training_does() -> None:
    flags = {**FLAGS, "context-parallel-size": 32}
    found = rank(flags, CONFIGS.cluster("a800"), 32, [0])
    wanted = {1, *degrees([n // 8 for n in range(32)], *found[0].load.heads), 32}
    assert {each.load.head_parallel for each in found} == wanted and 16 in wanted


def test_a_plan_with_two_names_has_one_row() -> None:
    found = rank(FLAGS, CONFIGS.cluster("a800"), 16, [0, 0.5])
    flat = [e for e in found if e.name == "burst kv flat" and e.load.head_parallel == 1]
    # Over two nodes its gradients return by the chain, as those of the baseline.
    assert flat and {e.twins for e in flat} == {("ring flat",)}
    chosen = [(e, timing.chosen(e.load.ring)[0]) for e in found]
    plans = [(e.load.head_parallel, e.fraction, c.plans(3 % c.tiling.ranks)) for e, c in chosen]
    assert not any(a == b for a, b in combinations(plans, 2))
    # In one node burst sends them straight home, as the kernel made them: other bytes.
    inside = rank({**FLAGS, "context-parallel-size": 8}, CONFIGS.cluster("a800"), 8, [0])
    assert not any(e.twins for e in inside if not e.is_usual)


@pytest.mark.parametrize(
    "more",
    [
        {"burst-memory-mb": 2000},
        {"burst-head-chunks": 2},
        {"burst-head-chunks": 2, "burst-head-parallel-size": 1},
    ],
)
def test_ways_that_cannot_have_what_is_given_are_left_out_or_go_without(more: Flags) -> None:
    flags = CONFIGS.flags_of("_long") | CONFIGS.model("llama3_8b") | more
    flags |= {"seq-length": 65536, "context-parallel-size": 8, "global-batch-size": 1}
    found = rank(flags, CONFIGS.cluster("h100"), 8, (0,))
    assert {each.flags["context-parallel-algo"] for each in found} >= {"burst", "ring"}
    chunks = more.get("burst-head-chunks", 1)
    assert all(e.load.shape.kv_heads % chunks == 0 for e in found if e.is_default)


def test_what_does_not_fit_comes_last_however_fast() -> None:
    machine = CONFIGS.cluster("a800")
    small = {**FLAGS, "seq-length": 65536, "context-parallel-size": 2}
    fast = next(each for each in rank(small, machine, 2, [0]) if each.fraction == "0")
    tight = replace(machine, memory=0.99 * fast.memory.total / 0.92)
    found = rank(small, tight, 2, [0, 0.5, 1])
    assert {each.lacks for each in found} == {"", "GPU"}
    assert not found[0].lacks and found[-1].lacks
    assert found[0].time.seconds > min(each.time.seconds for each in found if each.lacks)
    # Between 0 and 1 the best ways alone are tried.
    assert "0.5" in {each.fraction for each in found}


def test_json_has_every_way_with_its_figures(printed: Printed) -> None:
    found = json.loads(printed("plan --run toy --json --fractions 0"))
    names = [name for e in found for name in (e["algorithm"], *e["predicted_alike"])]
    assert {name.split()[0] for name in names} == {"burst", "ring", "allgather", "ulysses"}
    assert found[0]["fits"] and found[0]["sent_bytes_a_layer"] > 0
    assert found[0]["memory_parts"]["weights"] > 0
    assert sum(each["is_default"] for each in found) == 1
    assert {each["cp_comm_type"] for each in found} >= {"p2p", "a2a", "a2a+p2p", "all_gather"}
    assert sum(found[0]["bounds"].values()) == pytest.approx(1)


def test_json_of_what_does_not_fit_is_printed_and_ends_with_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan --model 14b --cluster a800 --gpus 8 --seq-length 262144 --fractions 0 --json"
    assert main(words.split()) == 1
    shown = capsys.readouterr()
    assert not any(each["fits"] for each in json.loads(shown.out))
    assert "nothing fits: at least" in shown.err and "GiB are needed" in shown.err


UNRANKED = """\

    say --cluster and --gpus, or --run
--cluster x --gpus 8 --model 14b
    there is no cluster x
--model 14b --cluster a800 --gpus 8 --seq-length 262144
    a800 has room for 74: --use-megatron-fsdp
--run toy -- --num-experts 8
    --num-experts 8 has no effect
--run toy -- --tensor-model-parallel-size 3 --sequence-parallel
    4 GPUs do not divide
--run toy -- --recompute-granularity selective --recompute-modules moe gdn
    --recompute-modules gdn cannot be predicted here: core_attn, layernorm, mlp, moe_act
--run toy -- --fp8-format hybrid
    the GPUs of cpu have no FP8
--model llama3_8b --cluster h100 --gpus 8 --seq-length 8k -- --fp8-format hybrid --mlp-chunks 2
    fp8 = hybrid: chunks were not shown to be right
--run toy --gpt -- --pipeline-model-parallel-size 4 --context-parallel-size 1
    --num-layers 2 does not divide over --pipeline-model-parallel-size 4 with 1 part
--run toy --gpt -- --num-layers-per-virtual-pipeline-stage 3
    --pipeline-model-parallel-size 1 with --num-layers-per-virtual-pipeline-stage 3
--run toy --gpt -- --account-for-loss-in-pipeline-split
    cannot be predicted here: stages of as many layers alone are
--run toy -- --hidden-size abc
    --hidden-size abc is not a positive whole
--run toy -- --mtp-num-layers x
    --mtp-num-layers x is not a whole number
--run toy -- --window-size 100,5
    --window-size 100,5 is not LEFT,0
--run toy -- --no-hidden-size
    is not known without --hidden-size
--run toy -- --no-seq-length
    --seq-length is missing
--run toy --seq-length 2052
    -size 4: a multiple of 8 does
--run toy --seq-length 2050 -- --sequence-parallel --context-parallel-size 1 \
--tensor-model-parallel-size 4
    -size 1: a multiple of 4 does
--run toy -- --optimizer-cpu-offload --optimizer-offload-fraction x
    --optimizer-offload-fraction x is not between 0 and 1
--run qwen3_30b_a3b_128k_64gpu_h100 -- --tensor-model-parallel-size 2
    refuses them in their first forward without --sequence-parallel
--run toy -- --expert-tensor-parallel-size 3
    --expert-tensor-parallel-size: 4 ranks of a stage do not divide over 3
--run toy -- --group-query-attention --num-query-groups 3
    it has to divide --num-att
--run toy -- --group-query-attention --num-query-groups 6 --num-attention-heads 12 \
--tensor-model-parallel-size 4 --context-parallel-size 1
    it has to divide --num-att
--run toy -- --num-layers-per-virtual-pipeline-stage 1
    the | of --hybrid-layer-pattern part a HybridModel
--run toy -- --hybrid-layer-pattern *-|*-|*- --pipeline-model-parallel-size 2
    3 parts of --hybrid-layer-pattern do not divide over --pipeline-model-parallel-size 2
--run toy -- --contxt-parallel-size 2
    the nearest is --context-parallel-size
--run toy -- --burst-segments 2
    there is no flag --burst-segments any more
--run toy -- --recompute-granularity selective --recompute-modules
    --recompute-modules names none
--run toy -- --yaml-cfg x.yaml
    --yaml-cfg is not read here
--run llama3_8b_256k_8gpu_h100 -- --recompute-num-layers 1
    --recompute-num-layers 1 cannot be predicted here: 2 alone
--run toy --gpt -- --recompute-num-layers 2
    --recompute-num-layers 2 cannot be predicted here: 1 alone
--run toy -- --hybrid-layer-pattern M-D-
    --hybrid-layer-pattern M-D- is not counted: it has layers D; known are *, -, E, M
--run toy -- --num-layers 4
    --num-layers: a HybridModel has --hybrid-layer-pattern; or give --gpt
--run toy -- --context-parallel-size 2 --global-batch-size 3
    --global-batch-size 3 does not divide over 2 data-parallel
--run toy -- --micro-batch-size 0
    --micro-batch-size 0 is not a positive
--run toy -- --hidden-size 100000000000000000000
    --hidden-size 100000000000000000000 is more than 2147483647
--run toy --seq-length 4096 -- --seq-length 8192
    --seq-length is 4096 ahead of --, and 8192 behind it
--model llama3_8b --cluster h100 --gpus 12 -- --seq-length 8192 --context-parallel-size 4
    12 GPUs are not hosts of 8 each
--run toy -- --optimizer-cpu-offload --use-distributed-optimizer
    Megatron wants --use-distributed-optimizer and --use-precision-aware-optimizer, too
--run toy -- --optimizer-cpu-offload --use-precision-aware-optimizer
    Megatron wants --use-distributed-optimizer and
--model llama3_8b --cluster h100 --gpus 8 --seq-length 8k -- --no-use-distributed-optimizer
    --grad-reduce-in-bf16 without --use-distributed-optimizer cannot be predicted
--run toy -- --moe-layer-recompute
    --moe-layer-recompute True cannot be predicted here: it is --recompute-granularity selective
--run masks-documents
    the mean length of a document: give plan --documents N
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *batched(map(str.strip, UNRANKED.splitlines()), 2),
        (
            "--run toy -- --pipeline-model-parallel-size 4 --context-parallel-size 1",
            "as many layers of attention: *, -; put | between such as have",
        ),
        ("--run toy -- --burst-memory-mb abc", "--burst-memory-mb abc: "),
    ],
)
def test_what_cannot_be_ranked_is_said(words: str, message: str, printed: Printed) -> None:
    assert message in printed(f"plan {words}", 1)


def asked(text: str) -> dict[str, Any]:
    own, rest = split_at_dashes(text.split())
    return command._job(CONFIGS, parser().parse_args(own), parsed(rest or []))[0]


def test_what_a_run_says_can_be_taken_back() -> None:
    words = "--model llama3_8b --cluster h100 --gpus 8 --seq-length 65536 --"
    machine = CONFIGS.cluster("h100")

    def load(more: str) -> Workload:
        return workload_of(asked(f"{words} {more}"), machine, 8)

    usual = load("--bf16")
    assert usual.recompute and usual.chunked_loss and usual.gradient_bytes == 2
    assert load("--accumulate-allreduce-grads-in-fp32").gradient_bytes == 4
    assert not load("--lm-head-loss megatron").chunked_loss
    assert not load("--no-recompute-granularity").recompute
    assert load("--recompute-activations").selective == {"core_attn"}, "Megatron's short form"
    assert "lm-head-memory-mb" not in asked(f"{words} --lm-head-chunk-size 4096")
    selective = asked(f"{words} --recompute-granularity selective")
    ways = rank({**selective, "context-parallel-size": 1}, machine, 1, [0, 1])
    assert "--recompute-method" not in ways[0].command(), "Megatron refuses it there"
    assert {way.fraction for way in ways} == {"0", "1"}, "attention is recomputed"
    assert {"recompute-attention-fraction": 0} in _savings(selective, [0])


def test_a_search_leaves_alone_what_is_taken_back() -> None:
    words = "--model llama3_8b --cluster h100 --gpus 8 --seq-length 1048576 --search --"
    machine, wish = CONFIGS.cluster("h100"), Wish([0])
    assert search(asked(f"{words} --bf16"), machine, 8, wish, 1)[0].load.recompute_offload
    with pytest.raises(ValueError, match="nothing fits"):
        search(asked(f"{words} --no-recompute-offload"), machine, 8, wish, 1)
    short = words.replace("1048576", "16384")
    off = "--no-optimizer-cpu-offload --no-use-megatron-fsdp --no-recompute-offload"
    found = search(asked(f"{short} {off}"), machine, 8, wish, 20)
    assert found and {each.savings for each in found} <= {"-", "MLP"}
    apart = asked(f"{words} --no-sequence-parallel")
    assert not any(each.get("sequence-parallel") for each in sizes(apart, 8))


def test_examples_say_all_that_is_needed() -> None:
    examples = [text for text in parser().examples if "--model" in text]
    assert examples and all(
        whole(asked(text.removeprefix("megatron-burst plan")), "seq-length", 0) for text in examples
    )


def test_another_model_leaves_nothing_of_the_runs_own() -> None:
    flags = asked("--run llama3_8b_256k_8gpu_h100 --model 14b")
    for name in ("group-query-attention", "num-query-groups", "rotary-base"):
        assert name in asked("--run llama3_8b_256k_8gpu_h100") and name not in flags
    assert flags["num-attention-heads"] == CONFIGS.model("14b")["num-attention-heads"]
    assert flags["max-position-embeddings"] == flags["seq-length"] == 262144
    assert "lm-head-memory-mb" not in asked("--run ablation-baseline --model 7b"), "taken back"


def test_every_data_parallel_rank_has_a_sequence_and_the_positions_suffice() -> None:
    flags = asked(
        "--model llama3_8b --cluster h100 --gpus 64 -- --context-parallel-size 8 --seq-length 65536"
    )
    assert (flags["global-batch-size"], flags["max-position-embeddings"]) == (8, 65536)
    assert workload_of(flags, CONFIGS.cluster("h100"), 64).data == 8
    half = {**flags, "context-parallel-size": 4, "global-batch-size": 2}
    assert workload_of(half, CONFIGS.cluster("h100"), 8).data == 2  # in one node


def test_an_all_to_all_runs_again_even_where_all_results_are_kept() -> None:
    kept = {**FLAGS, "recompute-attention-fraction": 0}
    for algorithm, again in (("ulysses", True), ("ring", False)):
        flags = {**kept, "context-parallel-algo": algorithm}
        load = workload_of(flags, CONFIGS.cluster("a800"), 16)
        second = timing.attention_passes(load)[1]
        sent = load.ring.shape.exchange_bytes(load.head_parallel)
        assert (second.sent, second.kernels) == (sent if again else 0, 0.0)
        assert (second.seconds > 0) == again


def test_flags_from_a_command_line_have_their_types() -> None:
    flags = asked("--run toy -- --burst-ranks-per-node 4")
    found = rank(flags, CONFIGS.cluster("h100"), 4, [])
    assert found[0].load.config.ranks_per_node == 4
    set_before, _, _ = found[0].command().partition("torchrun ")
    segments = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert set_before == f"CUDA_DEVICE_MAX_CONNECTIONS=1 {segments} "


def test_a_gpu_must_find_a_place() -> None:
    for size in (3, 6):
        with pytest.raises(ValueError, match="needs as many ranks of a node, of 4, or of several"):
            workload(cluster(), 8, algorithm="ring", head_parallel_size=size)
    with pytest.raises(ValueError, match="nodes of 4 GPUs are not filled evenly"):
        workload_of({**FLAGS, "context-parallel-size": 6}, cluster(), 6)
