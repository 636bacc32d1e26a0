"""Our flags in Megatron's real parser: what they set and what they refuse. (fast tier)"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import logging
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from megatron_burst import BurstConfig
from megatron_burst.config import LmHeadConfig, LmHeadLoss
from megatron_burst.kernels import KERNELS
from megatron_burst.plugin.arguments import (
    add_burst_arguments,
    asks_for_us,
    configure,
    report_dropouts,
)
from megatron_burst.plugin.flags import ENDED, all_flags
from megatron_burst.plugin.limits import (
    LATENT_LIMITS,
    LIMITS,
    LM_HEAD_LIMITS,
    MLP_LIMITS,
    MLP_WORKING,
    OFF,
    WORKING,
)
from megatron_burst.plugin.refusals import refusals
from megatron_burst.plugin.settings import (
    burst_config_from_args,
    checks_files,
    lm_head_config_from_args,
)

megatron_arguments = pytest.importorskip("megatron.training.arguments")
from megatron.core.transformer.enums import (  # noqa: E402
    AttnBackend,
    CudaGraphModule,
    InferenceCudaGraphScope,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import (  # noqa: E402
    MoETransformerLayer,
    TransformerLayer,
)

from megatron_burst.plugin import attach  # noqa: E402
from megatron_burst.plugin.layer_spec import LayerSpecProvider  # noqa: E402
from megatron_burst.plugin.own_models import documents_must_come  # noqa: E402

BURST = "--context-parallel-algo burst --attention-dropout 0 --seq-length 32 "
CHUNKED = "--lm-head-loss chunked "
KEEP = BURST + "--recompute-attention-fraction 0.5 "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
LATENT = f"{BURST} --multi-latent-attention --burst-mla latent "
HYBRID = BURST + "--hybrid-layer-pattern "
SEGMENTED = " --burst-layout segmented-zigzag"
DOCUMENTS = " --dataloader-inter-document-masking"
GDN = BURST + "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
MTP = "--mtp-num-layers 1 --context-parallel-size 2"
BATCHES: Any = SimpleNamespace(cut=None)  # none come


@functools.cache
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    return add_burst_arguments(megatron_arguments.add_megatron_arguments(made))


@pytest.mark.parametrize("name", ENDED)
def test_a_flag_of_before_ends_with_what_to_do(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert asks_for_us([f"{name}=2"]) and name not in parser().format_help()
    for words in ([name], [name, "2"], [f"{name}=2"]):
        with pytest.raises(SystemExit):
            parser().parse_args(words)
        assert f"{name} is no more: {ENDED[name]}" in capsys.readouterr().err


def parse(line: str = "", **settings: Any) -> argparse.Namespace:
    args = parser().parse_args(shlex.split(line))
    vars(args).update(settings)
    return args


def refusal(line: str, **settings: Any) -> str:
    args = parse(line, **settings)
    with pytest.raises(ValueError) as error:
        configure(args)
    return str(error.value)


def test_the_help_shows_the_group_burst_with_every_flag() -> None:
    assert "--context-parallel-algo" in parser().format_help()  # of Megatron's whole parser
    text = add_burst_arguments(argparse.ArgumentParser()).format_help()
    (group,) = re.findall(r"\nburst:\n(.*)", text, re.DOTALL)
    for flag in all_flags():
        assert re.search(rf"\n  {flag.name}\s", group)
        help_text = flag.help.replace("-", "").replace(" ", "")
        assert help_text in re.sub(r"[-\s]", "", group), flag.name
        assert all(value in group for value in flag.values)


def test_without_our_flags_megatron_keeps_its_own_attention() -> None:
    args = parse()
    assert burst_config_from_args(args) is None
    configure(args)
    parser_of_megatron = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser())
    stock = vars(parser_of_megatron.parse_args([]))
    assert {name: getattr(args, name) for name in stock} == stock


@pytest.mark.parametrize("algorithm", ["burst", "ring"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_algorithm_sets_what_megatron_passes_to_every_layer(algorithm: str, ranks: int) -> None:
    args = parse(f"{BURST} --context-parallel-size {ranks} --context-parallel-algo {algorithm}")
    configure(args)
    configure(args)  # the same choice twice is fine
    assert args.cp_comm_type == [algorithm]
    assert args.create_attention_mask_in_dataloader is False


def test_latents_are_refused_where_none_can_be_sent() -> None:
    asked = f"{BURST} --burst-mla latent"
    assert "the model has none: add --multi-latent-attention" in refusal(asked)
    sharded = f"--multi-latent-attention --use-megatron-fsdp {BURST}"
    for line, expected in ((sharded, "heads"), (f"--multi-latent-attention {BURST}", "auto")):
        config = burst_config_from_args(parse(line))
        assert config is not None and config.mla == expected
    spread = f"{asked} --multi-latent-attention --burst-head-parallel-size 2"
    assert "latents have no heads" in refusal(spread)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("", None),
        ("--burst-head-parallel-size auto", None),
        ("--dataloader-inter-document-masking", 1),
        ("--sft", 1),
        ("--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2", 1),
        ("--context-parallel-algo ulysses --sft", None),
        ("--burst-head-parallel-size 2", 2),
        ("--dataloader-inter-document-masking --burst-head-parallel-size auto", 1),
        ("--dataloader-inter-document-masking --burst-head-parallel-size 2", 2),
    ],
)
def test_the_ulysses_degree_is_chosen_later_but_for_documents_and_given_groups(
    line: str, size: int | None
) -> None:
    config = burst_config_from_args(parse(f"{BURST} {line}"))
    assert config is not None and config.head_parallel_size == size


def test_the_flags_become_the_configuration() -> None:
    line = "--context-parallel-algo ring --burst-backward kv --burst-topology flat"
    line += " --burst-kernel cpu --distributed-timeout-minutes 3 --burst-ranks-per-node 4"
    expected = BurstConfig(
        algorithm="ring",
        backward="kv",
        topology="flat",
        ranks_per_node=4,
        kernel="cpu",
        timeout_seconds=180.0,
    )
    assert burst_config_from_args(parse(line)) == expected


@pytest.mark.parametrize(
    ("line", "own_entry", "elsewhere"),
    [
        ("", True, False),
        ("--burst-check-files on", True, True),
        ("--burst-check-files off", False, False),
    ],
)
def test_files_are_checked_by_our_own_entry_alone_unless_asked_for(
    line: str, own_entry: bool, elsewhere: bool
) -> None:
    args = parse(line)
    found = [checks_files(args, own_entry=own) for own in (True, False)]
    assert found == [own_entry, elsewhere]
    args.burst_check_files = "yes"
    with pytest.raises(ValueError, match="--burst-check-files yes is unknown; .*: auto, on, off"):
        checks_files(args, own_entry=False)


@pytest.mark.parametrize(
    "line",
    [
        "--sft --window-size 128,0 --attention-dropout 0.1",  # Megatron's own attention
        CHUNKED,
        BURST + CHUNKED,
        BURST + "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        BURST + "--context-parallel-algo ring --burst-topology double --context-parallel-size 4 "
        "--hierarchical-context-parallel-sizes 2 2",
        # Recompute that can keep attention's results.
        KEEP + FULL,
        KEEP + FULL.replace("uniform", "block"),
        KEEP + "--recompute-granularity selective",
        KEEP + "--recompute-granularity selective --disable-bias-linear "
        "--recompute-modules core_attn mlp",
        KEEP + "--recompute-activations",
        BURST + "--window-size 128,0",
        BURST + "--window-size (128,0) --window-attn-skip-freq 4",
        BURST + "--window-size=-1,-1",
        BURST + DOCUMENTS,
        f"{BURST} {SEGMENTED} --context-parallel-size 4",
        f"{BURST} {SEGMENTED} --seq-length 33",  # a rank alone holds any number
        *(f"{BURST} {MTP} {DOCUMENTS} {layout}" for layout in ("", SEGMENTED)),
        f"{BURST} {MTP} {DOCUMENTS} --burst-layout balanced",
        GDN + "--tensor-model-parallel-size 2 --sequence-parallel",
        f"{HYBRID} 'M*-G' {SEGMENTED} {DOCUMENTS} --context-parallel-size 2",
        f"{HYBRID} 'M*G-/*-' {DOCUMENTS} --burst-layout contiguous --context-parallel-size 2",
        f"{HYBRID} 'M*G-' --sft --burst-layout contiguous --context-parallel-size 2",
        GDN + "--sft --context-parallel-size 2",
        f"{HYBRID} '|*-|*E|'",
        f"{HYBRID} 'M*-G|M-' --tensor-model-parallel-size 2 --sequence-parallel",
        f"{HYBRID} '*-*-|*-*-/*-' --num-layers 3 --cp-comm-type" + " burst" * 8,
    ],
)
def test_what_runs(line: str) -> None:
    configure(parse(line))


# Refused values of our own flags and of those that must go with them, above what is said of them.

WRONG_FLAGS = f"""\
--context-parallel-algo brust
    --context-parallel-algo brust is unknown; .*: burst, r
{BURST}--burst-check nan --fp16
    --burst-check nan: the dynamic loss scale of --fp16 makes Inf on purpose: add --loss
{BURST}--profile --use-pytorch-profiler --profile-step-end 4 --train-iters 3
    --profile-step-end 4 is beyond --train-iters 3: a profiler that is not stopped
{BURST}--distributed-timeout-minutes 0
    --distributed-timeout-minutes must be positive and finite, got 0
{BURST}--context-parallel-algo ulysses --num-attention-heads 12 --tensor-model-parallel-size 2 \
--context-parallel-size 4
    6 query and 6 kv heads of a rank, after tensor parallelism, .* over 4 ranks
{BURST}--burst-head-parallel-size 4 --num-attention-heads 24 --group-query-attention \
--num-query-groups 6 --context-parallel-size 4 --tensor-model-parallel-size 2
    12 query and 3 kv heads of a rank, after tensor parallelism, .* over 4 ranks
{BURST}--burst-head-chunks 4 --burst-head-parallel-size 2 --num-attention-heads 32 \
--group-query-attention --num-query-groups 8 --context-parallel-size 4 \
--tensor-model-parallel-size 2
    --burst-head-chunks 4 does not divide the 2 kv heads of a rank
{BURST}--burst-head-parallel-size 3 --context-parallel-size 4
    --burst-head-parallel-size 3 does not divide --context-parallel-size 4
{BURST}--burst-head-parallel-size 4 --context-parallel-size 4 \
--hierarchical-context-parallel-sizes 2 2
    --burst-head-parallel-size 4 must divide the 2 ranks of a node that \
