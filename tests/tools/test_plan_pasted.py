"""`plan -- A WHOLE COMMAND`: the doctor, the step as it stands, and with our flags. (fast tier)"""

import json
import shlex
from typing import Any

import pytest

from megatron_burst.tools.arguments.plan import parser
from megatron_burst.tools.model import model_of
from megatron_burst.tools.plan import answer, command, pasted
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.pasted import Pasted, as_it_stands
from megatron_burst.tools.plan.ranking import Candidate
from tests.tools.conftest import Printed

CONFIGS = Configs.read()
MODEL = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 131072 --swiglu
    --max-position-embeddings 131072 --micro-batch-size 1 --train-iters 10 --lr 1e-4 --bf16
    --use-distributed-optimizer --context-parallel-size 8 --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --normalization RMSNorm
    --untie-embeddings-and-output-weights --disable-bias-linear --tokenizer-type NullTokenizer
    --vocab-size 128256 --mock-data --transformer-impl local --eval-interval 100
    --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion"""
MODEL = " ".join(MODEL.split())
TORCHRUN = "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 8 --nproc-per-node 8"
SCRIPT = "/opt/Megatron-LM/pretrain_gpt.py"
WHOLE = f"{TORCHRUN} {SCRIPT} {MODEL} --cp-comm-type p2p"


def read(command: str, own: str = "--cluster h100") -> Pasted:
    return pasted.read(command.split(), parser().parse_args(own.split()), CONFIGS)


@pytest.mark.parametrize(
    ("start", "own", "gpus", "target"),
    [
        (f"{TORCHRUN} {SCRIPT}", "", 64, (8, 8)),
        (f"{TORCHRUN} {SCRIPT}", "--gpus 16", 16, (2, 8)),
        (f"torchrun --standalone --nproc-per-node 4 {SCRIPT}", "", 4, (1, 4)),
        (f"torchrun --nnodes 2 --nproc-per-node gpu {SCRIPT}", "", 16, (2, 8)),
        (f"torchrun --nnodes $N --nproc-per-node $G {SCRIPT}", "--gpus 64", 64, (8, 8)),
        ("python -m torch.distributed.run --nproc_per_node 8 -m pretrain_gpt", "", 8, (1, 8)),
        ("srun --nodes 4 --export=ALL,A=1 python -u pretrain_gpt.py", "--gpus 32", 32, (4, 8)),
        ("srun torchrun --nnodes 2 --nproc-per-node 8 -m megatron_burst.pretrain", "", 16, (2, 8)),
        ("env A=1 numactl -l python pretrain_gpt.py left over", "--gpus 8", 8, (1, 8)),
    ],
)
def test_what_is_ahead_of_the_flags_is_cut_off(
    start: str, own: str, gpus: int, target: tuple[int, int]
) -> None:
    found = read(f"{start} {MODEL}", f"--cluster h100 {own}")
    assert found.gpus == gpus and found.target == (*target, (9, 0))
    assert found.flags["num-layers"] == "32" and found.flags["vocab-size"] == "128256"
    assert found.flags["global-batch-size"] == max(1, gpus // 8), "a micro-batch a rank"
    assert not {"nnodes", "nproc-per-node", "nodes"} & found.flags.keys()
    assert bool(found.assumed) == (own == "--gpus 16"), "its torchrun starts 64 ranks"


def test_a_machine_without_a_known_gpu_is_this_one() -> None:
    assert read(f"torchrun --nproc-per-node 4 {SCRIPT} {MODEL}", "--cluster cpu").target[2] is None
    assert read(WHOLE, "--cluster gb200").target == (8, 8, (10, 0))
    assert read(WHOLE, "--cluster a800").target == (8, 8, (8, 0))


def test_what_the_command_does_not_say_is_assumed_and_said() -> None:
    words = WHOLE.replace("--vocab-size 128256", "").replace("--recompute-granularity full", "")
    words = words.replace("--seq-length 131072", "")
    found = read(
        f"{words} --recompute-activations", "--cluster h100 --seq-length 1M --documents 8k"
    )
    assert found.assumed == "--vocab-size 128256 is assumed: no tokenizer is read here"
    assert (found.flags["seq-length"], found.flags["documents-mean"]) == (2**20, 8192)
    assert found.flags["recompute-granularity"] == "selective"
    known = read(words.replace("NullTokenizer", "GPT2BPETokenizer"))
    assert known.flags["vocab-size"] == 50257
    padded = read(f"{words} --padded-vocab-size 201088")
    assert model_of(padded.flags).vocabulary == 201088 and "vocab" not in padded.assumed
    assert read(WHOLE.replace("--bf16", "")).assumed.startswith("without --bf16 float32, whose")
    halves = WHOLE.replace("--nnodes 8 --nproc-per-node 8", "--nnodes 16 --nproc-per-node 4")
    assert read(halves).assumed == "nodes of 8 GPUs: its torchrun starts 4 on each"
    packed = read(f"{WHOLE} --dataloader-inter-document-masking")
    assert "dataloader-inter-document-masking" not in packed.flags
    assert packed.assumed.startswith("a sequence is taken for one document")
    assert read(f"{WHOLE} --sft").assumed == packed.assumed
    asked = read(f"{WHOLE} --dataloader-inter-document-masking", "--cluster h100 --search")
    assert asked.flags["dataloader-inter-document-masking"] and not asked.assumed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"-- {WHOLE}", "say --cluster: on which GPUs"),
        (f"--model 7b -- {WHOLE}", "--run and --model are not for a whole command"),
        (f"--cluster h100 -- python {SCRIPT} {MODEL}", "say --gpus: no torchrun in the command"),
        ("--cluster h100 -- python train", "there is no training program in: python train"),
        (f"--cluster h100 -- torchrun --nnodes x {SCRIPT}", "torchrun: --nnodes x is no number"),
        (f"--cluster h100 --seq-length 1M -- {WHOLE}", "1048576 ahead of --, and 131072 behind it"),
    ],
)
def test_a_command_that_cannot_be_read_is_refused(
    words: str, message: str, printed: Printed
) -> None:
    assert message in printed(f"plan {words}", 1)


@pytest.mark.parametrize(
    ("flags", "algorithm", "degree"),
    [
        ({}, "ring", 1),
        ({"cp-comm-type": "p2p"}, "ring", 1),
        ({"cp-comm-type": ["a2a", "a2a"]}, "ulysses", None),
        ({"cp-comm-type": "all_gather"}, "allgather", None),
        ({"cp-comm-type": "a2a+p2p", "hierarchical-context-parallel-sizes": ["4", "2"]}, "ring", 4),
        ({"cp-comm-type": "burst"}, "burst", None),
        ({"context-parallel-algo": "megatron"}, "ring", 1),
        ({"context-parallel-algo": "burst", "burst-head-parallel-size": "2"}, "burst", "2"),
    ],
)
def test_megatrons_attention_is_that_of_a_baseline(
    flags: dict[str, Any], algorithm: str, degree: object
) -> None:
    found = as_it_stands(flags)
    assert found["context-parallel-algo"] == algorithm
    assert found.get("burst-head-parallel-size") == degree
    is_theirs = found["context-parallel-algo"] in ("ring", "allgather")
    assert found.get("burst-grad-dtype") == ("model" if is_theirs else None), "as TE's"


@pytest.mark.parametrize("named", [["p2p", "a2a"], "none"])
def test_attention_that_is_not_one_known_way_is_not_predicted(named: object) -> None:
    with pytest.raises(ValueError, match="layers that differ|is not known: burst"):
        as_it_stands({"cp-comm-type": named})
    heads = {"num-attention-heads": "32", "group-query-attention": True, "num-query-groups": "8"}
    two = {"cp-comm-type": "a2a+p2p", "hierarchical-context-parallel-sizes": ["16", "2"]}
    for flags in ({"cp-comm-type": "a2a", "context-parallel-size": "16"}, two):
        with pytest.raises(ValueError, match="32 query and 8 kv heads .* do not divide by 16"):
            as_it_stands({**heads, **flags})


def test_a_whole_command_has_three_answers(megatron: None, printed: Printed) -> None:
    fused = f"{WHOLE} --cross-entropy-loss-fusion"
    text = printed(f"plan --cluster h100 -- {fused}")
    assert max(map(len, text.splitlines())) <= 100
    lines = text.splitlines()
    assert lines[0].startswith("64 GPUs of h100 (8 x 8), 131072 (128k) tokens, global batch 8")
    assert "doctor, for the cluster: 8 x 8 ranks, GPUs of compute capability 9.0:" in lines
    (stands,) = (line for line in lines if line.startswith("as it stands"))
    (ours,) = (line for line in lines if line.startswith("with our flags  "))
    assert "ring (p2p)" in stands and "all logits" in stands
    assert "burst (a2a)" in ours and "chunked" in ours
    assert f"start: -m megatron_burst.run {SCRIPT}" in lines
    assert "add: --context-parallel-algo burst --lm-head-loss chunked" in lines
    assert "drop: --cp-comm-type p2p --cross-entropy-loss-fusion" in lines
    deferred = read(f"{WHOLE} --defer-embedding-wgrad-compute")
    assert "defer-embedding-wgrad-compute" in pasted.change(deferred).drop, "ours refuses it"
    assert lines[-1].startswith("with our flags a step is ") and " GiB less" in lines[-1]
    assert "what then stops it" not in text


def test_the_answer_is_one_object_in_json(megatron: None, printed: Printed) -> None:
    tight = f"{WHOLE} --seq-length 524288 --max-position-embeddings 524288"
    found = json.loads(printed(f"plan --cluster h100 --json -- {tight}"))
    stands, ours = found["as_it_stands"], found["with_our_flags"]
    assert (stands["fits"], ours["fits"]) == (False, True)
    assert stands["cp_comm_type"] == "p2p" and stands["command"] == tight
    assert found["add"][:4] == "--context-parallel-algo burst --lm-head-loss chunked".split()
    assert "--recompute-offload" in found["add"] and found["drop"] == ["--cp-comm-type", "p2p"]
    words = shlex.split(ours["command"])
    assert words[:8] == [*f"{TORCHRUN} -m".split(), "megatron_burst.run"]
    assert words[8] == SCRIPT and "p2p" not in words and words[-len(found["add"]) :] == found["add"]
    assert not found["errors_with_our_flags"] and not found["assumed"]
    assert not [each for each in found["findings"] if each["level"] == "error"]


def test_attention_is_kept_where_that_fits_and_is_faster(megatron: None) -> None:
    flag = "--recompute-attention-fraction 0"
    found = answer.answer(read(WHOLE))
    unsaid = answer.answer(read(WHOLE.replace("--vocab-size 128256", "")))
    assert unsaid.kept and [each.check for each in unsaid.left] == ["validation"], "another error"
    kept, text = json.loads(found.as_json())["and_attention_kept"], "\n".join(found.lines())
    assert isinstance(found.ours, Candidate) and kept["fits"]
    assert SCRIPT in kept["command"] and kept["command"].endswith(flag)
    assert found.kept and found.kept.time.seconds < found.ours.time.seconds
    assert f"\nfor attention kept, also add: {flag}\n" in text and "\nand attention kept  b" in text
    long = WHOLE.replace("131072", "524288").replace("128256", "1000")  # they find no room
    long += " --position-embedding-type rope"
    without = WHOLE.replace("--recompute-granularity full", "")  # nothing is recomputed
    refused = f"{WHOLE} --distribute-saved-activations --tensor-model-parallel-size 2"
    for words in (long, without, f"{WHOLE} {flag}", refused):
        found = answer.answer(read(words))
        assert found.kept is None and "attention kept" not in "\n".join(found.lines()), words


def test_a_command_of_ours_stays_as_it_is(megatron: None) -> None:
    ours = "--context-parallel-algo burst --lm-head-loss chunked"
    asked = read(f"{TORCHRUN} -m megatron_burst.pretrain_gpt {MODEL} {ours}")
    found = answer.answer(asked)
    text = "\n".join(found.lines())
    assert found.stands == found.ours and "it has our flags" in text
    assert "start: " not in text and "the command with our flags" not in text
    assert "with our flags a step is as fast, a GPU holds 0.0 GiB less" in text


def test_what_cannot_be_predicted_or_run_says_why(megatron: None, printed: Printed) -> None:
    words = f"plan --cluster h100 -- {WHOLE} --reset-attention-mask"
    text = printed(words)
    assert "what then stops it, by the doctor:\n  error    validation: " in text
    text = printed(f"{words} --fp16")
    assert "as it stands: --fp16 True cannot be predicted here" in text
    assert "with our flags: --fp16 True cannot be predicted here" in text
    assert "it has our flags" not in text and "what then stops it" not in text


def test_a_variable_that_megatron_wants_is_set(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    bare, said = WHOLE.removeprefix(f"{name}=1 "), f"\nenvironment: {name}=1\n"
    assert said not in "\n".join(answer.answer(read(bare)).lines()), "it is in the environment"
    monkeypatch.delenv(name)
    assert said not in "\n".join(answer.answer(read(WHOLE)).lines())
    ours = "-m megatron_burst.pretrain_gpt --context-parallel-algo burst --lm-head-loss chunked"
    for words in (bare, f"{name}=8 {bare}", f"torchrun --nproc-per-node 8 {ours} {MODEL}"):
        found = answer.answer(read(words))
        text = "\n".join(found.lines())
        command = json.loads(found.as_json())["with_our_flags"]["command"]
        assert said in text and command.startswith(f"{name}=1 torchrun")
        assert f"\n{name}=1 torchrun" in text and command.count(name) == 1 and not found.left
    assert not pasted.change(read(bare, "--cluster gb200")).environment


def test_a_variable_that_megatron_refuses_is_dropped(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name)
    sharded = f"{WHOLE} --use-megatron-fsdp --ckpt-format fsdp_dtensor"
    found = answer.answer(read(sharded))
    assert any("FSDP requires" in each.text for each in found.findings or ()) and not found.left
    assert f"\nenvironment: not {name}=1\n" in "\n".join(found.lines())
    assert found.change.of_command(found.pasted)[0] == "torchrun"


def test_segments_that_expand_are_asked_for(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody has said what torch's memory does, or Megatron would refuse them."""
    name, other = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    monkeypatch.delenv(name)
    assert pasted.change(read(WHOLE)).environment == {name: "expandable_segments:True"}
    none = pasted.change(read(f"{WHOLE} --cuda-graph-impl none"))
    assert name in none.environment
    refused = "--use-nccl-ub", "--cuda-graph-impl local"
    for words in (
        *(f"{each}=x:1 {WHOLE}" for each in (other, name)),
        *(f"{WHOLE} {x}" for x in refused),
    ):
        assert not pasted.change(read(words)).environment, words


