"""What the pages say about commands, errors, files and code is so. (fast tier)"""

import ast
import csv
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_burst.tools import terminal
from megatron_burst.tools.compare import command as compare
from megatron_burst.tools.compare import toy
from megatron_burst.tools.compare.page import Comparison
from megatron_burst.tools.compare.results import RAN, Result
from megatron_burst.tools.flags import parsed
from megatron_burst.tools.plan import timing
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.reading import workload_of
from megatron_burst.tools.plan.usual import as_trained
from tests.workers import forkserver

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted(
    str(page.relative_to(ROOT))
    for folder in (".", "docs", "docs/design", "patches")
    for page in ROOT.glob(f"{folder}/*.md")
)


@pytest.mark.parametrize("page", [*PAGES, "megatron_burst/run.py", "megatron_burst/pretrain.py"])
def test_a_command_with_several_ranks_passes_megatrons_check_of_the_environment(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", "")
    several = "--(?:context-parallel|tensor-model-parallel)-size|--cp-comm-type burst"
    commands = re.findall(rf"^([^|\n]*)(torchrun .*(?:{several}).*)", text, re.MULTILINE)
    for before, command in commands:  # Megatron-FSDP refuses it
        is_set = "CUDA_DEVICE_MAX_CONNECTIONS=1 " in before
        assert is_set != ("--use-megatron-fsdp" in command), command
    assert commands or page != "README.md"


def _section(title: str) -> str:
    return README.partition(f"## {title}\n")[2].partition("\n## ")[0]


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text())
    wrong = []
    for target, heading in links:
        file = (ROOT / page).parent / target if target else ROOT / page
        if not file.is_file() or (heading and heading not in anchors(file)):
            wrong.append(f"{target}#{heading}")
    assert not wrong


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_have_at_most_120_columns(page: str) -> None:
    made = r"^```.*?^```|^<!-- .*?^<!-- end.*?$"  # code, and what scripts write
    lines = re.sub(made, "", (ROOT / page).read_text(), flags=re.M | re.S).splitlines()
    assert not [line for line in lines if len(line) > 120 and line[0] not in "|!["]


def words(*files: Path) -> int:
    """As `wc -w` counts: the bars of tables, too."""
    return sum(len(file.read_text().split()) for file in files)


def test_the_pages_for_users_stay_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert words(*pages) <= 18000
    assert words(*(ROOT / "docs" / "design").glob("*.md")) <= 10600


def test_the_readmes_figures_are_those_of_the_pages() -> None:
    page = (ROOT / "docs" / "million.md").read_text()
    ladder = page.partition("<!-- llama3_8b")[2].partition("<!-- end")[0]
    rows = [line.strip("| ").split(" | ") for line in ladder.splitlines() if line.startswith("| ")]
    first, best = rows[2], max(rows[2:], key=lambda row: float(row[9].split()[0]))
    theirs, ours = re.findall(r"longest sequence \| (\S+, \S+ M) \| \[(\S+, \S+ M)\]", README)[0]
    for said, row in ((theirs, first), (ours, best)):
        assert said == f"{float(row[7]) - 1e-9:.0f}, {row[9]}", "GiB of a GPU, tokens"
    assert f"{float(best[9].split()[0]):.1f} M tokens fit" in README
    with (ROOT / "scripts/bench/results/cpu_many_nodes.csv").open(newline="") as file:
        measured = [row for row in csv.DictReader(file) if row["algorithm"] == "burst auto"]
    of_heads = dict[str, list[float]]()
    for row in measured:
        if (row["phase"], row["ranks_per_node"]) == ("step", "1") and row["mbit"] != "inf":
            of_heads.setdefault(row["kv_heads"], []).append(float(row["ratio"]))
    ranges = (f"{min(of_heads[heads]):.2f} to {max(of_heads[heads]):.2f}" for heads in "82")
    assert f"[{'; '.join(ranges)}](scripts/bench" in README


def test_the_readmes_sizes_of_buffers_are_those_of_the_pages() -> None:
    with (ROOT / "docs" / "budgets.csv").open(newline="") as file:
        rows = {tuple(row.values())[:5]: row["forward_peak"] for row in csv.DictReader(file)}
    rings = (rows[ranks, nodes, "4:4", "kv", "causal"] for ranks, nodes in ("81", ("32", "4")))
    ours = ", ".join(f"{float(peak):.1f}" for peak in rings)
    # TransformerEngine's, as docs/budgets.md reads it, for the rank in the middle
    theirs = ", ".join(f"{2 * p + (p + p // 2 + 1) / 2 + 1}" for p in (8, 32))
    assert f"| {theirs} | [{ours}](docs/budgets.md)" in README
    assert "{} for P = 8 and r = 4, {} for P = 32".format(*theirs.split(", ")) in (
        (ROOT / "docs" / "budgets.md").read_text()
    )


# A row of the quickstart's table: name, how far apart, loss, quartiles, ms, tokens/s, GiB, MiB.
ROW = re.compile(
    r"^ ([\w= ]+?) +(\S+) +([\d.]+) +(\d+) to (\d+) +(\d+) +([\d,]+)" + 3 * r" +([\d.]+)" + "$",
    re.M,
)


def result(row: tuple[str, ...], apart: float) -> Result:
    """What compare has read of a run, if its table has this row."""
    name, _, loss, low, high, step, tokens, peak, sent, imbalance = row
    ended = float(loss)
    return Result(
        name=name,
        status=RAN,
        steps=80,
        losses=[(1, ended * (1 + apart)), *((step, ended) for step in range(2, 81))],
        seconds_per_step=int(step) / 1e3,
        quartiles=(int(low) / 1e3, int(high) / 1e3),
        tokens_per_second_per_gpu=float(tokens.replace(",", "")),
        peak_memory_bytes=float(peak) * 2**30,
        bytes_sent_per_rank_per_step=float(sent) * 2**20,
        imbalance=float(imbalance),
    )


