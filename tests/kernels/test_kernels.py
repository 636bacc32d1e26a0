"""The contract of a kernel, for each one on the devices that can run it here. (fast tier)"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst.attention.surrogate import surrogate_factor, surrogate_output
from megatron_burst.kernels import (
    KERNELS,
    Kernel,
    KernelInput,
    Request,
    cpu,
    passed_over,
    select_kernel,
)
from megatron_burst.kernels.padded import PaddedKernel
from megatron_burst.kernels.protocol import Packing
from megatron_burst.plans.visibility.band import Band
from tests import oracle

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1e-2}
DEVICES = ("cpu", "cuda")
HEADS = {"mha": (4, 4), "gqa": (8, 2), "mqa": (4, 1)}
BANDS = {
    "full": (Band.FULL, 24, 40),
    "causal": (Band.CAUSAL, 32, 32),
    "window": (Band(7, 0), 32, 32),
    "band of more keys": (Band(2, 20), 24, 40),
    "band of more queries": (Band(20, 3), 40, 24),
    "left": (Band(5, None), 32, 32),
    "right": (Band(None, 17), 24, 40),
    "right, of the last corner": (Band(None, 16), 24, 40),
}
DIM = 16
SOFT_CAP = 1.5
CPU = "cpu", torch.float32


def reasons(kernel: Kernel, device: str, dtype: torch.dtype) -> list[str]:
    if device == "cuda" and not torch.cuda.is_available():
        return ["there is no CUDA device"]
    return kernel.reasons_against(Request(torch.device(device), dtype, 4, 4, DIM, DIM))


def visible(band: Band, queries: int, keys: int, device: str, corner: int = 0) -> Tensor:
    """A tile's mask by the definition of its band, the diagonal from key `corner` on."""
    left, right = (math.inf if side is None else side for side in (band.left, band.right))
    rows = [[-left <= k - q - corner <= right for k in range(keys)] for q in range(queries)]
    return torch.tensor(rows, device=device)


def skip_without(kernel: Kernel, device: str, dtype: torch.dtype, **more: Any) -> None:
    """Skip what the kernel says it does not have; flash-attn's stand-ins run where it would not."""
    if kernel.name.startswith("flash") and device == "cpu":
        return
    request = replace(Request(torch.device(device), dtype, 4, 4, DIM, DIM), **more)
    if against := kernel.reasons_against(request):
        pytest.skip("; ".join(against))


def combinations() -> Iterator[object]:
    """Every kernel with every device and dtype; what cannot run is skipped with its reasons.

    Of a kernel that runs nowhere here, one line is enough.
    """
    for name, kernel in KERNELS.items():
        cases = list(itertools.product(DEVICES, DTYPES))
        running = [case for case in cases if not reasons(kernel, *case)]
        for device, dtype in running or cases[-1:]:
            why = "; ".join(reasons(kernel, device, dtype))
            mark = pytest.mark.skipif(bool(why), reason=f"{name}: {why}")
            case_id = f"{name}-{device}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(kernel, device, dtype, id=case_id, marks=mark)


EVERY_KERNEL = pytest.mark.parametrize(("kernel", "device", "dtype"), list(combinations()))