--hierarchical-context-parallel-sizes 2 2 gives
--burst-mla heads --burst-check nan --recompute-offload
    --burst-mla heads, --recompute-offload True, --burst-check nan has no effect under \
--context-parallel-algo megatron; add --context-parallel-algo burst
{BURST}--hierarchical-context-parallel-sizes 2 2 2 --context-parallel-size 8
    --hierarchical-context-parallel-sizes 2 2 2: a double ring takes two sizes
{BURST}--hierarchical-context-parallel-sizes 2 2 --burst-ranks-per-node 2
    say the same: drop one
{BURST}--context-parallel-algo ring --hierarchical-context-parallel-sizes 2 2
    2 2 needs a double ring: take --burst-topology double
{BURST}--cp-comm-type ring ulysses
    --cp-comm-type ring ulysses contradicts
{BURST}--cp-comm-type burst ulysses
    burst ulysses: layers run burst, as .* says, or one of Megatron.s own .*, not ulysses
--cp-comm-type burst
    --cp-comm-type burst needs --context-parallel-algo burst
{KEEP}
    0.5 has no effect where Megatron does not recompute attention: add --recompute-gr
{KEEP}--recompute-granularity selective --recompute-modules mlp
    0.5 has no effect where Megatron does not recompute attention
{KEEP}{FULL}--distribute-saved-activations
    --distribute-saved-activations replaces: drop one of them
{BURST}{FULL}--recompute-attention-fraction 1.5
    within 0 and 1, got 1.5
{BURST}--recompute-offload
    --recompute-offload has no effect where Megatron recomputes no whole layers: add
{BURST}--recompute-granularity selective --recompute-attention-fraction 1 --recompute-offload
    --recompute-offload has no effect where Megatron recomputes no whole layers: add
{BURST}--recompute-activations --recompute-modules core_attn mlp
    --recompute-modules mlp: .* calls itself .*: add --disable-bias-linear
{BURST}--recompute-granularity selective --recompute-modules layernorm core_attn
    --recompute-modules layernorm: Megatron asks TransformerEngine
{BURST}--context-parallel-size 4 --seq-length 40 --burst-layout segmented-zigzag
    2 segments, each divisible by 2 x 4 ranks = 8, got 20 tokens
{HYBRID}D-M-
    D in the pattern D-M-: DeepSeek sparse .*: take [+] .* or drop --cont
{HYBRID} '*-' {SEGMENTED} --sft --context-parallel-size 2
    equal work: drop --burst-layout seg
{BURST}{SEGMENTED} --context-parallel-size 2 --logits-save-dir F
    not of --burst-layout seg
{HYBRID}'*-||*-/*-'
    without layers in the pattern [*]-[|][|][*]-/[*]-: .* drop its
{HYBRID}'*G' --tensor-model-parallel-size 2
    G .* over 2 tensor-.*: add --sequence-parallel
{GDN}--tensor-model-parallel-size 2
    G .* over 2 tensor-.*: add --sequence-parallel
{GDN}--mtp-num-layers 1
    1: .* has no MTP beside gated_delta_net: take --hybrid-layer