@pytest.mark.parametrize(
    "before", ["", "srun --nodes 8 ", "docker run --gpus all IMAGE ", "A=1 ", "A=1 srun --nodes 8 "]
)
def test_variables_stand_before_what_reads_them(
    megatron: None, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A container and a job on other nodes do not have those of this shell."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    asked = read(f"{before}{WHOLE.removeprefix('CUDA_DEVICE_MAX_CONNECTIONS=1 ')}")
    words = shlex.join(pasted.change(asked).of_command(asked))
    needs_env = "env " * (before not in ("", "A=1 "))
    whole = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert words.startswith(f"{before}{needs_env}"), words
    assert words.index(whole) < words.index("torchrun") and words.count(whole) == 1


def test_a_command_of_ours_is_told_the_allocators_variable_alone(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    ours = "--context-parallel-algo burst --lm-head-loss chunked"
    found = answer.answer(read(f"{TORCHRUN} -m megatron_burst.pretrain_gpt {MODEL} {ours}"))
    text = "\n".join(found.lines())
    assert "\nenvironment: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" in f"{text}\n"
    assert "it has our flags" in text and "the command with our flags" not in text


def test_without_megatron_the_rest_is_answered(
    monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setattr(answer.importlib.util, "find_spec", lambda name: None)
    text = printed(f"plan --cluster h100 -- {WHOLE}")
    assert "  megatron-core is not installed here" in text and "ring (p2p)" in text


def test_what_fits_nowhere_ends_with_status_1(megatron: None, printed: Printed) -> None:
    words = f"{TORCHRUN.replace('8', '1', 1)} {SCRIPT} {MODEL} --seq-length 67108864"
    said = printed(f"plan --cluster h100 --json -- {words}", 1)
    assert "nothing fits: at least" in said


def test_sizes_are_searched_for_a_whole_command(printed: Printed) -> None:
    words = f"plan --cluster h100 --search --fractions 0 1 --json --top 2 -- {WHOLE}"
    rows = json.loads(printed(words))
    assert rows and all(row["context"] == 8 for row in rows), "sizes that are given stay"
    assert "--cp-comm-type" not in rows[0]["command"] and "--num-layers 32" in rows[0]["command"]


def test_what_is_assumed_of_a_command_is_said_where_its_sizes_are_searched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_predict", lambda *_: None)
    words = WHOLE.replace("--vocab-size 128256", "")
    for asked in ("--search", "--ladder"):
        command.main(f"--cluster h100 {asked} -- {words}".split())
        assert "--vocab-size 128256 is assumed" in capsys.readouterr().err