def draw(tokens: int, heads: int, device: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Rows of a longer tensor, as the loops slice them.
    whole = torch.randn(2, tokens + 7, heads, DIM, generator=generator).to(device, dtype)
    return whole[:, 3 : 3 + tokens]


def sliced_rows(lse_BHS: Tensor) -> Tensor:
    """The same values as a slice of a longer tensor, as the backward loop passes them."""
    longer = torch.nn.functional.pad(lse_BHS, (2, 5), value=float("nan"))
    return longer[:, :, 2 : 2 + lse_BHS.shape[2]]


@pytest.fixture
def several_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU kernel cuts the tiles here, the last stripe shorter than the others."""
    monkeypatch.setattr(cpu, "_STRIPE_ROWS", 9)


def compare(
    kernel: Kernel, tile: KernelInput, dout: Tensor, expected: oracle.Result, least: float = 1e-300
) -> tuple[Tensor, ...]:
    """Forward and backward against the oracle; an error is relative to `least` or more."""
    out, lse = kernel.forward(tile)
    found = oracle.Result(out, lse, *kernel.backward(tile, dout, out, sliced_rows(lse)))
    assert lse.dtype in (torch.float32, torch.float64)
    assert {x.dtype for x in (out, *found[2:5])} == {tile.q.dtype}
    for name in oracle.Result._fields[:5]:
        of_kernel, wanted = getattr(found, name), getattr(expected, name)
        assert of_kernel.shape == wanted.shape
        error = oracle.relative_error(of_kernel, wanted, at_least=least)
        assert error < TOLERANCE[tile.q.dtype], (name, error)
    return found[:5]


@pytest.mark.usefixtures("several_stripes")
@EVERY_KERNEL
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("band", "queries", "keys"), BANDS.values(), ids=BANDS)
def test_a_tile_equals_the_oracle(
    kernel: Kernel,
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    band: Band,
    queries: int,
    keys: int,
) -> None:
    skip_without(kernel, device, dtype, is_banded=band.is_banded(queries, keys))
    q, dout = (draw(queries, heads[0], device, dtype, seed) for seed in (0, 1))
    k, v = (draw(keys, heads[1], device, dtype, seed) for seed in (2, 3))
    expected = oracle.attention(q, k, v, dout, visible(band, queries, keys, device))
    compare(kernel, KernelInput(q, k, v, band, DIM**-0.5), dout, expected)


SEVERAL = {  # a square's band, and of each tile the queries and the keys
    "causal": (Band.CAUSAL, ((5, 5), (1, 1), (17, 17), (9, 12))),
    "full": (Band.FULL, ((3, 7), (11, 2), (1, 1))),
    "window": (Band(4, 0), ((3, 3), (20, 20), (6, 10))),
    "one query each": (Band.FULL, ((1, 3), (1, 9))),
}


def packing(lengths: Sequence[tuple[int, int]], device: str, batch: int = 2) -> Packing:
    queries, keys = zip(*lengths, strict=True)
    begins = (torch.tensor([0, *side * batch]).cumsum(0) for side in (queries, keys))
    return Packing(queries, keys, *(x.to(device, torch.int32) for x in begins))


def visible_to_several(band: Band, lengths: Sequence[tuple[int, int]], device: str) -> Tensor:
    """Each tile's queries see keys of the tile alone, counted from its last corner."""
    tiles = (visible(band, queries, keys, device, keys - queries) for queries, keys in lengths)
    return torch.block_diag(*tiles).bool()


@EVERY_KERNEL
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("band", "lengths"), SEVERAL.values(), ids=SEVERAL)
def test_several_tiles_in_one_call_equal_the_oracle(
    kernel: Kernel,
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    band: Band,
    lengths: Sequence[tuple[int, int]],
    value_dim: int = DIM,
) -> None:
    # Where tiles are no squares documents have cut them.
    by_documents = band.right is not None and any(q != k for q, k in lengths)
    more = {"is_banded": band.left is not None, "has_documents": by_documents}
    skip_without(kernel, device, dtype, **more)
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    q, dout = (draw(queries, heads[0], device, dtype, seed) for seed in (0, 1))
    k, v = (draw(keys, heads[1], device, dtype, seed) for seed in (2, 3))
    dout, v = dout[..., :value_dim], v[..., :value_dim]
    expected = oracle.attention(q, k, v, dout, visible_to_several(band, lengths, device))
    call = KernelInput(q, k, v, band, DIM**-0.5, packing=packing(lengths, device))
    # A query that sees one key has no gradient but rounding: compared by the size of dv.
    found = compare(kernel, call, dout, expected, expected.dv.norm().item())
    tensors = (q, k, v, dout, *found)
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)