--lm-head-loss chunky
    --lm-head-loss chunky is unknown; .*: megatron, chunked
{CHUNKED}--lm-head-chunk-size 4 --lm-head-memory-mb 5
    --lm-head-chunk-size 4 and --lm-head-memory-mb 5 both say how large a chunk is: drop
{CHUNKED}--lm-head-chunk-size 0
    --lm-head-chunk-size must be positive and finite, got 0
--lm-head-memory-mb 512
    --lm-head-memory-mb 512 has no effect under --lm-head-loss megatron; add --lm-head-lo
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *itertools.batched(map(str.strip, WRONG_FLAGS.splitlines()), 2),
        *(
            (f"{ours} --{name}-parallel-size 0", f"--{name}-parallel-size must be positive and")
            for ours in (BURST + "--num-attention-heads 4", CHUNKED)
            for name in ("context", "tensor-model", "pipeline-model")
        ),
        (
            BURST + "--burst-kernel flash9",
            "--burst-kernel flash9 is unknown; there are: auto, " + ", ".join(KERNELS),
        ),
        (
            BURST.replace("32", "36") + "--context-parallel-size 4",
            "2 x 4 ranks = 8, got 36 tokens; change --seq-length or --context-parallel-size",
        ),
        *(
            (f"{BURST}--window-size={size}", r"window_size = \(.*: .*pass --window-size")
            for size in ("128,128", "-2,0", "1")
        ),
    ],
)
def test_what_our_flags_cannot_be_is_refused(line: str, message: str) -> None:
    assert re.search(message, refusal(line))


