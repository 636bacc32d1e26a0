"""Named runs: Megatron accepts their flags, they fit, series are what they say. (fast tier)"""

import json
from pathlib import Path

import pytest
from rows import rows_of  # noqa: E402

from megatron_burst.tools import flags as flags_
from megatron_burst.tools.model import model_of
from megatron_burst.tools.plan import memory, screen, step
from megatron_burst.tools.plan.configs import Configs, Run
from megatron_burst.tools.plan.reading import loss_chunking, workload_of
from megatron_burst.tools.plan.workload import Workload
from tests.tools.conftest import Printed

CONFIGS = Configs.read()
NAMES = [name for name in CONFIGS.tables if not name.startswith("_")]
# Documents are not predicted.
DOCUMENTS = [n for n in NAMES if "dataloader-inter-document-masking" in CONFIGS.run(n).flags]
PREDICTED = [name for name in NAMES if name not in DOCUMENTS]
HEADLINE = ("7b_2m_32gpu_a800", "14b_1m_32gpu_a800", "7b_4m_64gpu_a800", "14b_2m_64gpu_a800")


def load_of(run: Run) -> Workload:
    return workload_of(run.flags, CONFIGS.cluster(run.cluster), run.gpus)


def test_megatron_and_the_plug_in_accept_every_run_with_its_ranks(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    from tests.training.launcher import run_module

    text = run_module("tests.tools.parse_runs", tmp_path, 1)
    found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    assert {name: each["error"] for name, each in found.items() if "error" in each} == {}
    assert list(found) == NAMES
    for name, sizes in found.items():
        ranks = 1
        for size in sizes.values():
            ranks *= size
        assert ranks == CONFIGS.run(name).gpus, name


@pytest.mark.parametrize("name", PREDICTED)
def test_the_predicted_memory_fits_the_card(name: str) -> None:
    load = load_of(CONFIGS.run(name))
    found = memory.predict(load)
    assert found.total <= memory.usable(load.cluster), f"{found.total / 2**30:.1f} GiB"


@pytest.mark.parametrize("name", NAMES)
def test_no_run_takes_the_slow_path_of_the_loss_or_pays_for_it(name: str) -> None:
    run = CONFIGS.run(name)
    chunking = loss_chunking(run.flags)
    text = screen.describe_loss(run.flags)
    if chunking is None:
        assert "3 products with the LM head a token" in text
        return
    assert f"{chunking.tokens} tokens a chunk, " in text
    assert f"; {chunking.products} products with the LM head a token" in text
    assert chunking.rows is None and chunking.products == (3 if chunking.keeps else 4)
    assert chunking.keeps or chunking.once > 2048, "a large gradient alone is not kept"
    assert chunking.tokens >= 2048
    if name in PREDICTED:
        found = memory.predict(load := load_of(run))
        assert load.loss_bytes == chunking.peak
        assert found.loss <= 1.4 * found.layer  # on one GPU it is the larger


def test_the_slow_path_of_the_loss_is_seen_and_its_time_predicted() -> None:
    run = CONFIGS.run("llama3_8b_256k_8gpu_h100")
    flags = {**run.flags, "lm-head-memory-mb": 512}
    load, slow = load_of(run), run._replace(flags=flags)
    assert "937 tokens a chunk" in screen.describe_loss(flags)
    said = screen.describe_loss(flags)
    assert ", dW in blocks of 16384 rows, logits made three times (once with 2918 MiB)" in said
    assert said.endswith("; 5 products with the LM head a token")
    more = step.head_seconds(load_of(slow)) - step.head_seconds(load)
    flops = 2 * 2 * load.local_tokens * load.model.head_parameters  # instead of none again
    assert more * load.cluster.linear_rate == pytest.approx(flops)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("7b", 5.30),
        ("14b", 13.92),
        ("13b", 13.02),
        ("llama3_8b", 8.03),
        ("qwen3_8b", 8.19),
        ("70b", 70.55),
    ],
)
def test_models_have_their_true_sizes(name: str, billions: float) -> None:
    assert model_of(CONFIGS.model(name)).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", HEADLINE)
def test_a_headline_run_is_that_of_the_paper(name: str) -> None:
    run = CONFIGS.run(name)
    load = load_of(run)
    row = next(row for row in rows_of(CONFIGS) if row.id == CONFIGS.tables[name]["published"][0])
    assert (load.tokens, load.gpus) == (row.load.tokens, row.load.gpus)
    assert load.config.recompute_fraction == row.load.config.recompute_fraction == 0


