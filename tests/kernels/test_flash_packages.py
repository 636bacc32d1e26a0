"""The adapters of flash-attn's packages, with stand-ins for the packages. (fast tier)"""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.attention import preparing
from megatron_burst.attention.preparing import prepare
from megatron_burst.kernels import (
    KERNELS,
    Kernel,
    KernelInput,
    Request,
    flash2,
    flash3,
    flash4,
    passed_over,
    select_kernel,
)
from megatron_burst.kernels.package import Package, _import_error, installed_version
from megatron_burst.plans.visibility.band import Band
from tests.kernels import test_kernels as contract
from tests.kernels.flash_packages import StandIn, _cap

PACKAGES = {"flash2": flash2.PACKAGE, "flash3": flash3.PACKAGE, "flash4": flash4.PACKAGE}
VERSIONS = {"flash2": "2.8.3+cu12torch2.8", "flash3": "3.0.0", "flash4": "4.0.0b36"}
CPU = "cpu", torch.float32


@pytest.fixture(params=PACKAGES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn(name)
    monkeypatch.setitem(sys.modules, PACKAGES[name].module, module)
    return module


@pytest.fixture
def kernel(name: str, stand_in: StandIn) -> Kernel:
    return KERNELS[name]


@pytest.mark.parametrize("heads", contract.HEADS.values(), ids=contract.HEADS)
@pytest.mark.parametrize(("band", "queries", "keys"), contract.BANDS.values())
def test_the_contract(kernel: Kernel, heads: tuple[int, int], band, queries, keys) -> None:
    contract.test_a_tile_equals_the_oracle(kernel, *CPU, heads, band, queries, keys)
    tile = band, queries, keys
    contract.test_a_tile_of_a_longer_row_takes_the_finished_out_and_lse(kernel, *CPU, *tile)
    contract.test_any_out_with_the_same_row_products_serves_the_backward(kernel, *CPU, *tile)


@pytest.mark.parametrize("heads", contract.HEADS.values(), ids=contract.HEADS)
@pytest.mark.parametrize(("band", "lengths"), contract.SEVERAL.values(), ids=contract.SEVERAL)
def test_several_tiles_are_one_call(
    kernel: Kernel, stand_in: StandIn, heads, band, lengths
) -> None:
    sizes = (contract.DIM,) if kernel.name == "flash2" else (contract.DIM, 8)
    for value_dim in sizes:
        contract.test_several_tiles_in_one_call_equal_the_oracle(
            kernel, *CPU, heads, band, lengths, value_dim
        )
        assert stand_in.calls == 2  # forward and backward
        stand_in.calls = 0


def test_a_soft_cap_equals_the_oracle(kernel: Kernel, stand_in: StandIn) -> None:
    contract.test_a_soft_cap_equals_the_oracle(kernel, *CPU)
    assert _cap(stand_in.last) == contract.SOFT_CAP


def test_no_soft_cap_is_none(kernel: Kernel, stand_in: StandIn) -> None:
    contract.test_results_are_new_tensors(kernel, *CPU)
    assert _cap(stand_in.last) is None


def test_flash_attn_4_makes_nothing_anew_for_a_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes itself it hashes by its source in every call: 0.2 to 0.4 ms of the host."""
    monkeypatch.setitem(sys.modules, flash4.PACKAGE.module, stand_in := StandIn("flash4"))
    q, k, v, dout = (contract.draw(24, 4, *CPU, seed) for seed in range(4))
    given = []
    for cap in (30.0, 30.0, 50.0):
        tile = KernelInput(q, k, v, contract.Band.FULL, 0.25, soft_cap=cap)
        out, lse = KERNELS["flash4"].forward(tile)
        given.append([stand_in.last["score_mod"]])
        KERNELS["flash4"].backward(tile, dout, out, lse)
        given[-1] += [stand_in.last["score_mod"], stand_in.last["score_mod_bwd"]]
    first, second, other = given
    assert None not in first and first == second and first[0] is first[1]
    assert not {*first} & {*other}


@pytest.mark.parametrize("leaves_room", [False, True])
def test_the_forward_of_flash_attn_3_leaves_room_to_messages(
    kernel: Kernel, stand_in: StandIn, leaves_room: bool
) -> None:
    q, k, v, dout = (contract.draw(24, 4, *CPU, seed) for seed in range(4))
    tile = KernelInput(q, k, v, contract.Band.FULL, 0.25, leaves_room=leaves_room)
    expected = 8 if leaves_room and kernel.name == "flash3" else 0
    kernel.forward(tile)
    assert stand_in.last.get("sm_margin", 0) == expected
    kernel.backward(tile, dout, dout, torch.zeros(2, 4, 24))  # whose blocks come and go
    assert stand_in.last.get("sm_margin", 0) == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_mode_is_passed_on(
    kernel: Kernel, stand_in: StandIn, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    dout, q, k, v = (contract.draw(24, 4, *CPU, seed) for seed in range(4))
    for packing in (None, contract.packing([(9, 9), (15, 15)], "cpu")):
        tile = KernelInput(q, k, v, contract.Band.FULL, 0.25, packing=packing)
        kernel.backward(tile, dout, dout, torch.zeros(2, 4, 24))
        assert stand_in.last["deterministic"] is deterministic


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes believe in a GPU and in installed packages."""

    def make(capability: tuple[int, int], versions: dict[str, str]) -> None:
        by_distribution = {PACKAGES[n].distribution: v for n, v in versions.items()}

        def version(distribution: str) -> str:
            if distribution not in by_distribution:
                raise importlib.metadata.PackageNotFoundError(distribution)
            return by_distribution[distribution]

        for each in versions:
            monkeypatch.setitem(sys.modules, PACKAGES[each].module, StandIn(each))
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
        forget()

    def forget() -> None:
        installed_version.cache_clear()
        _import_error.cache_clear()

    yield make
    forget()


def gpu_request(dim: int = 128, value_dim: int | None = None, **more: object) -> Request:
    request = Request(torch.device("cuda"), torch.bfloat16, 8, 2, dim, value_dim or dim)
    return replace(request, **more)


HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
OTHERS = {n: v for n, v in VERSIONS.items() if n != "flash4"}


@pytest.mark.parametrize(
    ("capability", "versions", "more", "chosen"),
    [
        (HOPPER, VERSIONS, {}, "flash3"),
        (HOPPER, {"flash4": "4.0.0b36"}, {}, "flash4"),
        (HOPPER, {"flash2": "2.8.3"}, {}, "cudnn"),
        (HOPPER, {}, {}, "cudnn"),
        (BLACKWELL, VERSIONS, {}, "flash4"),
        (BLACKWELL, OTHERS, {}, "cudnn"),
        (AMPERE, VERSIONS, {}, "cudnn"),
        (HOPPER, {"flash2": "2.8.3"}, {"is_banded": True}, "flash2"),
        (HOPPER, {}, {"is_banded": True}, "aten_flash"),
        (HOPPER, {}, {"has_documents": True}, "aten_flash"),
        (HOPPER, OTHERS, {"soft_cap": 30.0}, "flash3"),
        (HOPPER, VERSIONS, {"head_dim": 192}, "flash3"),  # MLA's 192 and 128 as they are
        (HOPPER, {"flash4": "4.0.0b36"}, {"head_dim": 192, "kv_heads": 8}, "flash4"),
        # cuDNN needs no padding, the others of its class do.
        (HOPPER, VERSIONS, {"head_dim": 96}, "cudnn"),
        (HOPPER, VERSIONS, {"head_dim": 96, "is_banded": True}, "flash3 with heads padded to 128"),
        (HOPPER, {}, {"head_dim": 192}, "aten_flash with heads padded to 192"),
    ],
)
def test_auto_takes_what_is_fastest_and_can(machine, capability, versions, more, chosen) -> None:
    machine(capability, versions)
    assert select_kernel("auto", gpu_request(**more)).name == chosen


@pytest.mark.parametrize("version", [91500, 91002, None])
def test_an_old_cudnn_is_passed_over_with_its_version(machine, monkeypatch, version) -> None:
    machine(HOPPER, {})
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    kernel = select_kernel("auto", gpu_request())
    assert kernel.name == "aten_flash"
    found = {91500: "9.15.0", 91002: "9.10.2", None: "0.0.0"}[version]
    assert f"not cudnn: cuDNN {found} is older than 9.15.1" in passed_over(kernel, gpu_request())


@pytest.mark.parametrize(
    ("queries", "keys", "band", "passes_by_cudnn"),
    [
        (704, 640, Band.FULL, ["forward", "backward"]),
        (640, 704, Band.FULL, ["forward"]),  # the keys end with half a block of 128
        (64, 64, Band.FULL, ["forward"]),
        (704, 704, Band.CAUSAL, ["forward", "backward"]),
        (1, 128, Band.FULL, []),
        (1, 1, Band.CAUSAL, []),
    ],
)
@pytest.mark.parametrize("value_dim", [64, 128])
def test_what_cudnn_gets_wrong_is_computed_by_flash_attention_2(
    queries: int, keys: int, band: Band, passes_by_cudnn: list[str], value_dim: int
) -> None:
    """The numbers of these tiles are compared where there is a GPU: `kernels.CORNERS`."""
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _: Any, args: Any = (), more: Any = None
        ) -> Any:
            if "attention" in str(function):
                names.append("cudnn" if "cudnn" in str(function) else "aten_flash")
                sizes = {x.shape[3] for x in args if isinstance(x, Tensor) and x.ndim == 4}
                assert names[-1] == "cudnn" or sizes == {128}  # FlashAttention-2 has one
            return function(*args, **(more or {}))

    with FakeTensorMode(), Names():
        sizes = ((queries, 8, 128), (keys, 2, 128), (keys, 2, value_dim))
        q, k, v = (torch.empty(1, *size, dtype=torch.bfloat16, device="cuda") for size in sizes)
        tile, kernel = KernelInput(q, k, v, band, 1.0), KERNELS["cudnn"]
        out, lse = kernel.forward(tile)
        gradients = kernel.backward(tile, out, out, lse)
    assert lse.shape == (1, 8, queries) and out.shape == (1, queries, 8, value_dim)
    assert [x.shape for x in gradients] == [x.shape for x in tile.qkv]
    taken = [
        "cudnn" if each in passes_by_cudnn else "aten_flash" for each in ("forward", "backward")
    ]
    assert names == taken


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What attention asks of kernels; none is chosen."""
    requests: list[Request] = []
    monkeypatch.setattr(preparing, "select_kernel", lambda _, request: requests.append(request))
    monkeypatch.setattr(preparing, "log_choice", lambda *_: None)
    return requests


@pytest.mark.parametrize("documents", [None, (0, 3, 8)])
def test_a_call_says_whether_there_are_documents(asked, documents) -> None:
    x, mask = torch.zeros(1, 8, 2, 8), Mask.causal(documents=documents)
    prepare(BurstContext.create(BurstConfig()), x, x, x, mask, 1.0)
    assert [request.has_documents for request in asked] == [documents is not None]


def test_a_kernel_is_chosen_once_a_shape_and_anew_in_deterministic_mode(asked, monkeypatch) -> None:
    x, mask = torch.zeros(1, 8, 2, 8), Mask.causal()
    context = BurstContext.create(BurstConfig())
    scales = [prepare(context, x, x, x, mask, scale).scale for scale in (1.0, 0.5, 1.0)]
    assert scales == [1.0, 0.5, 1.0] and len(asked) == 1
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for _ in range(2):
        prepare(context, x, x, x, mask, 1.0)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("name", "capability", "more", "reason"),
    [
        ("flash2", (7, 5), {}, "compute capability 7.5, older than 8.0"),
        ("flash3", AMPERE, {}, "compute capability 8.0, older than 9.0"),
        ("flash3", BLACKWELL, {}, "compute capability 10.0, newer than 9.x"),
        ("flash4", (12, 0), {}, "compute capability 12.0, newer than 11.x"),
        ("flash2", HOPPER, {"dtype": torch.float32}, "the dtype is torch.float32, not bfloat16"),
        ("flash3", HOPPER, {"head_dim": 20}, "head size 20 is not a multiple of 8 up to 256"),
        ("flash2", HOPPER, {"head_dim": 192}, r"head sizes of K and V differ \(192 and 128\)"),
        ("flash3", HOPPER, {"value_head_dim": 64}, r"K and V differ \(128 and 64\), and are not"),
        ("flash4", HOPPER, {"value_head_dim": 64}, r"K and V differ \(128 and 64\), and are not"),
        ("flash4", BLACKWELL, {"head_dim": 160, "value_head_dim": 160}, "are not up to 128 on thi"),
        (
            "flash4",
            BLACKWELL,
            {"head_dim": 256, "value_head_dim": 256, "soft_cap": 1.0},
            "no soft cap for head size 256",
        ),
        (
            "flash4",
            BLACKWELL,
            {"head_dim": 256, "value_head_dim": 256, "is_banded": True},
            "no backward with windows for head size 256",
        ),
        ("flash4", HOPPER, {"head_dim": 192}, "of grouped heads has one head size on this GPU"),
        ("cudnn", HOPPER, {"soft_cap": 1.0}, "it has no soft cap"),
        ("cudnn", HOPPER, {"has_documents": True}, "it plans every new shape for long"),
        ("aten_flash", HOPPER, {"soft_cap": 1.0}, "it has no soft cap"),
    ],
)
def test_what_a_gpu_kernel_says_against_a_request(machine, name, capability, more, reason) -> None:
    machine(capability, VERSIONS)
    with pytest.raises(AssertionError, match=reason):
        assert not "; ".join(KERNELS[name].reasons_against(gpu_request(**more)))


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "is not installed"),
        ("1.0", "1.0 is installed, not at least"),
        ("99.0", "99.0 is installed"),
        ("3.0.0.b1", "3.0.0.b1 is installed"),  # for flash3: its signatures changed meanwhile
    ],
)
def test_a_package_of_another_version_is_not_used(machine, name, version, reason) -> None:
    machine(HOPPER, {name: version} if version else {})
    (found,) = KERNELS[name].reasons_against(gpu_request())
    assert reason in found and PACKAGES[name].distribution in found
    assert f"at least {PACKAGES[name].at_least} and below {PACKAGES[name].below}" in found


def test_a_package_that_breaks_on_import_does_not_stop_auto(machine, monkeypatch) -> None:
    machine(HOPPER, VERSIONS)

    def breaks(_: str) -> None:
        raise TypeError("unexpected keyword 'loc'")  # as of packages that do not fit together

    monkeypatch.setattr(importlib, "import_module", breaks)
    (found,) = KERNELS["flash3"].reasons_against(gpu_request())
    assert found.endswith("cannot be imported: unexpected keyword 'loc'")
    assert select_kernel("auto", gpu_request()).name == "cudnn"


def test_deterministic_mode_passes_over_what_is_not(machine, monkeypatch) -> None:
    machine(HOPPER, VERSIONS)
    largest = gpu_request(256, 256)
    assert KERNELS["flash3"].reasons_against(largest) == []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "not deterministic" in KERNELS["flash3"].reasons_against(largest)[0]
    assert "not deterministic" in KERNELS["cudnn"].reasons_against(gpu_request())[0]
    for name in ("flash3", "aten_flash"):
        assert KERNELS[name].reasons_against(gpu_request()) == []


def test_versions_are_compared_as_versions() -> None:
    installed_version.cache_clear()
    torch_itself = Package("torch", "torch", "2.6", "99")
    assert torch_itself.reasons_against() == [] == torch_itself.import_reasons()
    assert torch_itself.functions() is torch