MIXED = BURST + "--num-layers 3 --context-parallel-size 2 --cp-comm-type burst "


def test_devs_local_layers_get_no_name() -> None:
    """They refuse every one but all_gather; without one ours runs the algorithm of the flag."""
    dev = {"fallback_to_eager_attn": False, "transformer_impl": "local"}
    args = parse("--num-layers 2 --context-parallel-algo ring", **dev)
    configure(args)
    assert args.cp_comm_type == [None]
    mixed = BURST + "--num-layers 2 --cp-comm-type burst p2p --spec my_spec layers"
    assert "know all_gather alone: give no --cp-comm-type" in refusal(mixed, **dev)


def transformer_engine_is(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: found if name == "transformer_engine" else find_spec(name, *more),
    )


def test_megatrons_own_attention_beside_ours_has_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = MIXED + "p2p burst "
    transformer_engine_is(monkeypatch, object())
    configure(parse(line))
    for flag, value in (
        ("--burst-layout", " segmented-zigzag"),
        ("--burst-block-mask", f" {saved_mask(tmp_path, 8)}"),
        ("--dataloader-inter-document-masking", ""),
        ("--sft", ""),
    ):
        text = refusal(line + flag + value)
        assert re.search(rf"burst p2p burst cannot run this:\n  layers with p2p .*{flag}", text)
    transformer_engine_is(monkeypatch, None)
    text = refusal(line)
    assert "layers with p2p need TransformerEngine, which is not installed: name burst" in text
    configure(parse(line + "--context-parallel-size 1"))
    configure(parse(line + "--spec my_spec layers"))  # whose classes may need nothing


