"""What the pages say about flags, limits, files and code is so. (fast tier)"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_burst.plugin.limits import LIMITS, LM_HEAD_LIMITS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/how-it-works.md",
    "docs/launching.md",
    "docs/verify.md",
    "patches/README.md",
)


@pytest.mark.parametrize(
    "page", [*PAGES, "docs/faults.md", "megatron_burst/run.py", "megatron_burst/pretrain_gpt.py"]
)
def test_a_command_with_several_ranks_passes_megatrons_check_of_the_environment(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", "")
    several = "--(?:context-parallel|tensor-model-parallel)-size|--cp-comm-type burst"
    commands = re.findall(rf"^([^|\n]*)torchrun .*(?:{several})", text, re.MULTILINE)
    assert all("CUDA_DEVICE_MAX_CONNECTIONS=1 " in before for before in commands), commands
    assert commands or page not in ("README.md", "docs/launching.md")


def _section(title: str) -> str:
    return README.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text())
    missing = [t for t in targets if not (ROOT / page).parent.joinpath(t).is_file()]
    assert not missing


def test_every_refusal_is_among_the_known_limitations() -> None:
    section = _section("Known limitations")
    flags = [
        f"`{limit.name}`"
        if limit.name.startswith("fp8_")
        else f"`--{limit.name.replace('_', '-')}`"
        for limit in LIMITS
    ]
    flags[flags.index("`--modelopt-enabled`")] = "ModelOpt's"  # no flag, but set by several
    assert [flag for flag in flags if flag not in section] == []


def test_every_refusal_of_the_chunked_loss_is_in_its_section() -> None:
    section = README.partition("### LM head and loss in chunks\n")[2].partition("\n### ")[0]
    flags = [f"`--{limit.name.replace('_', '-')}" for limit in LM_HEAD_LIMITS]
    flags[flags.index("`--modelopt-enabled")] = "ModelOpt's"  # no flag, but set by several
    flags[flags.index("`--logit-dtype")] = "`--output-logit-dtype`"  # whose destination it is
    assert [flag for flag in flags if flag not in section] == []


def test_the_library_example_runs(tmp_path: Path) -> None:
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
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert printed.strip() in ended.stdout
    assert ended.stdout.count("rank ") == 4
