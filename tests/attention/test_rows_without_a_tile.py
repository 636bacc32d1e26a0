"""Rows that see nothing are in no tile: out 0, lse -inf, no part in any gradient. (fast tier)"""

import torch
from torch import Tensor

from megatron_burst.attention.call import AttentionPlan
from megatron_burst.attention.kv import KeysAndValues
from megatron_burst.attention.launches import launches_of
from megatron_burst.attention.passes import backward, forward
from megatron_burst.attention.sums import PartialOutputs
from megatron_burst.kernels import Kernel
from megatron_burst.plans.schedules.plan import Item, Kind, Plan, Step
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.transport.comm import Communicator
from tests import oracle
from tests.attention.cases import errors
from tests.kernels.test_kernels import DIM, EVERY_KERNEL, TOLERANCE
from tests.plans.simulator import Tile, blocks_of

TOKENS = 64


def run(tiles: list[Tile], kernel: Kernel, tensors: tuple[Tensor, ...]) -> oracle.Result:
    plan = Plan(0, (Step(blocks=tuple(blocks_of(tiles))),))
    q, k, v, dout = tensors
    (calls,) = launches_of([plan], len(q), q.device)
    communicator = Communicator((), {}, 1)
    call = AttentionPlan(
        *(plan, plan, kernel, DIM**-0.5, communicator),
        forward_launches=calls,
        backward_launches=calls,
    )
    out, lse = forward(q, keys := KeysAndValues(0, k, v), call)
    return oracle.Result(out, lse, *backward(dout, q, keys, out, lse, call)[:3])


def inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, TOKENS, heads, DIM) for heads in (4, 2, 2, 4)]
    return tuple(torch.randn(s, generator=generator).to(device, dtype) for s in shapes)


@EVERY_KERNEL
def test_rows_that_a_plan_leaves_out(kernel: Kernel, device: str, dtype: torch.dtype) -> None:
    tiles = [
        Tile(0, 0, Interval(16, 48), Interval(0, 16), Band.FULL),
        Tile(0, 0, Interval(16, 48), Interval(16, 48), Band.CAUSAL),
    ]
    q, k, v, dout = inputs(device, dtype)
    out, lse, dq, dk, dv, _ = run(tiles, kernel, (q, k, v, dout))
    rows = slice(16, 48)
    for blind in (slice(0, 16), slice(48, TOKENS)):
        assert not out[:, blind].any() and not dq[:, blind].any()
        assert lse[:, :, blind].isneginf().all()
    assert not dk[:, 48:].any() and not dv[:, 48:].any()

    visible = torch.ones(32, 48, dtype=torch.bool, device=device).tril(16)
    expected = oracle.attention(q[:, rows], k[:, :48], v[:, :48], dout[:, rows], visible)
    found = oracle.Result(out[:, rows], lse[:, :, rows], dq[:, rows], dk[:, :48], dv[:, :48])
    assert max(errors(found, expected).values()) < 2 * TOLERANCE[dtype]


@EVERY_KERNEL
def test_a_plan_without_a_tile(kernel: Kernel, device: str, dtype: torch.dtype) -> None:
    out, lse, *gradients, _ = run([], kernel, inputs(device, dtype))
    assert not out.any() and lse.isneginf().all()
    assert all(gradient.dtype == dtype and not gradient.any() for gradient in gradients)


def test_nothing_and_nothing_is_nothing() -> None:
    """Of a visitor's rows that have seen no key, where their owner has not met any either."""
    results = PartialOutputs(0, torch.empty(1, 3, 2, 4), 4)
    nothing = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -torch.inf)
    for _ in range(2):
        results.take(Item(Kind.OUTPUT, 0), nothing, {})
    assert all(map(torch.equal, results.finish(), nothing))