def test_megatrons_context_parallelism_says_that_it_needs_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformer_engine_is(monkeypatch, None)
    text = refusal("--context-parallel-algo megatron --context-parallel-size 2")
    assert "--context-parallel-size 2 needs TransformerEngine" in text
    assert re.search(r"install transformer-engine\[pytorch\]==\d", text)
    assert "--context-parallel-algo burst" in text
    configure(parse("--context-parallel-algo megatron"))  # one rank needs nothing
    transformer_engine_is(monkeypatch, object())
    args = parse("--context-parallel-size 2 --cp-comm-type a2a")
    configure(args)
    assert args.cp_comm_type == ["a2a"]


# Windows, documents, block masks and layouts.


def saved_mask(tmp_path: Path, blocks: int) -> str:
    file = tmp_path / "blocks.npy"
    numpy.save(file, numpy.eye(blocks, dtype=bool))
    return str(file)


def test_a_block_mask_is_read_and_must_divide_the_sequence(tmp_path: Path) -> None:
    configure(parse(BURST + f"--burst-block-mask {saved_mask(tmp_path, 8)}"))
    text = refusal(BURST + f"--burst-block-mask {saved_mask(tmp_path, 7)}")
    assert "32 tokens do not divide into the block mask's 7 blocks" in text
    assert "--seq-length or --burst-block-mask" in text
    assert "no.npy: [Errno 2] No such" in refusal(BURST + f"--burst-block-mask {tmp_path}/no.npy")
    text = refusal(f"--burst-block-mask {saved_mask(tmp_path, 8)}")
    assert "has no effect under --context-parallel-algo megatron" in text


def test_samples_that_experts_could_not_tell_apart_are_refused() -> None:
    line = BURST + "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss "
    line += "--micro-batch-size 2 "
    for flag in ("--dataloader-inter-document-masking ", "--sft "):
        text = refusal(line + flag + "--context-parallel-size 2")
        assert "over 2 ranks" in text and "pass --micro-batch-size 1 instead of 2" in text
        for passes in ("", "--context-parallel-size 2 --micro-batch-size 1"):
            configure(parse(line + flag + passes))
    planned = line + "--dataloader-inter-document-masking --overlap-moe-expert-parallel-comm "
    assert "one sequence in a schedule plan, which cannot tell" in refusal(planned)
    configure(parse(planned + "--micro-batch-size 1"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--position-embedding-type mrope", "mrope: it cannot follow {}: drop one of them"),
        (
            "--multi-latent-attention --position-embedding-type rope",
            "MLA's cannot follow {}: pass --no-rope-fusion",
        ),
        ("--multi-latent-attention --position-embedding-type rope --no-rope-fusion", None),
        ("--multi-latent-attention", None),  # Megatron has no rotary embeddings to fuse
        ("--position-embedding-type rope", None),
    ],
)
def test_rotary_embeddings_that_cannot_follow_the_tokens(flags: str, message: str | None) -> None:
    configure(parse(BURST + flags))  # in zigzag, without documents
    moved = {DOCUMENTS: "dataloader_inter_document_masking", SEGMENTED: SEGMENTED.strip()}
    for more, why in moved.items():
        if message is None:
            configure(parse(BURST + flags + more))
        else:
            assert message.format(why) in refusal(BURST + flags + more)


