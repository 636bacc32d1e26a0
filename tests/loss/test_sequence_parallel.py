"""Chunks of hidden states that are gathered behind others' products, within the limit. (fast tier)

Nothing is computed: a stand-in for collectives leaves each under way until it is waited for, and
sees what operations do meanwhile.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_burst import linear_cross_entropy
from megatron_burst.loss import products
from tests.loss.test_memory import MIB, K, LiveBytes
from tests.tier import one_in

type Region = tuple[Any, int, int]  # a storage, from where to where


def region(x: Tensor) -> Region:
    assert x.is_contiguous()
    return x.untyped_storage()._cdata, x.storage_offset(), x.storage_offset() + x.numel()


def overlap(x: Tensor, other: Region) -> bool:
    storage, start, end = other
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    first = x.storage_offset()
    return x.untyped_storage()._cdata == storage and first < end and first + last >= start


class Collectives(TorchDispatchMode):
    """Every collective and product in order, and whether memory under way was left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.sent = 0  # bytes that this rank sends
        self._under_way: dict[str, tuple[Region, Region]] = {}
        self._started: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        self.events += [name] * (name in ("mm", "addmm_"))
        names = [argument.name for argument in function._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        for argument in function._schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_iter(named.get(argument.name)):
                views = argument.alias_info is not None and not writes
                if isinstance(x, Tensor) and x.numel() and not views:
                    self._check(name, x, writes)
        return function(*args, **(kwargs or {}))

    def _check(self, name: str, x: Tensor, writes: bool) -> None:
        for flying, (given, output) in self._under_way.items():
            assert not overlap(x, output), f"{name} uses what {flying} is writing"
            assert not (writes and overlap(x, given)), f"{name} writes what {flying} is sending"

    def start(self, kind: str, output: Tensor, given: Tensor, asynchronous: bool) -> Any:
        number = self._started[kind] = self._started.get(kind, -1) + 1
        name = f"{kind} {number}"
        for x, writes in ((output, True), (given, False)):
            self._check(name, x, writes)
        self.sent += min(given.nbytes, output.nbytes) * (max(len(given), len(output)) > 0)
        self.events.append(name)
        self._under_way[name] = region(given), region(output)
        if not asynchronous:
            self._under_way.pop(name)
        return SimpleNamespace(wait=lambda: self._wait(name))

    def _wait(self, name: str) -> None:
        if self._under_way.pop(name, None):
            self.events.append(f"has {name}")


@contextmanager
def collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collectives]:
    monkeypatch.setattr(products, "best_way", lambda *_: products.rounded_parts)
    with Collectives() as seen:
        for kind, name in (
            ("gather", "all_gather_into_tensor"),
            ("reduce", "reduce_scatter_tensor"),
        ):

            def start(
                output: Tensor, given: Tensor, group: Any, async_op: bool = False, kind: str = kind
            ) -> Any:
                if not async_op:
                    return seen.start("statistics", output, given, False)
                return seen.start(kind, output, given, True)

            monkeypatch.setattr(dist, name, start)
        yield seen


def inputs(tokens: int, rows: int, size: int, ranks: int, dtype: torch.dtype) -> Any:
    hidden = torch.randn(tokens // ranks, size, device="meta", dtype=dtype).requires_grad_()
    weight = torch.randn(rows, size, device="meta", dtype=dtype).requires_grad_()
    return hidden, weight, torch.zeros(tokens, device="meta", dtype=torch.long)


def run(tensors: Any, ranks: int, **arguments: Any) -> None:
    group = dist.ProcessGroup(0, ranks)
    linear_cross_entropy(
        *tensors, group=group, sequence_parallel=True, **arguments
    ).sum().backward()


def test_messages_overlap_the_products_of_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(20, 6, 4, 2, torch.float32)  # of a rank: chunks of 4, 4 and 2
    with collectives(monkeypatch) as seen:
        run(tensors, 2, chunk_size=8)
    forward = ["gather 0", "gather 1", "has gather 0", "mm", "gather 2", "has gather 1", "mm"]
    forward += ["has gather 2", "mm", "statistics 0"]
    backward = ["gather 3", "gather 4", "has gather 3", "mm", "addmm_", "mm", "reduce 0"]
    backward += ["gather 5", "has gather 4", "mm", "addmm_", "has reduce 0", "mm", "reduce 1"]
    backward += ["has gather 5", "mm", "addmm_", "has reduce 1", "mm", "reduce 2", "has reduce 2"]
    assert seen.events == [*forward, *backward]
    hidden = tensors[0]
    statistics = 3 * 20 * 4
    assert seen.sent == 3 * hidden.nbytes + statistics  # two gathers and one sum of every token


def test_one_gather_serves_gradients_that_the_forward_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = inputs(20, 6, 4, 2, torch.float32)
    group = dist.ProcessGroup(0, 2)
    options: Any = {"group": group, "sequence_parallel": True, "reduction": "sum"}
    with collectives(monkeypatch) as seen:
        linear_cross_entropy(*tensors, chunk_size=8, **options)
    events = ["gather 0", "gather 1", "has gather 0", "mm", "statistics 0", "addmm_", "mm"]
    events += ["reduce 0", "gather 2", "has gather 1", "mm", "statistics 1", "addmm_"]
    events += ["has reduce 0", "mm", "reduce 1", "has gather 2", "mm", "statistics 2", "addmm_"]
    assert seen.events == [*events, "has reduce 1", "mm", "reduce 2", "has reduce 2"]
    assert seen.sent == 2 * tensors[0].nbytes + 3 * 20 * 4


@pytest.mark.parametrize(
    ("limit", "dtype"), one_in(3, itertools.product([48, 200], [torch.float32, torch.bfloat16]))
)
def test_the_limit_holds_with_all_that_is_gathered(
    monkeypatch: pytest.MonkeyPatch, limit: int, dtype: torch.dtype
) -> None:
    """The hidden states of all tokens alone would take 256 MiB, in bfloat16 half of it."""
    tensors = inputs(32 * K, 4 * K, 2 * K, 8, dtype)
    gradients = sum(x.nbytes for x in tensors[:2])
    with LiveBytes(tensors) as live, collectives(monkeypatch) as seen:
        run(tensors, 8, memory_mb=limit)
    peak = live.peak - gradients - 32 * 32 * K
    assert 0.4 * limit * MIB < peak <= limit * MIB
    assert len({e for e in seen.events if e.startswith("gather")}) > 4, "there are several chunks"
