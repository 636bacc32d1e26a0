"""What imports change, and a flag of ours; without one nothing is replaced. (fast tier)"""

import json
import re
import sys
from pathlib import Path

import pytest

arguments = pytest.importorskip("megatron.training.arguments")

from megatron_burst import launch  # noqa: E402
from megatron_burst.plugin.arguments import asks_for_us  # noqa: E402
from megatron_burst.plugin.flags import all_flags  # noqa: E402
from tests.processes import python  # noqa: E402
from tests.test_imports import MODULES  # noqa: E402

ROOT = Path(__file__).parents[2]
STOCK = ("--num-layers", "2", "--cp-comm-type", "p2p", "--mock-data")
NOWHERE = ("--data-path", "/nowhere/corpus")
WAYS: dict[str, tuple[str, ...]] = {
    "no flag": (*STOCK, *NOWHERE),
    "yaml": ("--yaml-cfg", "/nowhere.yaml"),
    "a flag": (*STOCK, *NOWHERE, "--lm-head-loss=chunked"),
    "a flag and yaml": ("--yaml-cfg", "/nowhere.yaml", "--lm-head-loss=chunked"),
    "missing data": (*STOCK, *NOWHERE, "--burst-check-files", "on"),
    "several errors": (
        *(*STOCK, "--context-parallel-size", "4", "--lm-head-loss=chunked"),
        *("--cross-entropy-loss-fusion", "--mlp-chunks=0"),
    ),
    "own entry, off": (*STOCK, *NOWHERE, "--burst-check-files", "off"),
    "own entry": STOCK,
}

# Every callable of Megatron and torch, before and after: first the imports of ours, then, as on a
# machine with a GPU, what a launcher does.
STARTED = """
import importlib, json, logging, sys
import torch, torch.distributed
loaded = set(sys.modules)
import megatron_burst
new = sorted({name.split(".")[0] for name in set(sys.modules) - loaded})
for name in [name for name in sys.modules if name.startswith("megatron_burst")]:
    del sys.modules[name]  # to be loaded again, beside what it could change
import tests.uncompiled
import torch._dynamo  # torch's own later parts wrap torch.manual_seed
import megatron.training.argument_utils, megatron.training.training

def names():
    holders = {name: vars(module) for name, module in list(sys.modules.items())
               if module is not None and name.split(".")[0] in ("megatron", "torch")}
    for name, members in list(holders.items()):
        holders |= {f"{name}.{key}": vars(value) for key, value in members.items()
                    if isinstance(value, type) and value.__module__ == name}
    return [(holder, members, key, value) for holder, members in holders.items()
            for key, value in members.items() if callable(value)]

def changed():
    return sorted(f"{holder}.{key}" for holder, members, key, value in before
                  if members.get(key) is not value)

ways, modules = map(json.loads, sys.argv[1:])
before = names()
for name in modules:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # an optional package
        assert not error.name.startswith("megatron_burst"), error
found = {"importing": {"new": new, "changed": changed()}}

torch.cuda.is_available = lambda: True
before = names()
from megatron_burst import launch
for way, line in ways.items():
    sys.argv = ["pretrain_gpt.py", *line]
    launch.start(own_entry=way.startswith("own entry"))
    end = ""
    try:
        megatron.training.arguments.parse_args()
    except (SystemExit, OSError, ImportError) as error:
        end = str(error)
    found[way] = {"changed": changed(), "end": end}
    found[way]["is_silent"] = not logging.getLogger("megatron_burst").handlers
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def started() -> dict[str, dict]:
    """One process that starts in these ways, one after the other, and what has changed by then."""
    words = json.dumps(WAYS), json.dumps([*MODULES])
    run = python("-c", STARTED, *words, MEGATRON_BURST_CPU="0")
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_else_and_no_module_replaces_a_name(
    started: dict,
) -> None:
    new = {*started["importing"]["new"]}
    assert "megatron_burst" in new
    assert new - {"megatron_burst", "numpy"} <= set(sys.stdlib_module_names)
    assert started["importing"]["changed"] == []


def documented(when: str) -> list[str]:
    page = (ROOT / "docs" / "design" / "attachment.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", page, re.MULTILINE)
    return sorted(f"megatron.{name}" for name, found in rows if found == when)


@pytest.mark.parametrize("way", ["no flag", "yaml"])
def test_without_a_flag_of_ours_every_name_leads_where_it_did(started: dict, way: str) -> None:
    assert started[way]["changed"] == [] and started[way]["is_silent"]
    end = started[way]["end"]
    assert ("yaml" in end.lower()) == (way == "yaml") and "megatron_burst" not in end


def test_a_flag_replaces_what_the_table_says_and_nothing_else(started: dict) -> None:
    ours, checks = documented("a flag of ours"), documented("`--burst-check-files`")
    assert len(ours) == 10 and len(checks) == 9
    assert started["a flag"] == {"changed": ours, "end": "", "is_silent": False}
    assert started["own entry, off"]["changed"] == ours
    assert started["own entry"]["changed"] == sorted(ours + checks)


def test_files_are_checked_where_it_is_asked_for(started: dict) -> None:
    assert (
        "[Errno 2] No such file or directory: '/nowhere/corpus.idx'"
        in started["missing data"]["end"]
    )
    assert started["own entry, off"]["end"] == ""


def test_all_that_is_refused_is_said_at_once(started: dict) -> None:
    said = started["several errors"]["end"].splitlines()
    assert said[0].startswith("megatron_burst: ") and all(line[0] == " " for line in said[1:])
    for text in (
        "cross_entropy_loss_fusion = True: it chooses among Megatron's own losses",
        "--mlp-chunks must be positive and finite, got 0",
        "1 ranks do not divide over --tensor-model-parallel-size 1 x "
        "--pipeline-model-parallel-size 1 x --context-parallel-size 4 = 4: change --nproc-per-node",
    ):
        assert sum(text in line for line in said) == 1, text


def test_yaml_leaves_no_place_for_our_flags(started: dict) -> None:
    assert "--yaml-cfg leaves no place for our flags" in started["a flag and yaml"]["end"]


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        *((flag.name, True) for flag in all_flags()),
        ("--burst-verify", True),
        *((f"--seq-length 8 {flag.name}=x", True) for flag in all_flags()),
        ("--help", True),
        ("-h", True),
        ("--cp-comm-type p2p burst", True),
        ("--cp-comm-type=burst", True),
        ("--cp-comm-type p2p a2a", False),
        ("--cp-comm-type", False),
        ("--spec my.own gpt --cp-comm-type burst", False),  # needs no launcher
        ("--save ring --load --seq-length 8 --context-parallel-size 2", False),
        ("", False),
    ],
)
def test_what_asks_for_us(line: str, ours: bool) -> None:
    assert asks_for_us(line.split()) is ours


def test_the_cpu_platform_brings_what_it_needs_and_none_of_our_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []
    monkeypatch.setattr(launch, "_show_our_log", lambda: None)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *STOCK])
    monkeypatch.setattr(launch, "mend_wheel", lambda: called.append("mend"))
    for name in ("cpu_platform_wanted", "check_job", "activate"):
        monkeypatch.setattr(
            launch.cpu_platform, name, lambda name=name: called.append(name) or True
        )
    before = arguments.parse_args
    launch.start()
    assert called == ["cpu_platform_wanted", "check_job", "activate", "mend"]
    assert arguments.parse_args is before