# What of Megatron our parts cannot honour: those that ask, and their limits.
LIMITED = [
    (BURST, "--context-parallel-algo burst", LIMITS, WORKING),
    (CHUNKED, "--lm-head-loss chunked", LM_HEAD_LIMITS, WORKING),
    (LATENT, "--burst-mla latent", LATENT_LIMITS, WORKING),
    ("--mlp-chunks 2 ", "--mlp-chunks", MLP_LIMITS, MLP_WORKING),
]
# Megatron-LM's own script sets the first after parsing; later Megatrons have the others.
SET_LATER = {"modelopt_enabled", "logit_dtype"}
LATER_FLAGS = {"--output-logit-dtype"}


@pytest.mark.parametrize(("ours", "what", "limits", "working"), LIMITED)
def test_a_limit_is_refused_with_its_value_its_reason_and_the_flag(
    ours: str, what: str, limits: dict[str, str], working: dict[str, tuple[Any, ...]]
) -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert limits.keys() <= {*fields, *vars(parse()), *SET_LATER}
    flags = {*parser()._option_string_actions, *LATER_FLAGS}
    for name, reason in limits.items():
        assert {*re.findall(r"--[\w-]+", reason)} <= flags, name
        said = refusal(ours, **{name: 2})
        assert said == f"{what} cannot run this:\n  {name} = 2: {reason}"
        configure(parse(**{name: 2}))  # Megatron's own has no such limit
        for value in working.get(name, OFF):
            configure(parse(ours + "--cuda-graph-modules moe_router", **{name: value}))


@pytest.mark.parametrize("flag", ["--recompute-granularity selective", "--recompute-activations"])
def test_modules_that_chunks_recompute_are_refused(flag: str) -> None:
    text = refusal(f"--mlp-chunks 2 --recompute-modules mlp core_attn {flag}")
    assert "--recompute-modules mlp: chunks recompute it: drop it there" in text


def test_what_the_script_has_set_since_is_refused_before_the_model_is_built() -> None:
    args = parse(BURST)
    configure(args)
    model_config = SimpleNamespace(transformer_layer_spec=None, pre_wrap_hooks=[])
    build = attach._with_burst_spec(lambda args: model_config, BATCHES)
    args.rank, args.modelopt_enabled = 1, True
    with pytest.raises(ValueError, match="modelopt_enabled = True: ModelOpt builds") as refused:
        build(args)
    assert "cannot run what --use-checkpoint-args or the script has set" in str(refused.value)
    args.modelopt_enabled = False
    assert isinstance(build(args).transformer_layer_spec, LayerSpecProvider)


OURS = BURST, "--lm-head-loss chunked ", "--mlp-chunks auto "
INSTANCES = "--use-megatron-fsdp --num-distributed-optimizer-instances=2"


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--use-megatron-fsdp --optimizer-cpu-offload", "its first step ends with an error: drop"),
        ("--use-megatron-fsdp --swiglu --save=there", "cannot save them in float32"),
        ("--use-megatron-fsdp --fp16", "where a rank has no part of a weight: take --bf16"),
        ("--use-megatron-fsdp --pipeline-model-parallel-size=2", "know no stages: drop one"),
        (INSTANCES, "sums no gradients between them: add --overlap-grad-reduce"),
        (f"{INSTANCES} --outer-dp-sharding-strategy=optim", "by the norm of one instance"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy=optim_grads "
            "--mtp-use-repeated-layer --recompute-method=uniform",
            "sums gradients of that layer wrongly: take --recompute-method block",
        ),
        (
            "--use-torch-fsdp2 --mtp-use-repeated-layer --recompute-method=uniform",
            "sums gradients of that layer wrongly: take --recompute-method block",
        ),
        ("--use-torch-fsdp2 --calculate-per-token-loss", "Megatron scales no gradient under"),
        ("--use-torch-fsdp2 --load=there", "loads no step of Adam"),
        ("--optimizer=sgd --load=there", "Megatron loads no momentum of torch_dist"),
        ("--ckpt-format=torch_dcp --save=there", "can save but not load it"),
    ],
)
def test_what_fails_in_megatron_beside_sharded_weights_is_refused(
    ours: str, flags: str, reason: str
) -> None:
    assert reason in refusal(ours + flags)
    configure(parse(flags))  # Megatron's alone
    for flag in flags.split():
        configure(parse(ours + flag))


