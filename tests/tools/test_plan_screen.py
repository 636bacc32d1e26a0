"""What `plan` prints: 100 columns, the default, Megatron's names, ties, and what to set. (fast)"""

import shlex
import subprocess
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from megatron_burst.plans.choice.machine import MACHINES
from megatron_burst.tools.plan import screen, usual
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.ranking import Candidate, at_its_sizes, in_order, rank
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.savings import lacking
from megatron_burst.tools.plan.usual import ALONE, P2P, as_trained
from tests.tools.conftest import Printed

CONFIGS = Configs.read()
H100 = CONFIGS.cluster("h100")
FLAGS = CONFIGS.flags_of("_long") | CONFIGS.model("llama3_8b") | {"seq-length": 131072}
ASKED = "plan --model llama3_8b --cluster h100 --gpus 64 --seq-length 128k"
ON_HOST = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}


def ranked(gpus: int, context: int, **more: Any) -> list[Candidate]:
    given = {name.replace("_", "-"): value for name, value in more.items()}
    sizes = {"context-parallel-size": context, "global-batch-size": gpus // context}
    return rank(FLAGS | sizes | given, H100, gpus, [0, 1])


@pytest.fixture(scope="module")
def on_64() -> list[Candidate]:
    return ranked(64, 8)


@pytest.mark.parametrize(
    "more",
    [
        "-- --context-parallel-size 8",
        "--top 3 -- --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 32",
        "--search --fractions 0 1 -- --context-parallel-size 16",
        "--documents 8k --top 3 --fractions 0 -- --context-parallel-size 8 --burst-layout balanced",
    ],
)
def test_the_screen_is_read_on_100_columns(more: str, printed: Printed) -> None:
    text = printed(f"{ASKED} {more}")
    long = [line for line in text.splitlines() if len(line) > 100]
    assert not long
    first, second, *_ = text.splitlines()
    assert first.startswith("64 GPUs of h100 (8 x 8), 131072 (128k) tokens, ")
    assert second == "memory: 73.6 of a GPU's 80 GiB may be counted, 1713 of a host's 1862"
    assert "\nagainst p2p: " in text and "against a2a: " in " ".join(text.split())
    assert "\n* what --context-parallel-algo burst alone takes; " in text
    assert sum(line.startswith("* ") for line in text.splitlines()) >= 2, "a row, and the legend"


def test_what_all_rows_have_alike_is_said_once(printed: Printed) -> None:
    text = printed(f"{ASKED} -- --context-parallel-size 8")
    heading = next(line for line in text.splitlines() if "attention  " in line)
    assert "global batch 8" in text and "all rows: TP 1, CP 8, DP 8\n" in text
    assert not {"TP", "batch", "host", "NIC"} & {*heading.split()}
    told = " ".join(text.split())
    assert "host: GiB" not in told and "GPU: GiB of a GPU; sent: MiB that a rank" in told
    assert "MFU: of the bfloat16 peak, 989 TFLOP/s" in told


def test_every_column_of_a_search_is_explained_or_named(printed: Printed) -> None:
    text = " ".join(printed(f"{ASKED} --search --fractions 0 1").split())
    assert "batch: global batch size, 8.03" in text
    assert "left out, in --json: " in text and "saved by: what saves memory" in text


def test_the_default_has_a_row_and_its_command_has_one_flag(on_64: list[Candidate]) -> None:
    (default,) = (each for each in on_64 if each.is_default)
    assert (default.name, default.fraction) == ("burst", "1")
    assert default.load.head_parallel == 8, "as training chooses it"
    words = shlex.split(default.command())
    assert words[-2:] == ["--context-parallel-algo", "burst"]
    assert not [word for word in words if "recompute-attention" in word or "head-para" in word]
    assert "ulysses" in default.twins and screen.shown(default) == "burst = ulysses (a2a)"
    first = on_64[0]
    assert first.is_usual and first.command().endswith("burst --recompute-attention-fraction 0")


def test_the_default_is_in_the_table_however_short(printed: Printed) -> None:
    text = printed(f"{ASKED} --top 1 --fractions 0 -- --context-parallel-size 8")
    assert [line[:1] for line in text.splitlines() if " (a2a) " in line] == [" ", "*"]


@pytest.mark.parametrize(
    ("more", "degree"),
    [
        ({}, 8),
        ({"window-size": "4095,0"}, 1),
        ({"dataloader-inter-document-masking": True, "documents-mean": 8192}, 1),
        ({"burst-topology": "flat"}, 1),
        ({"burst-head-parallel-size": 2}, 2),
        ({"burst-head-chunks": 2}, 4),  # of 8 KV heads a rank has two
        ({"window-size": "0,0"}, 1),
        ({"context-parallel-algo": "ring"}, 1),
        ({"context-parallel-size": 1, "global-batch-size": 8}, 1),
    ],
)
def test_the_degree_is_the_one_that_training_takes(more: dict[str, Any], degree: int) -> None:
    load = workload_of({**FLAGS, "context-parallel-size": 8, **more}, H100, 8)
    assert as_trained(load).head_parallel == degree
    unknown = replace(load, cluster=replace(H100, gpu=""))
    assert as_trained(unknown).head_parallel == degree, "taken for an H100, as in training"


def test_tensor_parallel_ranks_share_nics_in_what_is_chosen_too() -> None:
    """As `BurstContext` has it: with TP 4 two GPUs of an A800's NIC send the same."""
    more = {"context-parallel-size": 4, "tensor-model-parallel-size": 4, "seq-length": 8192}
    load = workload_of(
        {**FLAGS, **more, "sequence-parallel": True}, Configs.read().cluster("a800"), 16
    )
    with mock.patch.object(usual, "choose_degree", return_value=(1, "")) as chosen:
        as_trained(load)
    assert chosen.call_args.args[-1] == MACHINES["A800"].shared_by(4)


def test_a_way_has_the_name_that_megatron_gives_it() -> None:
    found = ranked(16, 16)
    names = {each.name: each.cp_comm_type for each in found}
    assert names["burst query double"] == names["ring double"] == ""
    assert names["allgather"] == "all_gather"
    rings = [e for e in found if "ring flat" in (e.name, *e.twins)]
    assert {(e.load.head_parallel, e.cp_comm_type) for e in rings} >= {(1, "p2p"), (4, "a2a+p2p")}
    for ranks, name in ((8, "a2a"), (16, "")):  # which copies no KV heads, of which there are 8
        (whole,) = (
            each
            for each in ranked(ranks, ranks)
            if "ulysses" in (each.name, *each.twins) and each.fraction == "0"
        )
        assert whole.cp_comm_type == name and at_its_sizes(whole, P2P).cp_comm_type == "p2p"


def test_ties_are_broken_by_the_default_then_by_what_is_needed(on_64: list[Candidate]) -> None:
    first, second, third, *_ = on_64

    def timed(each: Candidate, seconds: float, **attention: Any) -> Candidate:
        of_layer = each.time.attention._replace(**attention)
        time = each.time._replace(tokens_per_gpu=1 / seconds, attention=of_layer)
        return replace(each, time=time)

    usual, fast = timed(first, 1.019), timed(second, 1.0)
    assert in_order([fast, usual]) == [usual, fast]
    slow = timed(first, 1.021)
    assert in_order([slow, fast]) == [fast, slow], "no tie"
    fewer = timed(third, 1.01, sent=1)
    assert in_order([fast, fewer]) == [fewer, fast]
    hidden = timed(third, 1.01, sent=fast.time.attention.sent, sums=1e9)
    assert in_order([fast, hidden]) == [hidden, fast]
    offered = replace(fast, load=replace(fast.load, recompute_offload=True))
    assert offered.host_bytes and in_order([offered, fast]) == [fast, offered]
    alone = timed(offered, 1.0, sent=0)  # on fewer ranks, whose inputs have to leave the GPU
    assert in_order([alone, fast]) == [fast, alone]
    selective = replace(offered, load=replace(offered.load, recompute=False))
    assert "inputs" in offered.savings and "inputs" not in selective.savings


def test_the_last_line_compares_with_megatrons_ways(
    on_64: list[Candidate], printed: Printed
) -> None:
    first = on_64[0]
    base, default = at_its_sizes(first, P2P), at_its_sizes(first, ALONE)
    (row,) = (e for e in on_64 if (e.cp_comm_type, e.fraction) == ("p2p", "1"))
    assert base.time.attention.sent < row.time.attention.sent, "gradients of 2 bytes"
    gain = f"{base.time.seconds / first.time.seconds - 1:.0%} faster"
    text = screen.against(first, default)
    assert text.startswith(f"against p2p: first row {gain}, * ")
    assert text.endswith("* as fast"), "as a2a is what the default takes"
    assert screen.against(default, default).count("faster") == 1
    tight = replace(H100, memory=(base.memory.total - 2**30) / 0.92)
    least = replace(first, load=replace(first.load, cluster=tight))
    assert screen.against(least, least).startswith(
        "against p2p: does not fit, 1.0 GiB of a GPU are missing; "
    )
    narrow = ranked(8, 8, burst_grad_dtype="model")
    assert "do not divide" not in screen.against(narrow[0], narrow[0]), "ulysses takes no dtype"
    uneven = ranked(64, 64)[0]
    assert "against a2a: its KV heads do not divide over" in screen.against(uneven, uneven)
    alone = "plan --model toy --cluster cpu --gpus 1 --seq-length 256"
    assert printed(alone).splitlines()[-1].endswith("these sizes have no context parallelism")


@pytest.mark.parametrize(
    ("gpus", "more", "bound"),
    [
        (8, {}, "computing"),
        (16, {"pipeline_model_parallel_size": 8, "global_batch_size": 1}, "pipeline bubble"),
        (8, {**ON_HOST, "seq_length": 8192}, "host"),
    ],
)
def test_what_bounds_a_step_is_said(gpus: int, more: dict[str, Any], bound: str) -> None:
    stages = more.get("pipeline_model_parallel_size", 1)
    found = ranked(gpus, gpus // stages, **{"global_batch_size": 1, **more})[0].bounds
    assert max(found, key=found.__getitem__) == bound
    assert sum(found.values()) == pytest.approx(1) and min(found.values()) > -1e-9


def test_slow_links_bound_a_step_by_messages() -> None:
    slow = replace(H100, within_rate=1e8)
    found = rank({**FLAGS, "context-parallel-size": 8}, slow, 8, [1])[0]
    assert max(found.bounds, key=found.bounds.__getitem__) == "messages"


def test_the_command_is_one_line_in_json_and_several_on_the_screen(on_64: list[Candidate]) -> None:
    command = on_64[0].command()
    lines = screen.wrapped(command).splitlines()
    assert len(lines) > 1 and all(line.endswith(" \\") for line in lines[:-1])
    assert max(map(len, lines)) <= 100
    assert shlex.split(screen.wrapped(command).replace("\\\n", "")) == shlex.split(command)
    starts = {line.split()[0][0] for line in lines[1:]}
    assert starts == {"-"}, "a flag and its values stay on a line"


@pytest.mark.parametrize("number", ["RANK_OF_NODE", "FIRST_NODE"])
def test_a_node_without_its_number_is_told_what_is_missing(
    number: str, on_64: list[Candidate]
) -> None:
    head = on_64[0].command().partition(" --nproc-per-node")[0].replace("torchrun", "echo")
    settings = {"RANK_OF_NODE": "3", "FIRST_NODE": "a"} | {number: ""}
    done = subprocess.run(["bash", "-c", head], env=settings, capture_output=True, text=True)
    text = {"RANK_OF_NODE": "number of this node, 0 to 7", "FIRST_NODE": "host name of node 0"}
    assert done.returncode and f"{number}: {text[number]}" in done.stderr
    settings = {"RANK_OF_NODE": "3", "FIRST_NODE": "a"}
    done = subprocess.run(["bash", "-c", head], env=settings, capture_output=True, text=True)
    assert done.stdout.split()[-4:] == ["--node-rank", "3", "--master-addr", "a"]


ASKED_FOR = "plan --model 14b --cluster a800 --gpus 8 --fractions 1"
WHOLE = "--tensor-model-parallel-size 8 --context-parallel-size 1"


@pytest.mark.parametrize(
    ("words", "advised", "kept_back"),
    [
        ("--seq-length 256k", "for 74: --use-megatron-fsdp --ckpt-format", "--mlp-chunks"),
        ("--seq-length 256k -- --no-recompute-granularity", "--recompute-granularity full", "FSDP"),
        ("--seq-length 64M", "a larger --tensor-model-parallel-size", "--recompute-granularity"),
        (f"--seq-length 64M -- {WHOLE}", "more GPUs", "a larger"),
        (f"--seq-length 64M -- {WHOLE} --mlp-chunks 4", "more GPUs", "--mlp-chunks"),
        ("--search --seq-length 64M", "GPUs would do", "--recompute-granularity"),
        (
            "--search --seq-length 64M -- --no-recompute-granularity",
            "larity full, or more mem",
            "-",
        ),
    ],
)
def test_where_nothing_fits_what_is_set_is_not_advised(
    words: str, advised: str, kept_back: str, printed: Printed
) -> None:
    error = printed(f"{ASKED_FOR} {words}", 1)
    assert "nothing fits: at least" in error and advised in error
    assert kept_back == "-" or kept_back not in error


def test_savings_that_are_set_or_there_by_default_are_not_lacking() -> None:
    def names(**given: Any) -> list[str]:
        flags = {name.replace("_", "-"): value for name, value in given.items()}
        flags = {"recompute-granularity": "full", "use-distributed-optimizer": True, **flags}
        return [next(iter(saving)) for saving in lacking(flags)]

    first, *others = names()
    assert first == "lm-head-loss" and "burst-head-chunks" not in others
    assert names(lm_head_loss="megatron", burst_head_chunks=1)[:4] == [
        *("lm-head-loss", "recompute-offload", "mlp-chunks", "burst-head-chunks")
    ]
    on = {"lm_head_loss": "chunked", "recompute_offload": True, "mlp_chunks": "4"}
    assert "recompute-offload" not in names(recompute_granularity="selective")
    assert names(use_distributed_optimizer=False)[0] == "use-distributed-optimizer"
    assert names(use_distributed_optimizer=False, use_megatron_fsdp=True)[0] == "lm-head-loss"
    assert names(**on) == ["use-megatron-fsdp", "optimizer-cpu-offload"]
