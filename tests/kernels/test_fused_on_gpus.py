"""The fused kernels as GPUs run them: compiled, and counted on fake tensors.

(fast tier: a head size, one GPU; slow: all)
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_burst.attention.launches import Rows, RowTable
from megatron_burst.attention.sums import PartialOutputs, Sums, WireDtypes
from megatron_burst.attention.surrogate import row_products, surrogate_factor, surrogate_output
from megatron_burst.kernels import in_triton
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.plans.visibility.interval import Interval
from tests.counting import Counting
from tests.kernels.triton_here import compiled, fused, keys_of

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
MERGED = {"total": F32, "part": BF16, "lse": F32, "part_lse": F32}
KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "merge": (fused._merge, MERGED | {"index": None}, {}),
    "merge a table": (fused._merge, MERGED | {"index": I64}, {}),
    "add": (fused._add, {"total": F32, "part": BF16, "index": None}, {}),
    "factor": (fused._row_products, {"x": BF16, "y": BF16, "factor": F32}, {"OVER_SQUARES": True}),
    "surrogate": (fused._scale_rows, {"out": BF16, "x": BF16, "factor": F32}, {}),
}
SIZES = [
    pytest.param(dim, gpu, marks=[pytest.mark.slow] * ((dim, gpu) != (128, 90)))
    for dim in (40, 64, 128, 192, 256, 512)
    for gpu in (80, 90, 100)
]


@pytest.mark.parametrize(("dim", "gpu"), SIZES)
@pytest.mark.parametrize("name", KERNELS)
def test_loads_are_wide_and_nothing_is_spilled(name: str, dim: int, gpu: int) -> None:
    kernel, pointers, constants = KERNELS[name]
    sizes = {**fused._blocks(dim), "DIM": dim, "UNIT": fused._UNIT}
    found = compiled(kernel, gpu, pointers, **constants, **sizes)
    assert found.spilled == 0 and found.registers <= 128
    elements = sizes["BLOCK"] * sizes["ROWS"] // 128  # of a thread
    matrices = {n: t for n, t in pointers.items() if n in ("total", "part", "x", "y", "out")}
    read = sum(t.itemsize for n, t in matrices.items() if n != "out")
    written = sum(t.itemsize for n, t in matrices.items() if n in ("total", "out"))
    assert found.loads.count(128) == elements * read / 16
    assert found.stores.count(128) == elements * written / 16


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one; a rank may be given tensors of another."""
    current, registered, launched = [0], {}, []
    register = torch.library.impl

    def exchange(index: int) -> int:
        current.append(current[-1] if index < 0 else index)
        return current[-2]

    def noted(*given: Any, **more: Any) -> Any:
        registered[given[0]] = given[-1]
        return register(*given, **more)

    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    monkeypatch.setattr(torch.library, "impl", noted)
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda _: None)  # there may be one GPU

    def only_of_this_test(total: Tensor, number: int) -> None:
        launched.append((current[-1], number))

    in_triton.operator("total")(only_of_this_test)
    with FakeTensorMode():
        for device in ("cuda:1", "cuda:0", "cpu"):
            launch = registered["megatron_burst::only_of_this_test"]
            launch(torch.empty(2, device=device), 3)
    assert launched == [(1, 3), (0, 3), (0, 3)] and current[-1] == 0


def test_lengths_and_strides_compile_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of documents begin anywhere, where their log-sum-exp is not aligned."""
    monkeypatch.setattr(in_triton, "why_plain", lambda *_: "")
    noted = {name: keys_of(getattr(fused, name)) for name in ("_merge", "_add", "_row_products")}
    for name, keys in noted.items():
        monkeypatch.setattr(fused, name, keys)
    random.seed(0)
    item, q = Item(Kind.D_QUERY, 0), torch.empty(1, 64, 4, 128, dtype=BF16)
    for batch in (1, 2):
        q = torch.empty(batch, 64, 4, 128, dtype=BF16)
        results, output = PartialOutputs(0, q, 128), Item(Kind.OUTPUT, 0)
        sums = Sums(0, {Kind.D_QUERY: (q,)}, WireDtypes())
        for _ in range(20):
            start, stop = sorted(random.sample(range(65), 2))
            rows: Any = Interval(start, stop)
            if random.random() < 0.3:
                rows = RowTable(torch.randperm(64)[: stop - start])
            part = torch.empty(batch, stop - start, 4, 128, dtype=BF16)
            results.add(output, rows, (part, torch.empty(batch, 4, stop - start)))
            sums.add(item, rows, (part,))
            surrogate_factor(part, part)
    assert {name: len(keys.found) for name, keys in noted.items()} == {
        "_merge": 2,  # with a table and without
        "_add": 2,
        "_row_products": 1,
    }


ALL, LATE = Interval(0, 1024), Interval(512, 1024)


def on_fake_gpu(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("rows", [ALL, LATE, None], ids=["all rows", "late rows", "a table"])
def test_a_tile_is_merged_and_added_by_one_kernel_at_ten_bytes_an_element(
    rows: Rows | None,
) -> None:
    with FakeTensorMode():
        rows = rows or RowTable(on_fake_gpu(512, dtype=I64))
        number = rows.length if isinstance(rows, Interval) else len(rows.index)
        q, part = on_fake_gpu(1, 1024, 4, 128), on_fake_gpu(1, number, 4, 128)
        results, output = PartialOutputs(0, q, 128), Item(Kind.OUTPUT, 0)
        sums, item = Sums(0, {Kind.D_QUERY: (q,)}, WireDtypes()), Item(Kind.D_QUERY, 0)
        for _ in range(2):
            results.add(output, ALL, (q, on_fake_gpu(1, 4, 1024, dtype=F32)))
            sums.add(item, ALL, (q,))
        lse = on_fake_gpu(1, 4, number, dtype=F32)
        with Counting() as merging:
            results.add(output, rows, (part, lse))
        with Counting() as adding:
            sums.add(item, rows, (part,))
    assert merging.kernels == {"merge": 1} and adding.kernels == {"add": 1}
    index = 0 if isinstance(rows, Interval) else 8 * len(rows.index)
    assert merging.bytes == {"merge": 10 * part.numel() + 12 * lse.numel() + index}
    assert adding.bytes == {"add": 10 * part.numel() + index}


def test_a_surrogate_takes_two_kernels_at_four_bytes_an_element() -> None:
    with FakeTensorMode():
        dout, out = (on_fake_gpu(1, 1024, 4, 128) for _ in range(2))
        with Counting() as made:
            factor = surrogate_factor(dout, out)
            surrogate_output(dout, factor)
            row_products(dout, out)
    assert made.kernels == {"row_products": 2, "scale_rows": 1}
    bytes_of_one = 4 * out.numel() + 4 * factor.numel()
    assert made.bytes == {"row_products": 2 * bytes_of_one, "scale_rows": bytes_of_one}
