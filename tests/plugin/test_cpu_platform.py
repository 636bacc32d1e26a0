import importlib.util
import re
import socket
import sys
from argparse import ArgumentParser, Namespace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_burst.cpu_platform import arguments as cpu_arguments
from megatron_burst.cpu_platform import platform as cpu_platform
from megatron_burst.cpu_platform.platform import REQUEST
from megatron_burst.cpu_platform.table import PACKAGES, STAND_INS, with_one_worker
from tests.processes import python
from tests.training.launcher import run_job


def test_the_names_of_torch_come_before_megatron_is_imported() -> None:
    ours = [target.startswith("torch") for target in STAND_INS]
    assert ours == sorted(ours, reverse=True)


def test_packages_that_need_a_gpu_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name, contents in PACKAGES.items() if contents is None]
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # put back at the end
    for name in names:
        (tmp_path / f"{name}.py").touch()
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    assert all(map(importlib.util.find_spec, names))
    cpu_platform._replace_gpu_packages()
    assert not any(map(importlib.util.find_spec, names))
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine")


def test_every_target_exists() -> None:
    for target in STAND_INS:
        cpu_platform.resolve(target)


def test_the_page_has_every_target() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design" / "cpu.md").read_text()
    names = {target.rpartition(":")[2].removeprefix("Tensor.") for target in STAND_INS}
    assert not [name for name in names if name not in page]


@pytest.mark.parametrize("target", ["torch.cuda:no_such_name", "megatron.core.nowhere:name"])
def test_a_target_that_does_not_exist_is_named(target: str) -> None:
    with pytest.raises((AttributeError, ImportError), match=target.split(":")[0]):
        cpu_platform.resolve(target)


def test_wanted_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv(REQUEST, raising=False)
    assert not cpu_platform.cpu_platform_wanted()
    monkeypatch.setenv(REQUEST, "1")
    assert cpu_platform.cpu_platform_wanted()


HERE = f"rank 3 on node {socket.gethostname()}"
SEVERAL_NODES = [
    ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "4 ranks, 2 of them on this node"),
    ({"WORLD_SIZE": "4"}, "4 ranks, LOCAL_WORLD_SIZE does not say"),  # srun without torchrun
]