DEPRECATED = {"local": "--enable-cuda-graph", "transformer_engine": "--external-cuda-graph"}


@pytest.mark.parametrize("flag", ["--cuda-graph-modules", "--cuda-graph-scope"])
@pytest.mark.parametrize("impl", DEPRECATED)
def test_cuda_graphs_without_attention_run_and_others_are_refused(impl: str, flag: str) -> None:
    line = f"{BURST} --cuda-graph-impl {impl} "
    configure(parse(f"{line} {flag} moe_router"))
    configure(parse(f"{line} {flag} moe_router moe_preprocess mamba"))
    for wrong in ("attn", "mamba attn", "full", "full_iteration"):
        text = refusal(f"{line} {flag} {wrong}")
        assert f"cuda_graph_modules = {wrong}: a ring cannot be captured" in text
        assert f"with --cuda-graph-impl {impl} name some of m" in text
    assert "cuda_graph_modules = none, the whole layer: " in refusal(line)
    assert f"with --cuda-graph-impl {impl} name" in refusal(BURST + DEPRECATED[impl])


def captured_by_megatron(module: CudaGraphModule, impl: str) -> bool:
    """Whether Megatron's own layers would have attention in the graphs of a module."""
    run: list[str] = []
    config = SimpleNamespace(
        cuda_graph_impl=impl,
        cuda_graph_modules=[module],
        inference_cuda_graph_scope=InferenceCudaGraphScope.layer,
    )
    stand_in = {
        "config": config,
        "is_moe_layer": False,
        "submodules_config": SimpleNamespace(self_attention=object(), mlp=object()),
        "transition_cudagraph_scope": lambda mode: None,
        "offload_module_in_cuda_graph": False,
        "_forward_attention": lambda hidden: (run.append("attention"), None),
        "_forward_mlp": lambda hidden: hidden,
    }
    if impl == "transformer_engine":
        TransformerLayer._te_cuda_graph_capture(SimpleNamespace(**stand_in), object())
        return bool(run)
    layers = []
    for kind in (TransformerLayer, MoETransformerLayer):
        layers.append(SimpleNamespace(**stand_in))
        kind.create_mcore_cudagraph_manager(layers[-1], config)
    return any(hasattr(layer, "cudagraph_manager") for layer in layers)


@pytest.mark.parametrize("impl", DEPRECATED)
def test_attention_is_in_megatrons_graphs_for_the_modules_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, impl: str
) -> None:
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs.CudaGraphManager", lambda c: "whole")
    args = parse(f"{BURST} --cuda-graph-impl {impl}")
    for module in CudaGraphModule:
        args.cuda_graph_modules = [module]
        assert captured_by_megatron(module, impl) == bool(refusals(args)), module


