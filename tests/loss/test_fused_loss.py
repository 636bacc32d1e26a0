"""The loss by Triton kernels: interpreted on the CPU, compiled, counted on fake CUDA tensors.

(fast tier; most compilations slow)
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst.kernels import in_triton
from megatron_burst.loss import products
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk import InTorch, InTriton, Tokens, workspace
from megatron_burst.loss.chunk_size import Chunking, Sizes
from megatron_burst.loss.loops import Head
from megatron_burst.loss.products import OwnSum
from megatron_burst.loss.tokens import Hidden, HiddenGradient, Spread
from megatron_burst.loss.vocabulary import Targets, Vocabulary
from tests.kernels.triton_here import compiled, interpreted
from tests.loss.oracle import OBJECTIVES, errors, make_case, oracle, ours
from tests.loss.test_kept import with_weights
from tests.loss.test_memory import MIB, K, LiveBytes
from tests.tier import one_in, slow_if

from megatron_burst.kernels import fused_loss  # isort: skip  # after what skips without Triton

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
CLOSE = 1e-6  # of float32
FEW = slow_if({*OBJECTIVES} - {"ignore index", "all with entropy"}, OBJECTIVES)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(in_triton, "why_plain", lambda *_: "")
    with interpreted(fused_loss):
        yield


@pytest.mark.parametrize("objective", FEW)
def test_the_whole_loss_equals_float64(on_the_cpu: None, objective: str) -> None:
    """With gradients made again, and kept."""
    arguments = OBJECTIVES[objective]
    case = make_case(ignore_index=arguments.get("ignore_index", -100))
    found = ours(case, chunk_size=5, **arguments)
    assert max(errors(found, oracle(case, **arguments))) < 2 * CLOSE
    if not arguments.get("entropy"):
        kept = with_weights(case, case.grad, case.grad / 3, chunk_size=5, **arguments)
        assert max(errors(kept, oracle(case, **arguments))) < 2 * CLOSE


class Given:
    """Hidden states that make the logits given, by the unit matrix as the weight."""

    def __init__(self, tokens: int, rows: int, dtype: torch.dtype, call: Call) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.weight, self.call = torch.eye(rows, dtype=dtype), call
        self.logits = (3 * torch.randn(tokens, rows, generator=generator)).to(dtype)
        self.logits[0, -1] = 12  # beyond what the blocks before have
        column = torch.randint(0, rows, (tokens,), generator=generator)
        mine = torch.arange(tokens) % 3 > 0
        self.targets = Targets(column * mine, mine, mine, mine)
        self.grad = torch.randn(tokens, generator=generator)
        self.lse = 3 + torch.rand(tokens, generator=generator)  # of more rows than these
        self.of_entropy = torch.randn(2, tokens, generator=generator) if call.entropy else ()

    def results(self, made: InTorch | InTriton) -> tuple[Tensor, Tensor, Tensor]:
        found, best = made.statistics(self.logits, self.targets)
        of_each = (x.to(found.dtype) for x in (self.lse, self.grad, *self.of_entropy))
        tokens = Tokens(self.logits, *of_each)
        gradient = made.gradient(tokens, self.targets, 2 * len(self.weight))
        assert best is not None or self.call.on_best is None
        return found, found if best is None else best, gradient.narrow

    def doubled(self) -> "Given":
        twin = object.__new__(Given)
        vars(twin).update(vars(self))
        twin.weight, twin.logits = self.weight.double(), self.logits.double()
        return twin


def close(found: Tensor, expected: Tensor, size: Tensor | float) -> bool:
    return bool(((found.double() - expected).abs() <= CLOSE * size).all())


EXTREMES: dict[str, dict[str, Any]] = {
    "all, tightly capped": {"label_smoothing": 0.2, "z_loss": 1e-3, "logit_softcap": 0.5},
    "loosely capped": {"logit_softcap": 300.0, "logit_scale": 0.25},
}


@pytest.mark.parametrize(
    ("objective", "rows", "dtype"),
    one_in(7, itertools.product([*OBJECTIVES, *EXTREMES], [1, 37, 2048, 2100], [F32, BF16])),
)
def test_a_chunk_equals_float64(
    on_the_cpu: None, objective: str, rows: int, dtype: torch.dtype
) -> None:
    """Rows of one block, of two, and such as no load of 16 bytes divides."""
    arguments = {**OBJECTIVES, **EXTREMES}[objective]
    given = Given(3, rows, dtype, Call(on_best=lambda *_: None, **arguments))
    fused = given.results(workspace(given.weight, 3, given.call, slopes=True))
    exact = given.doubled()
    expected = exact.results(InTorch(exact.weight, 3, given.call, slopes=True))
    assert close(fused[0][:3], expected[0][:3], expected[0][:3].abs() + 1)
    assert close(fused[0][3:], expected[0][3:], exact.logits.abs().sum(1) + 1)
    logits = InTorch(exact.weight, 3, given.call, slopes=False)._logits(exact.logits)
    best = logits.gather(1, fused[1][:, None])[:, 0]
    assert close(best, expected[0][0], expected[0][0].abs() + 1)
    # The oracle's own rounding: its 1 - tanh² is 0 where a cap flattens a logit out. Where it
    # nearly does, ours is exp of -10, whose argument's rounding alone is 10 * 2**-24.
    largest = 2 * expected[2].abs().amax(1, keepdim=True) + 2**-52 / CLOSE
    if dtype == F32:
        assert close(fused[2], expected[2], largest)
    else:  # one rounding: the interpreter's to zero, a GPU's to nearest
        assert close(fused[2], expected[2], largest + 2**-7 / CLOSE * expected[2].abs())


def test_a_gradient_that_is_not_a_number_stays_one(on_the_cpu: None) -> None:
    given = Given(3, 37, F32, Call())
    given.grad[1] = torch.nan
    found = given.results(workspace(given.weight, 3, given.call, slopes=True))[2]
    assert found.isnan().all(1).tolist() == [False, True, False]


def test_who_serves(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(8, 8)
    assert isinstance(workspace(weight, 2, Call(), slopes=False), InTriton)
    monkeypatch.undo()
    assert isinstance(workspace(weight, 2, Call(), slopes=False), InTorch)


KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "statistics": (
        fused_loss._statistics,
        {"out": F32, "best": None, "logits": BF16, "column": I64},
        {"ENTROPY": False, "SUMS": False, "CAPPED": False},
    ),
    "all statistics": (
        fused_loss._statistics,
        {"out": F32, "best": I64, "logits": BF16, "column": I64},
        {"ENTROPY": True, "SUMS": True, "CAPPED": True},
    ),
    "gradient": (
        fused_loss._gradient,
        dict.fromkeys(("lse", "grad", "entropy", "grad_entropy"), F32)
        | {"logits": BF16, "column": I64},
        {"CAPPED": True},
    ),
}


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        pytest.param(name, gpu, marks=[pytest.mark.slow] * (gpu != 90 or name == "statistics"))
        for name in KERNELS
        for gpu in (80, 90, 100)
    ],
)
def test_loads_are_wide_and_nothing_is_spilled(name: str, gpu: int) -> None:
    kernel, pointers, constants = KERNELS[name]
    sizes = {"ROWS": 16 * K + 8, "BLOCK": fused_loss._COLUMNS}
    found = compiled(kernel, gpu, pointers, **constants, **sizes)
    assert found.spilled == 0 and found.registers <= 128
    wide = fused_loss._COLUMNS // 128 * BF16.itemsize // 16  # of a thread of 4 warps
    assert found.loads.count(128) == wide
    assert found.stores.count(128) == (wide if name == "gradient" else 0)


class BytesALogit(TorchDispatchMode):
    """The bytes that operations move in tensors of all logits, but for products' operands."""

    some = ("mm", "gather", "scatter_add_")  # which read little of it, or read it to multiply
    none = ("new_empty", "empty_like")

    def __init__(self, logits: int) -> None:
        super().__init__()
        self._logits, self.moved = logits, 0.0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = f.overloadpacket.__name__, f(*args, **(kwargs or {}))
        if f.is_view or f.namespace == "prim" or name in self.none:
            return result
        names = [argument.name for argument in f._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        for argument in f._schema.arguments:
            x = named.get(argument.name)
            if isinstance(x, Tensor) and x.numel() == self._logits:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                only_writes = argument.name == "out" or name == "copy_"
                reads = not (writes and only_writes) and name not in self.some
                self.moved += x.itemsize * (reads + (writes and name not in self.some[1:]))
        return result


def counted(
    tokens: int, rows: int, size: int, **arguments: Any
) -> tuple[float, float, float, int, int]:
    """Bytes a logit: forward, backward, both at once; bytes at the peak and what was foretold."""
    with FakeTensorMode():
        hidden = torch.empty(tokens, size, dtype=BF16, device="cuda")
        weight = torch.empty(rows, size, dtype=BF16, device="cuda")
        targets = torch.empty(1, tokens, dtype=I64, device="cuda")
        call, fused = Call(**arguments), workspace(weight, 1, Call(), slopes=False)
        sizes = Sizes(
            tokens=tokens,
            vocabulary=rows,
            hidden=size,
            dtype=BF16,
            fused=isinstance(fused, InTriton),
            beside=(call.logit_softcap is not None) + call.entropy,
            statistics=call.statistics,
            sums_apart=True,
        )
        spread, chunking = Spread(None, 1), call.chunking(sizes)
        head = Head(weight, call, Vocabulary(rows, None), spread, chunking)
        logits = rows * chunking.tokens
        chunks = -(-tokens // chunking.tokens)
        with LiveBytes((hidden, weight, targets)) as live:
            with BytesALogit(logits) as forward:
                loss, lse, *entropy = head.forward(hidden, targets, None, (True, True))[0]
            with BytesALogit(logits) as backward:
                d_hidden = HiddenGradient(spread, Hidden(hidden), chunking.tokens)
                of_tokens = Hidden(hidden), targets, lse, loss, *entropy, *entropy
                head.gradients(of_tokens, d_hidden, OwnSum(weight))
        with BytesALogit(logits) as both:
            head.forward(hidden, targets, loss, (True, True))
    peak = live.peak - 2 * size * tokens - 16 * tokens  # dW comes when the logits are gone
    moved = forward.moved / chunks, backward.moved / chunks, both.moved / chunks
    return *moved, peak, chunking.peak


@pytest.mark.parametrize("objective", FEW)
def test_six_bytes_a_logit(monkeypatch: pytest.MonkeyPatch, objective: str) -> None:
    """Its product's writing included; what the products of the gradient read is not."""
    monkeypatch.setattr(products, "best_way", lambda *_: products.rounded_parts)
    case: dict[str, Any] = {"tokens": 96, "rows": 640, "size": 8, "chunk_size": 32}
    assert counted(**case, **OBJECTIVES[objective])[:3] == (4, 6, 8)
    monkeypatch.setattr(in_triton, "why_plain", lambda *_: "it is the reference")
    forward, backward, both, *_ = counted(**case, **OBJECTIVES[objective])
    assert forward >= 32 and backward >= 38 and 46 <= both <= forward + backward - 24


def test_the_limit_holds_and_chunks_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "best_way", lambda *_: products.rounded_parts)
    case: dict[str, Any] = {"tokens": 4 * K, "rows": 8 * K, "size": 256, "memory_mb": 32}
    sizes: list[Chunking] = []
    *_, peak, foretold = counted(**case, on_chunking=sizes.append)
    assert 0.9 * foretold < peak <= foretold <= 32 * MIB
    monkeypatch.setattr(in_triton, "why_plain", lambda *_: "it is the reference")
    counted(**case, on_chunking=sizes.append)
    assert sizes[0].tokens > 2 * sizes[1].tokens