def counted(algorithm: str) -> float:
    """The bytes that a rank sends for attention in a step of the quickstart, by the planner."""
    words = [*toy._FLAGS, "--vocab-size", "257", "--micro-batch-size", "4"]
    words += ["--global-batch-size", "4", "--context-parallel-size", "4"]
    flags = parsed([*words, "--context-parallel-algo", algorithm])
    load = as_trained(workload_of(flags, Configs.read().cluster("cpu"), 4))
    return load.model.layers * sum(each.sent for each in timing.attention_passes(load))


def test_the_quickstarts_output_is_what_compare_prints_of_these_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = README.partition("<!-- expected output: begin -->\n```text\n")[2].partition("```")[0]
    rows = ROW.findall(output)
    results = [result(row, 0 if row[1] == "reference" else float(row[1])) for row in rows]
    found = Comparison(
        command="", flags=(), machine={}, results=results, judged_steps=20, tolerance=1e-4
    )
    for number, each in enumerate(results, 1):
        print(f"[{number}/{len(results)}] {each.name}: {compare._line(each)}")
    compare._show(found, tmp_path / "page.md", terminal.console())
    said = capsys.readouterr().out.rpartition("report: ")[0]
    assert [line.rstrip() for line in said.splitlines()] == output.splitlines()
    for row, each in zip(rows, results, strict=True):
        ranks, seconds = 1 if row[1] == "reference" else 4, each.seconds_per_step
        assert seconds and each.tokens_per_second_per_gpu
        assert each.tokens_per_second_per_gpu * seconds * ranks == pytest.approx(4 * 1024, rel=3e-3)
    sent = {each.name: each.bytes_sent_per_rank_per_step for each in results}
    assert sent == {"CP=1 burst": 0, "burst": counted("burst"), "ring flat": counted("ring")}
    assert 3 * counted("burst") == counted("ring"), "a third of the bytes, it says"


@pytest.mark.parametrize("folder", ["docs", "docs/design"])
def test_the_index_names_every_page(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text()
    pages = {page.name for page in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\((\w[\w-]*\.md)\)", index))


def test_how_it_works_is_short_and_its_picture_shows_every_room() -> None:
    page, picture = (ROOT / "docs" / name for name in ("how-it-works.md", "rooms.svg"))
    assert len(page.read_text().split()) <= 1500
    paths = [*(ROOT / "megatron_burst").iterdir()]
    rooms = {path.name for path in paths if (path / "__init__.py").is_file()} | {"config"}
    assert rooms <= set(re.findall(r">([^<>]+)</text>", picture.read_text()))


def messages() -> str:
    """All text of the package, "…" where a message has a value."""
    found = []
    for file in (ROOT / "megatron_burst").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "") for part in node.values]
                found.append("".join(p if isinstance(p, str) else "…" for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_errors_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    others = {"CUDA_DEVICE_MAX_CONNECTIONS", "double free"}  # Megatron's and the C library's
    said = messages()
    quoted = [text for text in rows if text not in others]
    assert len(quoted) > 15
    missing = [text for text in quoted if not all(p.strip() in said for p in text.split("…"))]
    assert not missing


def run_as_rank(rank: int, ranks: int, folder: str) -> None:
    """Run the example as torchrun starts it, with a file for its output and one for its errors."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_PORT": Path(folder, "port").read_text()}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for stream, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT), stream)
    runpy.run_path(f"{folder}/example.py", run_name="__main__")
    sys.stdout.flush()


def what_it_prints(example: str, ranks: int, folder: Path) -> str:
    """Run an example on ranks that are forked from a process that has imported torch."""
    folder.mkdir()
    (folder / "example.py").write_text(example)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's
    (folder / "port").write_text(str(store.port))
    arguments = [(rank, ranks, str(folder)) for rank in range(ranks)]
    processes = [forkserver().Process(target=run_as_rank, args=a, daemon=True) for a in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    said, errors = (
        "".join((folder / f"{name}{rank}").read_text() for rank in range(ranks))
        for name in ("out", "errors")
    )
    assert [process.exitcode for process in processes] == [0] * ranks, errors
    return said


def test_the_library_example_runs(tmp_path: Path) -> None:
    example, printed = re.findall(
        r"```(?:python|text)\n(.*?)```", _section("As a library"), re.DOTALL
    )
    said = what_it_prints(example, 4, tmp_path / "ring")
    assert printed.strip() in said
    assert sorted(re.findall(r"^rank (\d): ", said, re.M)) == [*"0123"]  # beside what is logged


def test_the_examples_of_the_library_page_run_and_the_trainer_learns_alike(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "library.md").read_text()
    loss, trainer = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(loss, {})
    said = [what_it_prints(trainer, ranks, tmp_path / str(ranks)) for ranks in (4, 1)]
    four, one = ([*map(float, re.findall(r"loss (\S+)", out))] for out in said)
    assert len(four) == 5 and four[-1] < four[0]
    assert four == pytest.approx(one, abs=2e-5)


@pytest.mark.slow
def test_the_library_example_runs_under_torchrun(tmp_path: Path) -> None:
    example, printed = re.findall(
        r"```(?:python|text)\n(.*?)```", _section("As a library"), re.DOTALL
    )
    script = tmp_path / "ring.py"
    script.write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    ended = subprocess.run(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert printed.strip() in ended.stdout
    assert ended.stdout.count("rank ") == 4
