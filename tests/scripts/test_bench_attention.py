"""The benchmarks of attention and of whole steps, on sizes that say nothing but run. (fast tier)"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import attention  # noqa: E402
import end_to_end  # noqa: E402
from algorithms import Place, Sizes  # noqa: E402
from page import read_csv  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    page = tmp_path_factory.mktemp("attention") / "page.md"
    sizes = "--ranks 4 --tokens 16 --head-dim 8 --heads 4:4 4:1 --repetitions 1 --force"
    names = ["ring flat", "ring hybrid", "burst auto", "ulysses"]
    with pytest.MonkeyPatch.context() as patch:
        command = [*f"attention {sizes} --masks causal blocks --output".split(), str(page)]
        patch.setattr(sys, "argv", [*command, "--algorithms", *names])
        attention.main()
    yield page


@pytest.mark.slow
def test_every_case_is_a_row(written: Path) -> None:
    rows = read_csv(written.with_suffix(".csv"))
    assert len(rows) == 2 * 2 * 4 * 3  # masks, heads, algorithms, phases
    found = {(row["mask"], row["kv_heads"], row["algorithm"], row["phase"]): row for row in rows}
    assert len(found) == len(rows)
    for row in rows:
        assert 0 < float(row["q1_s"]) <= float(row["median_s"]) <= float(row["q3_s"])
        assert (row["algorithm"] == "ring flat") <= (row["ratio"] == "1")
    # 64 tokens: 2080 causal pairs, 4 heads of 8, two matrix products of 2 FLOPs an element forward.
    assert found["causal", "4", "ulysses", "forward"]["flops"] == str(2080 * 4 * 8 * 4)
    # Three blocks of K and V, 16 tokens, 4 heads of 8, 4 bytes; backward as many and gradients.
    sent = [found["causal", "4", "ring flat", phase] for phase in attention.PHASES]
    assert [row["bytes_of_a_rank"] for row in sent] == [str(n * 3 * 4096) for n in (1, 2, 3)]
    grouped = found["causal", "1", "ring flat", "step"]["bytes_of_a_rank"]
    assert int(grouped) * 4 == int(sent[2]["bytes_of_a_rank"])


@pytest.mark.slow
def test_the_page_has_a_table_for_each_share_of_kv_heads(written: Path) -> None:
    text = written.read_text()
    assert text.count("| algorithm | causal | blocks |") == 2
    assert "## 4 ranks on 2 nodes, 16 tokens a rank, 4 heads, 1 KV heads, head size 8" in text


def test_what_the_blocks_and_documents_see() -> None:
    table = attention.mask_of("blocks", 64).block_table
    assert table is not None
    rows = [torch.from_numpy(row.copy()).nonzero().flatten().tolist() for row in table.array]
    # Block 0 may also see the last one, which comes later: causality hides it.
    assert rows[:3] == [[0, 15], [0, 1], [0, 1, 2]] and rows[15] == [0, 14, 15]
    assert attention.mask_of("documents", 64).documents == (0, 4, 16, 20, 44, 48, 64)
    assert attention.mask_of("window", 64).window == 7


def test_flops_count_what_a_mask_leaves() -> None:
    def flops(mask: str, phase: str) -> int:
        place, sizes = Place(2, 2), Sizes(32, 4, 4, 8)
        return attention.Case(mask, place, sizes, "float32", "auto").flops(phase)

    assert flops("full", "forward") == 64 * 64 * 4 * 8 * 4
    assert flops("full", "step") == flops("full", "forward") + flops("full", "backward")
    assert flops("window", "forward") == (64 * 8 - 28) * 4 * 8 * 4


def test_a_gpu_needs_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ("--device cuda", "runs under torchrun"),
        ("--algorithms ulysses", "must name ring flat"),
        ("--ranks 3", "must be multiples of --ranks-per-node"),
    ):
        with pytest.raises(SystemExit):
            attention.flags(arguments.split())
        assert message in capsys.readouterr().err


def trained(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Write what compare would, a second a step and another for each flag."""
    options, flags = command[: command.index("--")], command[command.index("--") + 1 :]
    folder = Path(options[options.index("--output") + 1])
    folder.mkdir(parents=True)
    seconds = 1.0 + len(flags) + (folder.name[0] == "2")  # the second round is slower
    result = {
        "name": options[options.index("--variants") + 1],
        "status": "cannot run" if "ring double" in options else "ran",
        "reason": "one node",
        "ranks": 4,
        "steps": 20,
        "seconds_per_step": seconds,
        "tokens_per_second_per_gpu": 100 / seconds,
        "peak_memory_bytes": 2.0**30,
        "bytes_sent_per_rank_per_step": None,
        "losses": [[1, 6.0], [20, 2.5]],
    }
    (folder / "compare.json").write_text(json.dumps({"results": [{"name": "other"}, result]}))
    return subprocess.CompletedProcess(command, 0, "", "")


def test_whole_steps_are_trained_by_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, work = tmp_path / "page.md", tmp_path / "work"
    options = ["--rounds", "3", "--force", "--work", str(work), "--output", str(page)]
    monkeypatch.setattr(sys, "argv", ["end_to_end", *options])
    monkeypatch.setattr(end_to_end.subprocess, "run", trained)
    monkeypatch.setattr("page.commit", lambda _: "")
    end_to_end.main()
    rows = {row["case"]: row for row in read_csv(page.with_suffix(".csv"))}
    assert list(rows) == [str(case) for case in end_to_end.CASES if case.variant != "ring double"]
    assert rows["ring flat"]["median_s"] == rows["ring flat"]["ratio"] == "1"
    chunked = rows["burst, chunked loss"]  # two flags more
    assert (chunked["median_s"], chunked["largest_s"], chunked["ratio"]) == ("3", "4", "3")
    assert not work.exists()  # the next call measures anew
    assert "| burst, chunked loss | 3000 | 3000-4000 | 3.000 | 33 | 1.00 | 0.00 |" in (
        page.read_text()
    )


def test_a_training_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["end_to_end", "--force", "--work", str(tmp_path), "--output", str(tmp_path / "p.md")]
    monkeypatch.setattr(sys, "argv", args)
    failed = subprocess.CompletedProcess([], 1, "", "compare: no such flag")
    monkeypatch.setattr(end_to_end.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr("page.commit", lambda _: "")
    with pytest.raises(SystemExit, match="compare: no such flag"):
        end_to_end.main()
    assert not (tmp_path / "p.md").exists()