@pytest.mark.parametrize(("environment", "message"), SEVERAL_NODES)
def test_a_job_on_several_nodes_gets_the_platform_on_request_alone(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", REQUEST):
        monkeypatch.delenv(name, raising=False)
    cpu_platform.check_job()  # a plain python
    for name, value in (environment | {"RANK": "3"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{HERE} has no CUDA .*{message}.* {REQUEST}=1 on every"):
        cpu_platform.check_job()
    monkeypatch.setenv(REQUEST, "1")
    cpu_platform.check_job()
    monkeypatch.delenv(REQUEST)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cpu_platform.check_job()


@pytest.mark.slow
def test_a_node_of_several_without_a_gpu_is_named_and_ends() -> None:
    settings = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", REQUEST: "0"}
    start = "from megatron_burst import launch; launch.start()"
    run = python("-c", start, CUDA_VISIBLE_DEVICES="", **settings)
    assert run.returncode == 1
    assert f"megatron_burst: {HERE} has no CUDA device" in run.stderr


ALONE = """
import logging
logging.basicConfig(level=logging.INFO)
from megatron_burst.cpu_platform import platform as platform
assert not platform.cpu_platform_active()
platform.activate()
platform.activate()
"""


def test_activated_platform_behaves_like_cuda_on_the_cpu(tmp_path: Path) -> None:
    status, text = run_job("tests.plugin.activated", tmp_path, 1, ())
    assert status == "0" and "CPU RNG state changed" not in text, text


@pytest.mark.slow
def test_the_platform_is_activated_once_and_says_where() -> None:
    run = python("-c", ALONE, RANK="3")
    assert run.returncode == 0, run.stderr
    line = f"WARNING:megatron_burst.cpu_platform.platform:{HERE} runs on the CPU"
    assert run.stderr.count(line) == 1


def test_activation_after_megatron_is_refused() -> None:
    pytest.importorskip("megatron.core")
    before = torch.zeros, torch.cuda.Stream
    with pytest.raises(RuntimeError, match="before megatron.core is imported"):
        cpu_platform.activate()
    assert before == (torch.zeros, torch.cuda.Stream)


@pytest.fixture(scope="module")
def megatron_parser() -> ArgumentParser:
    arguments = pytest.importorskip("megatron.training.arguments")
    return arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))


@pytest.fixture
def defaults(megatron_parser: ArgumentParser) -> Namespace:
    cpu_arguments.set_cpu_defaults(megatron_parser)
    return megatron_parser.parse_args([])


def test_defaults_pass_the_check(defaults: Namespace) -> None:
    assert defaults.distributed_backend == "gloo"
    assert not defaults.gradient_reduce_div_fusion  # "Cannot use ReduceOp.PREMUL_SUM with Gloo"
    cpu_arguments.check_cpu_arguments(defaults)


def test_flags_of_the_user_win_over_the_defaults(megatron_parser: ArgumentParser) -> None:
    cpu_arguments.set_cpu_defaults(megatron_parser)
    args = megatron_parser.parse_args(["--num-workers", "3", "--transformer-impl", "local"])
    assert args.num_workers == 3


def test_defaults_for_a_parser_without_these_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="transformer_impl"):
        cpu_arguments.set_cpu_defaults(ArgumentParser())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--transformer-impl transformer_engine", "--transformer-impl local"),
        ("--distributed-backend nccl", "--distributed-backend gloo"),
        ("--fp8-format e4m3", "drop --fp8-format"),
        ("--moe-token-dispatcher-type flex", "use alltoall"),
        ("--profile", "--use-pytorch-profiler"),
        ("--bf16 --fp32-residual-connection", "drop --fp32-residual-connection"),
        # What would end behind the parser, where the doctor does not come.
        ("--tp-comm-overlap", "tp_comm_overlap"),
        ("--fine-grained-activation-offloading", "fine_grained_activation_offloading"),
        ("--use-precision-aware-optimizer", "use_precision_aware_optimizer"),
        ("--moe-permute-fusion", "moe_permute_fusion"),
        ("--moe-router-fusion", "moe_router_fusion"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    megatron_parser: ArgumentParser, flags: str, message: str
) -> None:
    cpu_arguments.set_cpu_defaults(megatron_parser)
    with pytest.raises(ValueError, match=message):
        cpu_arguments.check_cpu_arguments(megatron_parser.parse_args(flags.split()))


def test_limits_name_arguments_of_megatron_and_flags(
    megatron_parser: ArgumentParser, defaults: Namespace
) -> None:
    for name, reason in cpu_arguments.CPU_LIMITS.items():
        assert hasattr(defaults, name)
        with pytest.raises(ValueError, match=f"{name} = 2: {reason}"):
            cpu_arguments.check_cpu_arguments(Namespace(**vars(defaults) | {name: 2}))
        assert {*re.findall(r"--[\w-]+", reason)} <= megatron_parser._option_string_actions.keys()


def test_a_group_may_be_made_with_keywords_of_later_torch() -> None:
    """torch 2.15 passes `enable_reconfigure`, which no version takes beside options."""
    made = []
    make = with_one_worker(lambda _, *given, **named: made.append((given[3:], named)))
    make(None, None, 0, 1, timeout=timedelta(seconds=3), enable_reconfigure=False)
    make(None, None, 0, 1, timeout=timedelta(seconds=3), enable_reconfigure=True)
    ((options,), none), (nothing, later) = made
    assert options._threads == 1 and options._timeout == timedelta(seconds=3) and not none
    assert nothing == () and later == {"timeout": timedelta(seconds=3), "enable_reconfigure": True}