@pytest.mark.parametrize(
    ("line", "dropouts", "said"),
    [
        ("", (0.1, 0.1), ""),
        ("--lm-head-loss chunked", (0.1, 0.1), ""),
        ("--context-parallel-algo burst", (0, 0), "attention hidden"),
        ("--context-parallel-algo ring --hidden-dropout 0.3", (0, 0.3), "attention"),
        (BURST, (0, 0), "hidden"),
        (BURST + "--hidden-dropout 0", (0, 0), ""),
        ("--attention-dropout 0.2", (0.2, 0.1), ""),
    ],
)
def test_dropouts_that_are_not_given_are_0_with_our_attention_and_said(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    dropouts: tuple[float, float],
    said: str,
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_burst"), "propagate", True)
    caplog.set_level(logging.INFO, "megatron_burst")
    args = parse(line)
    configure(args)
    assert (args.attention_dropout, args.hidden_dropout) == dropouts
    report_dropouts(args)
    report_dropouts(args)  # no more
    assert caplog.messages == [
        f"--{name}-dropout is 0: it was not given; without our attention 0.1"
        for name in said.split()
    ]


def test_attention_dropout_of_a_checkpoint_is_left_out_its_hidden_dropout_kept() -> None:
    """Megatron takes both from it, whatever the flags say."""
    args = parse(BURST + "--use-checkpoint-args")
    configure(args)
    args.rank, args.attention_dropout, args.hidden_dropout = 1, 0.1, 0.2
    seen = []

    def gpt_config(args: argparse.Namespace) -> SimpleNamespace:
        seen.append((args.attention_dropout, args.hidden_dropout))
        return SimpleNamespace(transformer_layer_spec=None, pre_wrap_hooks=[])

    attach._with_burst_spec(gpt_config, BATCHES)(args)
    assert seen == [(0.0, 0.2)]
    args.use_checkpoint_args, args.attention_dropout = False, 0.1
    with pytest.raises(ValueError, match=r"attention_dropout = 0.1: .*pass --attention-dropout 0"):
        attach._with_burst_spec(gpt_config, BATCHES)(args)


class Script(torch.nn.Module):
    """A model as a script calls it: by its forward, or for a plan."""

    def forward(self, packed_seq_params: Any = None) -> None: ...

    def build_schedule_plan(self, packed_seq_params: Any = None) -> None: ...


@pytest.mark.parametrize("flag", ["--dataloader-inter-document-masking", "--sft"])
def test_a_script_that_leaves_documents_out_is_told_so(flag: str) -> None:
    """As upstream's pretrain_gpt.py does where it asks for a plan."""
    args, model = parse(BURST + flag), Script()
    configure(args)
    for hook in attach._parts(args, BATCHES)[1]:
        if getattr(hook, "func", None) is documents_must_come:
            hook([model])
    for call in (model, model.build_schedule_plan):
        with pytest.raises(ValueError, match=f"^{flag}: this script gives the model no documents"):
            call()
    model.eval()()
    model.train()(packed_seq_params=object())


def test_all_reasons_come_at_once() -> None:
    text = refusal(
        BURST + "--reset-attention-mask --log-max-attention-logit --attention-backend local"
    )
    named = re.findall(r"^  (\w+) = ", text, re.MULTILINE)
    assert named == ["reset_attention_mask", "log_max_attention_logit", "attention_backend"]


@pytest.mark.parametrize("backend", sorted(AttnBackend.__members__))
def test_a_choice_among_megatrons_kernels_is_refused(backend: str) -> None:
    reasons = refusals(parse(BURST + f"--attention-backend {backend}"))
    assert len(reasons) == (backend != "auto")
    assert all("drop --attention-backend" in reason for reason in reasons)


# The LM head and its loss.


def test_the_flags_become_the_settings_of_the_lm_head() -> None:
    assert lm_head_config_from_args(parse()) is None
    assert lm_head_config_from_args(parse("--lm-head-loss megatron")) is None
    for line, expected in (
        (CHUNKED, LmHeadConfig(loss=LmHeadLoss.CHUNKED)),
        (CHUNKED + "--lm-head-chunk-size 7", LmHeadConfig(loss="chunked", chunk_size=7)),
        (CHUNKED + "--lm-head-memory-mb 64", LmHeadConfig(loss="chunked", memory_mb=64)),
    ):
        assert lm_head_config_from_args(parse(line)) == expected


@pytest.mark.parametrize("documents", ["--dataloader-inter-document-masking", "--sft"])
def test_mtp_on_documents_in_chunks_needs_our_attention(documents: str) -> None:
    """That is known from the command line, whose user has no hooks to append."""
    line = f"{CHUNKED}--mtp-num-layers 2 {documents} "
    with pytest.raises(ValueError, match="take --context-parallel-algo burst, or drop one of them"):
        lm_head_config_from_args(parse(line + "--context-parallel-size 2"))
    for fine in ("", "--context-parallel-size 2 --context-parallel-algo burst"):
        assert lm_head_config_from_args(parse(line + fine)) is not None


@pytest.mark.parametrize("ranks", [1, 2])
def test_mtp_over_ranks_mixes_no_hidden_states(ranks: int) -> None:
    line = f"{BURST}--mtp-num-layers 2 --context-parallel-size {ranks}"
    found = refusals(parse(line, mtp_hsm=True))  # a flag of Megatron's main
    assert ("drop --mtp-hsm" in "".join(found)) == (ranks == 2)