@EVERY_KERNEL
@pytest.mark.parametrize(("band", "queries", "keys"), BANDS.values(), ids=BANDS)
def test_a_tile_of_a_longer_row_takes_the_finished_out_and_lse(
    kernel: Kernel, device: str, dtype: torch.dtype, band: Band, queries: int, keys: int
) -> None:
    skip_without(kernel, device, dtype, is_banded=band.is_banded(queries, keys))
    # The rows also see `others`, a tile computed elsewhere; the gradients of this tile's keys
    # follow from the lse and the out of the whole row.
    others = 16
    q, dout = (draw(queries, 4, device, dtype, seed) for seed in (0, 1))
    k, v = (draw(others + keys, 4, device, dtype, seed) for seed in (2, 3))
    seen = torch.ones(queries, others + keys, dtype=torch.bool, device=device)
    seen[:, others:] = visible(band, queries, keys, device)
    expected = oracle.attention(q, k, v, dout, seen)
    tile = KernelInput(q, k[:, others:], v[:, others:], band, DIM**-0.5)
    wide = kernel.forward(tile)[1].dtype
    out, lse = expected.out.to(dtype), expected.lse.to(wide)
    _, dk, dv = kernel.backward(tile, dout, out, lse)
    assert oracle.relative_error(dk, expected.dk[:, others:]) < TOLERANCE[dtype]
    assert oracle.relative_error(dv, expected.dv[:, others:]) < TOLERANCE[dtype]


@EVERY_KERNEL
@pytest.mark.parametrize(("band", "queries", "keys"), BANDS.values(), ids=BANDS)
def test_any_out_with_the_same_row_products_serves_the_backward(
    kernel: Kernel, device: str, dtype: torch.dtype, band: Band, queries: int, keys: int
) -> None:
    skip_without(kernel, device, dtype, is_banded=band.is_banded(queries, keys))
    q, dout = (draw(queries, 4, device, dtype, seed) for seed in (0, 1))
    k, v = (draw(keys, 4, device, dtype, seed) for seed in (2, 3))
    tile = KernelInput(q, k, v, band, DIM**-0.5)
    out, lse = kernel.forward(tile)
    surrogate = surrogate_output(dout, surrogate_factor(dout, out))
    assert oracle.relative_error(surrogate, out) > 0.1
    by_out = kernel.backward(tile, dout, out, lse)
    by_surrogate = kernel.backward(tile, dout, surrogate, lse)
    for found, expected in zip(by_surrogate, by_out, strict=True):
        assert oracle.relative_error(found, expected) < TOLERANCE[dtype]


@EVERY_KERNEL
def test_a_soft_cap_equals_the_oracle(kernel: Kernel, device: str, dtype: torch.dtype) -> None:
    skip_without(kernel, device, dtype, soft_cap=SOFT_CAP)
    q, dout = (3 * draw(32, 8, device, dtype, seed) for seed in (0, 1))
    k, v = (draw(32, 2, device, dtype, seed) for seed in (2, 3))
    seen = visible(Band.CAUSAL, 32, 32, device)
    expected = oracle.attention(q, k, v, dout, seen, soft_cap=SOFT_CAP)
    compare(kernel, KernelInput(q, k, v, Band.CAUSAL, DIM**-0.5, SOFT_CAP), dout, expected)
    without = oracle.attention(q, k, v, dout, seen)
    assert oracle.relative_error(expected.out, without.out) > 0.1


@EVERY_KERNEL
def test_results_are_new_tensors(kernel: Kernel, device: str, dtype: torch.dtype) -> None:
    # Whoever gets them writes into them.
    q, k, v, dout = (draw(24, 4, device, dtype, seed) for seed in range(4))
    tile = KernelInput(q, k, v, Band.FULL, DIM**-0.5)
    out, lse = kernel.forward(tile)
    gradients = kernel.backward(tile, dout, out, lse)
    tensors = (q, k, v, dout, out, lse, *gradients)
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
    before = out.clone()
    kernel.forward(tile)[0].zero_()
    assert torch.equal(out, before)


def cpu_request(
    dtype: torch.dtype = torch.float32, dim: int = 16, value_dim: int = 16, **more: Any
) -> Request:
    return Request(torch.device("cpu"), dtype, 4, 2, dim, value_dim, **more)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("name", "taken"), [("auto", "cpu"), ("cpu",) * 2, ("reference",) * 2])
def test_on_a_cpu_auto_takes_its_kernel_and_a_name_that(
    name: str, taken: str, dtype: torch.dtype
) -> None:
    assert select_kernel(name, cpu_request(dtype)) is KERNELS[taken]
    assert KERNELS[taken].name == taken