def test_what_is_published_is_too_much_by_1024_over_1000() -> None:
    rows = [row for row in rows_of(CONFIGS) if row.mfu_published]
    assert len(rows) == 9
    for row in rows:
        mfu = row.value * step.model_flops(row.load) / row.load.tokens / row.load.cluster.peak
        assert row.mfu_published == pytest.approx(100 * 1.024 * mfu, rel=0.007), row.id


def test_every_run_names_rows_that_exist() -> None:
    known = {row.id for row in rows_of(CONFIGS)}
    named = {row for name in NAMES for row in CONFIGS.tables[name].get("published", ())}
    assert named <= known
    assert {row for row in known if row.startswith("ablation/")} <= named


def test_the_ablation_adds_up_and_its_alternatives_do_not() -> None:
    def changes(name: str, other: str) -> set[str]:
        a, b = CONFIGS.run(f"ablation-{name}").flags, CONFIGS.run(f"ablation-{other}").flags
        return {flag for flag in {*a, *b} if a.get(flag) != b.get(flag)}

    assert changes("baseline", "backward") == {"context-parallel-algo", "burst-backward"}
    assert changes("backward", "double") == {"burst-topology"}
    assert changes("double", "loss") == {"lm-head-loss", "lm-head-memory-mb"}
    assert changes("loss", "half") == {"recompute-attention-fraction", "burst-layout"}
    assert changes("loss", "whole") == {"recompute-attention-fraction"}


def test_the_scaling_series_goes_from_1_to_64_gpus() -> None:
    runs = [CONFIGS.run(name) for name in NAMES if name.startswith("scaling-")]
    assert [run.gpus for run in runs] == [1, 2, 4, 8, 16, 32, 64]
    of_gpu = [run.flags["seq-length"] // run.gpus for run in runs]
    assert of_gpu == [16384, *[32768] * 6]


def test_arguments_are_written_and_read() -> None:
    flags = {"swiglu": True, "window-size": "3,0", "sizes": [2, 4], "off": False}
    words = flags_.arguments(flags)
    assert words == ["--swiglu", "--window-size", "3,0", "--sizes", "2", "4"]
    assert flags_.parsed(words) == {"swiglu": True, "window-size": "3,0", "sizes": ["2", "4"]}
    assert flags_.parsed(["--a=1", "--b"]) == {"a": "1", "b": True}
    with pytest.raises(ValueError, match="7 belongs to no flag"):
        flags_.parsed(["7"])


def test_a_run_is_a_hybrid_model_of_as_many_layers() -> None:
    given = CONFIGS.run("llama3_8b_256k_8gpu_h100").flags
    hybrid = flags_.hybrid_form(given)
    changed = {"hybrid-layer-pattern": 32 * "*-", "recompute-num-layers": 2}
    assert hybrid == {n: v for n, v in given.items() if n != "num-layers"} | changed
    assert model_of(hybrid) == model_of(given)
    latents = CONFIGS.run("deepseek_v2_lite_128k_64gpu_h100").flags
    assert flags_.hybrid_form(latents) == latents
    normed = flags_.hybrid_form(CONFIGS.run("qwen3_8b_1m_32gpu_h100").flags)
    assert normed["qk-layernorm"] and normed["hybrid-layer-pattern"] == 36 * "*-"


def test_the_command_names_models_clusters_and_runs(printed: Printed) -> None:
    def listed(words: str = "") -> list[str]:
        return printed(f"plan --list {words}").split()

    assert listed("heads-*") == ["runs:", "heads-1x16", "heads-2x8", "heads-4x4"]
    assert listed("toy") == ["models:", "toy", "runs:", "toy"]
    assert listed("[hg]b*00") == ["clusters:", "gb200"]
    assert {"models:", "llama3_8b", "toy", "h100"} < {*listed()} and "_gpu" not in listed()
    assert json.loads("".join(listed("toy --json"))) == {"models": ["toy"], "runs": ["toy"]}
    for words, message in (
        ("--run 14b", "there is no run 14b; there are: 7b_2m_32gpu_a800, "),
        ("--run _gpu", "there is no run _gpu"),
        ("--list nosuch-*", "no model, cluster or run of configs/ matches nosuch-*"),
    ):
        assert message in printed(["plan", *words.split()], 1)


def test_a_run_shows_its_ranking(printed: Printed) -> None:
    said = printed(["plan", "--run", "toy", "--top", "1"])
    assert (
        "4 GPUs of cpu (1 x 4)" in said
        and "all rows: TP 1, CP 4, DP 1" in said
        and "\nloss: " in f"\n{said}"
    )
    assert "--standalone --nproc-per-node 4 -m megatron_burst.pretrain " in said
