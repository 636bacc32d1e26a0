"""Who may import whom, and what a room needs installed. (fast tier)"""

import ast
import graphlib
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import megatron_burst.kernels
from megatron_burst.tools.command import VERBS
from tests.processes import python

ROOT = Path(megatron_burst.__file__).parent
SCRIPTS = ROOT.parent / "scripts"
NEED_MEGATRON = ("plugin", "data_checks", "launch", "run", "pretrain", "pretrain_gpt", "tools")
# The rooms, from the ground up: a module may import from its own and from those before it.
ROOMS = (
    "config",
    "plans",
    "kernels",
    "transport",
    "attention",
    "reference",
    "loss",
    "",  # megatron_burst/__init__.py
    "plugin",
    "cpu_platform",
    "data_checks",
    "launch",
    "pretrain",
    "pretrain_gpt",
    "run",
    "tools",
    "__main__",
)


@pytest.mark.parametrize("version", ["2.8.0+cu128", "2.6.1", "1.13.1"])
def test_an_older_torch_is_refused_at_import(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=f"needs torch 2.9 or newer, and {re.escape(version)} is"):
        importlib.reload(megatron_burst.kernels)


@pytest.mark.parametrize("version", ["2.9.0a0+50eac811a6.nv25.09", "2.9.0", "2.11.0+cu130", "3.0"])
def test_newer_ones_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    megatron_burst.kernels.check_torch_version()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("megatron_burst", *parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def imports(module: str, *, only_when_loaded: bool) -> set[str]:
    """The modules that `module` names in its imports, all or those that run when it is loaded."""
    return names_in([tree(module)], only_when_loaded=only_when_loaded)


def names_in(nodes: Sequence[ast.AST], *, only_when_loaded: bool) -> set[str]:
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, ast.unparse(node)
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            # `from package import module` needs the module and its package.
            found |= submodules | {node.module}
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if not (only_when_loaded and later):
            waiting += ast.iter_child_nodes(node)
    return found


def within_the_package(names: set[str]) -> set[str]:
    return {name for name in names if name in MODULES}


def part(module: str) -> str:
    """The first name below the package: a file, a folder, or "" for the package itself."""
    return f"{module}.".split(".")[1]


def test_the_walk_sees_the_package() -> None:
    some = {"megatron_burst.plans.schedules.plan", "megatron_burst.kernels.cpu", "megatron_burst"}
    assert some <= set(MODULES)
    assert "megatron_burst.plans.visibility.interval" in imports(
        "megatron_burst.plans.visibility.layout", only_when_loaded=True
    )


def test_plans_and_what_they_are_made_of_need_no_torch() -> None:
    reached, waiting = set[str](), ["megatron_burst.plans.schedules.plan"]
    while waiting:
        named = imports(waiting.pop(), only_when_loaded=False)
        assert not {name for name in named if part(f"_.{name}") == "torch"}, named
        waiting += within_the_package(named) - reached
        reached |= within_the_package(named)


def test_every_module_is_in_a_room() -> None:
    assert set(ROOMS) == {part(module) for module in MODULES}


def test_at_most_seven_modules_lie_at_the_root() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 7


def test_files_and_functions_are_short() -> None:
    texts = {path: path.read_text() for path in (*MODULES.values(), *SCRIPTS.rglob("*.py"))}
    assert not {str(path) for path, text in texts.items() if text.count("\n") > 400}
    walked = (node for text in texts.values() for node in ast.walk(ast.parse(text)))
    functions = [node for node in walked if isinstance(node, ast.FunctionDef)]
    long = [f for f in functions if f.end_lineno and f.end_lineno - f.lineno >= 25]
    assert len(long) <= 0.1 * len(functions)


@pytest.mark.parametrize("room", [p for p in sorted(ROOT.rglob("__init__.py"))], ids=str)
def test_a_room_says_what_it_is(room: Path) -> None:
    assert ast.get_docstring(ast.parse(room.read_text()))


def test_rooms_of_plans_import_only_those_before() -> None:
    rooms = ["visibility", "schedules", "choice", "balance"]
    for module in (name for name in MODULES if name.startswith("megatron_burst.plans.")):
        named = within_the_package(imports(module, only_when_loaded=False))
        met = {name.split(".")[2] for name in named if name.startswith("megatron_burst.plans.")}
        if (own := module.split(".")[2]) in rooms:
            later = rooms[rooms.index(own) + 1 :]
            assert not met & set(later), f"{module} imports {met}"


def test_imports_point_to_earlier_rooms() -> None:
    for module in MODULES:
        # A module inside a folder loads the folder's __init__, too; that is no edge of its own.
        named = within_the_package(imports(module, only_when_loaded=False))
        wrong = {name for name in named if ROOMS.index(part(name)) > ROOMS.index(part(module))}
        assert not wrong, f"{module} imports {wrong}"


def test_rooms_lean_on_few_others() -> None:
    named = {m: within_the_package(imports(m, only_when_loaded=False)) for m in MODULES}
    arrows = {(part(module), part(name)) for module, names in named.items() for name in names}
    assert len([arrow for arrow in arrows if arrow[0] != arrow[1]]) <= 43


def test_there_is_no_cycle_nor_one_through_a_function() -> None:
    graph = {
        module: within_the_package(imports(module, only_when_loaded=False)) - {module}
        for module in MODULES
    }
    list(graphlib.TopologicalSorter(graph).static_order())


PACKAGES = {"megatron-core": "megatron"}  # where a distribution has another name


def provided(extras: str) -> set[str]:
    """The packages that an installation with these extras, by commas, brings."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    names = filter(None, extras.split(","))
    wanted = [*project["dependencies"], *(each for name in names for each in optional[name])]
    packages = [re.split(r"[<>=\[]", requirement)[0] for requirement in wanted]
    return {PACKAGES.get(name, name) for name in packages}


def loaded_by(names: set[str]) -> set[str]:
    """The modules that loading these loads, directly or by a module of ours."""
    seen, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name in MODULES and name not in seen:
            waiting += imports(name, only_when_loaded=True)
        seen.add(name)
    return seen


def foreign(names: set[str]) -> set[str]:
    """The packages beside Python's own that loading these modules loads, directly or not."""
    packages = {name.split(".")[0] for name in loaded_by(names)}
    return packages - {"megatron_burst", "__future__"} - set(sys.stdlib_module_names)


TRAINS = ("compare",)  # the other verbs need nothing beside torch (with jinja2), NumPy and rich


@pytest.mark.parametrize("name", VERBS)
def test_what_a_verb_imports_is_installed_or_of_the_extras_it_names(name: str) -> None:
    needed = foreign({f"megatron_burst.tools.{VERBS[name][0]}", "megatron_burst.tools.command"})
    assert needed <= provided("train" if name in TRAINS else "")


def test_only_the_plug_in_and_what_starts_it_import_megatron() -> None:
    for module in MODULES:
        named = imports(module, only_when_loaded=False)
        found = {name for name in named if name.split(".")[0] == "megatron"}
        assert not found or part(module) in NEED_MEGATRON, module


def test_the_cpu_platform_comes_before_megatron() -> None:
    assert "megatron" not in foreign({"megatron_burst.cpu_platform.platform"})


def test_no_function_changes_a_global_name() -> None:
    for module in MODULES:
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree(module))), module