@pytest.mark.parametrize(
    "request_",
    [cpu_request(torch.int32), cpu_request(dim=12, value_dim=20, soft_cap=2.0)],
    ids=["int", "soft cap"],
)
def test_auto_lists_the_reasons_of_every_backend_and_never_takes_the_reference(
    request_: Request,
) -> None:
    assert KERNELS["reference"].reasons_against(request_) == []
    with pytest.raises(ValueError) as error:
        select_kernel("auto", request_)
    first, *lines = str(error.value).splitlines()
    assert first.startswith("--burst-kernel auto: no kernel can serve Request(")
    assert [line.split(":")[0].strip() for line in lines] == [
        n for n in KERNELS if n != "reference"
    ]
    for line in lines:
        name, listed = line.strip().split(": ", 1)
        assert listed == "; ".join(KERNELS[name].reasons_against(request_)) != ""


@pytest.mark.parametrize(
    ("name", "request_", "reason"),
    [
        ("cudnn", cpu_request(), "the tensors are on cpu"),
        ("aten_flash", cpu_request(), "not bfloat16 or float16"),
        ("cpu", cpu_request(soft_cap=2.0), "it has no soft cap"),
        ("cpu", Request(torch.device("meta"), torch.float32, 4, 2, 8, 8), "tensors are on meta"),
        ("aten_flash", cpu_request(dim=260, value_dim=260), "head size 260 is not a multiple"),
    ],
)
def test_a_named_kernel_that_cannot_serve_fails_with_its_reasons(
    name: str, request_: Request, reason: str
) -> None:
    message = rf"--burst-kernel {name}: no kernel can.*\n  {name}: .*{reason}"
    with pytest.raises(ValueError, match=message):
        select_kernel(name, request_)


def test_an_unknown_kernel_is_refused_with_the_names_of_all() -> None:
    message = "flash9 is unknown; there are: auto, " + ", ".join(KERNELS)
    with pytest.raises(ValueError, match=message):
        select_kernel("flash9", cpu_request())


@pytest.mark.parametrize("sizes", [(16, 8), (8, 16)])
def test_a_kernel_of_one_head_size_is_padded(sizes: tuple[int, int]) -> None:
    request = cpu_request(dim=sizes[0], value_dim=sizes[1])
    assert KERNELS["cpu"].reasons_against(request) == [
        "head sizes of K and V differ ({} and {})".format(*sizes)
    ]
    for name in ("auto", "cpu"):
        kernel = select_kernel(name, request)
        assert isinstance(kernel, PaddedKernel)
        assert kernel.name == "cpu with heads padded to 16"
        assert passed_over(kernel, request).endswith(
            "not cpu: head sizes of K and V differ ({} and {})".format(*sizes)
        )
    assert select_kernel("reference", request) is KERNELS["reference"]


@pytest.mark.parametrize("sizes", [(16, 6), (6, 16)])
@pytest.mark.parametrize("band", [Band.CAUSAL, Band(7, 0)])
def test_a_padded_kernel_equals_the_oracle(sizes: tuple[int, int], band: Band) -> None:
    drawn = (draw(32, heads, *CPU, seed) for seed, heads in enumerate((4, 2, 2, 4)))
    dims = sizes[0], sizes[0], sizes[1], sizes[1]
    q, k, v, dout = (x[..., :dim] for x, dim in zip(drawn, dims, strict=True))
    tile = KernelInput(q, k, v, band, sizes[0] ** -0.5)
    expected = oracle.attention(q, k, v, dout, visible(band, 32, 32, "cpu"))
    found = compare(PaddedKernel(KERNELS["cpu"], 16), tile, dout, expected)
    # What is kept or sent holds no zeros of the padding.
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in found)


@pytest.mark.parametrize(("band", "lengths"), SEVERAL.values(), ids=SEVERAL)
def test_a_padded_kernel_takes_several_tiles(band: Band, lengths: Any) -> None:
    kernel = PaddedKernel(KERNELS["cpu"], DIM)
    test_several_tiles_in_one_call_equal_the_oracle(kernel, *CPU, (4, 2), band, lengths, 6)
