"""The fused kernels as GPUs run them: compiled, and counted on fake tensors.

(fast tier: a head size, one GPU; slow: all)
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst.attention.gradient_accumulation import GradientAccumulator
from megatron_burst.attention.merge import PartialResults
from megatron_burst.attention.rows import RowTable
from megatron_burst.attention.surrogate import row_products, surrogate_factor, surrogate_output
from megatron_burst.kernels import in_triton
from megatron_burst.plans.layout import Interval
from megatron_burst.plans.plan import Item, Kind
from tests.kernels.triton_here import compiled, fused, keys_of

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "merge": (
        fused._merge,
        {"total": F32, "part": BF16, "lse": F32, "part_lse": F32, "index": None},
        {},
    ),
    "merge a table": (
        fused._merge,
        {"total": F32, "part": BF16, "lse": F32, "part_lse": F32, "index": I64},
        {},
    ),
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
        results, sums = PartialResults(q, 128), GradientAccumulator(0, {Kind.D_QUERY: (q,)}, None)
        for _ in range(20):
            start, stop = sorted(random.sample(range(65), 2))
            rows: Any = Interval(start, stop)
            if random.random() < 0.3:
                rows = RowTable(torch.randperm(64)[: stop - start])
            part = torch.empty(batch, stop - start, 4, 128, dtype=BF16)
            results.merge(rows, part, torch.empty(batch, 4, stop - start))
            sums.add(item, rows, (part,))
            surrogate_factor(part, part)
    assert {name: len(keys.found) for name, keys in noted.items()} == {
        "_merge": 2,  # with a table and without
        "_add": 2,
        "_row_products": 1,
    }


class Moved(TorchDispatchMode):
    """Counts kernels, and the bytes that ours read and write, by the rule of `operator`."""

    no_kernel = "empty new_empty empty_like slice alias detach device promote_types".split()

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f.overloadpacket.__name__ not in self.no_kernel:
            self.kernels.append(f.overloadpacket.__name__)
        if f.namespace == "megatron_burst":
            for given, argument in zip(args, f._schema.arguments, strict=True):
                if isinstance(given, Tensor):
                    in_place = argument.alias_info is not None and argument.name[:4] != "out_"
                    self.bytes += (1 + in_place) * given.nbytes
        return f(*args, **(kwargs or {}))


ALL, LATE = Interval(0, 1024), Interval(512, 1024)


def on_fake_gpu(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("rows", [ALL, LATE], ids=["all rows", "late rows"])
def test_a_tile_is_merged_and_added_by_one_kernel_at_ten_bytes_an_element(rows: Interval) -> None:
    with FakeTensorMode():
        q, part = on_fake_gpu(1, 1024, 4, 128), on_fake_gpu(1, rows.length, 4, 128)
        results, item = PartialResults(q, 128), Item(Kind.D_QUERY, 0)
        sums = GradientAccumulator(0, {Kind.D_QUERY: (q,)}, None)
        for _ in range(2):
            results.add(ALL, q, on_fake_gpu(1, 4, 1024, dtype=F32))
            sums.add(item, ALL, (q,))
        lse = on_fake_gpu(1, 4, rows.length, dtype=F32)
        with Moved() as merging:
            results.add(rows, part, lse)
        with Moved() as adding:
            sums.add(item, rows, (part,))
    assert merging.kernels == ["merge"] and adding.kernels == ["add"]
    assert merging.bytes == 10 * part.numel() + 12 * lse.numel()
    assert adding.bytes == 10 * part.numel()


def test_a_surrogate_takes_two_kernels_at_four_bytes_an_element() -> None:
    with FakeTensorMode():
        dout, out = (on_fake_gpu(1, 1024, 4, 128) for _ in range(2))
        with Moved() as made:
            factor = surrogate_factor(dout, out)
            surrogate_output(dout, factor)
            row_products(dout, out)
    assert made.kernels == ["row_products", "scale_rows", "row_products"]
    assert made.bytes == 3 * (4 * out.numel() + 4 * factor.numel())