def test_the_public_names() -> None:
    assert megatron_burst.__all__ == [
        "BurstConfig",
        "BurstContext",
        "Mask",
        "latent_ring_attention",
        "linear_cross_entropy",
        "ring_attention",
    ]
    assert all(hasattr(megatron_burst, name) for name in megatron_burst.__all__)
    assert dir(megatron_burst) == sorted([*megatron_burst.__all__, "__version__"])


WITHOUT_MEGATRONS_LOOP = """
import json, sys
sys.modules["megatron.training"] = None
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_burst import BurstConfig
from megatron_burst.config import LmHeadConfig
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.layer_spec import burst_layer_spec
from megatron_burst.plugin.local_layers import local_stack_spec
from megatron_burst.plugin.hooks.lm_head import ChunkedHead
from megatron_burst.plugin.attention.recompute import RecomputeHooks
from megatron_burst.plugin.hooks.sequence_hooks import SequenceHooks
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
shared = SharedState(BurstConfig(recompute_fraction=0.5))
config = TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0, hidden_dropout=0.0,
    use_cpu_initialization=True)
gpt = GPTModel(
    config=config, transformer_layer_spec=burst_layer_spec(get_gpt_layer_local_spec(), shared),
    vocab_size=32, max_sequence_length=8)
hybrid = HybridModel(
    config=config, hybrid_stack_spec=burst_layer_spec(local_stack_spec(), shared),
    vocab_size=32, max_sequence_length=8, hybrid_layer_pattern="*")
for hook in (SequenceHooks(shared), RecomputeHooks(shared.checkpoints)):
    hook([gpt, hybrid])
ChunkedHead(LmHeadConfig(loss="chunked"))([gpt, hybrid])
ids = torch.arange(8)[None]
found = []
for model in gpt, hybrid:
    model(ids, ids, None, labels=ids).sum().backward()
    layer = model.decoder.layers[0].self_attention
    assert layer.linear_qkv.weight.grad.any()
    found.append(type(layer.core_attention).__name__)
print(json.dumps({"attention": found}))
"""


NO_LOOP = ("attention.core_attention", "attention.recompute", "layer_spec", "local_layers")
NO_LOOP += ("hooks.lm_head", "hooks.mtp", "hooks.sequence_hooks")


@pytest.mark.parametrize("name", NO_LOOP)
def test_what_frameworks_with_a_loop_of_their_own_import_names_none_of_megatrons(name: str) -> None:
    assert not {n for n in loaded_by({f"megatron_burst.plugin.{name}"}) if "megatron.training" in n}


@pytest.mark.slow
def test_the_layer_spec_and_the_hooks_need_nothing_of_megatrons_training_loop() -> None:
    """Frameworks on megatron.core have a loop of their own."""
    pytest.importorskip("megatron")
    result = python("-c", WITHOUT_MEGATRONS_LOOP)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["attention"] == ["BurstCoreAttention"] * 2


def test_an_older_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(ImportError, match="needs Python 3.12 or newer"):
        importlib.reload(megatron_burst)
