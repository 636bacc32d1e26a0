"""A row without a visible key: out 0, lse -inf, and no part in any gradient. (fast tier)"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig
from megatron_burst.attention.backward import backward
from megatron_burst.attention.context import AttentionCall
from megatron_burst.attention.forward import forward
from megatron_burst.attention.merge import PartialResults
from megatron_burst.kernels import KERNELS, Kernel
from megatron_burst.plans.layout import Interval
from megatron_burst.plans.mask import Relation
from megatron_burst.plans.plan import Plan, Step, Tile
from megatron_burst.transport.comm import Communicator
from tests import oracle
from tests.attention.cases import FLOAT32_TOLERANCE, Case, errors
from tests.kernels.test_kernels import DIM, EVERY_KERNEL, TOLERANCE
from tests.workers import Team, WorkerPool

TOKENS = 64
INF = float("inf")


def tile(rows: tuple[int, int], keys: tuple[int, int], relation: Relation) -> Tile:
    return Tile(0, 0, Interval(*rows), Interval(*keys), relation)


def call_of(forward: list[Tile], backward: list[Tile], kernel: Kernel) -> AttentionCall:
    plans = (Plan(0, (Step(tiles=tuple(tiles)),)) for tiles in (forward, backward))
    return AttentionCall(*plans, kernel, DIM**-0.5, Communicator((), {}, 1))


def draw(heads: int, device: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, TOKENS, heads, DIM, generator=generator).to(device, dtype)


def inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(draw(h, device, dtype, seed) for seed, h in enumerate((4, 2, 2, 4)))


def run(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    out, lse = forward(q, k, v, call)
    return out, lse, backward(dout, q, k, v, out, lse, call)


SEEN = [tile((16, 48), (0, 16), Relation.FULL), tile((16, 48), (16, 48), Relation.CAUSAL)]
# In the backward blind rows may well share a tile with others.
SHARED = [tile((0, TOKENS), (0, 16), Relation.FULL), tile((0, TOKENS), (16, 48), Relation.FULL)]


@EVERY_KERNEL
@pytest.mark.parametrize("shared", [False, True], ids=["left out", "in a shared tile"])
def test_rows_that_a_plan_leaves_out(
    kernel: Kernel, device: str, dtype: torch.dtype, shared: bool
) -> None:
    ahead = [replace(t, relation=Relation.FULL) for t in SEEN] if shared else SEEN
    call = call_of(ahead, SHARED if shared else SEEN, kernel)
    q, k, v, dout = inputs(device, dtype)
    out, lse, gradients = run(call, q, k, v, dout)
    dq, dk, dv = gradients
    rows = slice(16, 48)
    for blind in (slice(0, 16), slice(48, TOKENS)):
        assert not out[:, blind].any() and not dq[:, blind].any()
        assert lse[:, :, blind].isneginf().all()
    assert not dk[:, 48:].any() and not dv[:, 48:].any()

    visible = torch.ones(32, 48, dtype=torch.bool, device=device)
    if not shared:
        visible[:, 16:] = visible[:, 16:].tril()
    expected = oracle.attention(q[:, rows], k[:, :48], v[:, :48], dout[:, rows], visible)
    found = oracle.Result(out[:, rows], lse[:, :, rows], dq[:, rows], dk[:, :48], dv[:, :48])
    assert max(errors(found, expected).values()) < 2 * TOLERANCE[dtype]


@EVERY_KERNEL
def test_a_plan_without_a_tile(kernel: Kernel, device: str, dtype: torch.dtype) -> None:
    out, lse, gradients = run(call_of([], [], kernel), *inputs(device, dtype))
    assert not out.any() and lse.isneginf().all()
    assert all(gradient.dtype == dtype and not gradient.any() for gradient in gradients)


@EVERY_KERNEL
@pytest.mark.parametrize("relation", [Relation.FULL, Relation.CAUSAL])
def test_a_kernels_backward_adds_exact_zeros_for_an_lse_of_inf(
    kernel: Kernel, device: str, dtype: torch.dtype, relation: Relation
) -> None:
    q, k, v, dout = inputs(device, dtype)
    out, lse = kernel.forward(q, k, v, relation, DIM**-0.5)
    blind = torch.zeros_like(lse, dtype=torch.bool)
    blind[:, 1, 5:40] = blind[1, :, ::3] = True
    rows = blind.transpose(1, 2)[..., None]
    # What the loop passes: for blind rows their true output, 0, and any dout.
    dark = kernel.backward(
        dout, q, k, v, out.masked_fill(rows, 0), lse.masked_fill(blind, INF), relation, DIM**-0.5
    )
    assert not dark[0].masked_select(rows).any()
    # No row is left: not one value of any gradient.
    none = kernel.backward(
        dout, q, k, v, torch.zeros_like(out), torch.full_like(lse, INF), relation, DIM**-0.5
    )
    assert not any(gradient.any() for gradient in none)
    # The others are as if the blind rows' dout were 0.
    light = kernel.backward(dout.masked_fill(rows, 0), q, k, v, out, lse, relation, DIM**-0.5)
    for found, expected in zip(dark, light, strict=True):
        assert oracle.relative_error(found, expected) < TOLERANCE[dtype]


MARK = 100.0


class FlashLike:
    """Sees nothing in rows whose query begins with MARK, and says so as flash-attn does."""

    name = "flash_like"

    def __init__(self, kernel: Kernel, lse_of_nothing: float) -> None:
        self._kernel, self._lse_of_nothing = kernel, lse_of_nothing

    def reasons_against(self, _: object) -> list[str]:
        return []

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        relation: Relation,
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._kernel.forward(q, k, v, relation, scale, soft_cap=soft_cap)
        blind = q[..., :1] == MARK
        lse_BHS = lse.masked_fill(blind[..., 0].transpose(1, 2), self._lse_of_nothing)
        return out.masked_fill(blind, float("nan")), lse_BHS

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        relation: Relation,
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._kernel.backward(dout, q, k, v, out, lse, relation, scale, soft_cap=soft_cap)


def marked(q: Tensor) -> Tensor:
    q = q.clone()
    q[:, 3:9, 1, 0] = q[:, -2:, :, 0] = q[:, ::7, 0, 0] = MARK
    return q


def expect(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> oracle.Result:
    """Blind rows have no part in a gradient, just as if nothing came back to them."""
    blind = q[..., :1] == MARK
    visible = oracle.visible_pairs(q.shape[1], causal=True)
    seen = oracle.attention(q, k, v, dout.masked_fill(blind, 0), visible)
    return seen._replace(
        out=seen.out.masked_fill(blind, 0),
        lse=seen.lse.masked_fill(blind[..., 0].transpose(1, 2), -INF),
    )


def check(found: oracle.Result, expected: oracle.Result) -> None:
    blind = expected.lse.isneginf()
    assert blind.any() and torch.equal(found.lse.isneginf(), blind)
    rows = blind.transpose(1, 2)[..., None]
    assert not found.out.masked_select(rows).any() and not found.dq.masked_select(rows).any()
    found, expected = (x._replace(lse=x.lse.masked_fill(blind, 0)) for x in (found, expected))
    assert max(errors(found, expected).values()) < FLOAT32_TOLERANCE


ONE_TILE = [tile((0, TOKENS), (0, TOKENS), Relation.CAUSAL)]
THREE_TILES = [
    tile((0, 32), (0, 32), Relation.CAUSAL),
    tile((32, 64), (0, 32), Relation.FULL),
    tile((32, 64), (32, 64), Relation.CAUSAL),
]


@pytest.mark.parametrize("lse_of_nothing", [INF, -INF])
@pytest.mark.parametrize("tiles", [ONE_TILE, THREE_TILES], ids=["one tile", "three tiles"])
def test_a_kernel_may_return_anything_for_them(tiles: list[Tile], lse_of_nothing: float) -> None:
    q, k, v, dout = inputs("cpu", torch.float32)
    q = marked(q)
    kernel = FlashLike(KERNELS["cpu"], lse_of_nothing)
    out, lse, gradients = run(call_of(tiles, tiles, kernel), q, k, v, dout)
    check(oracle.Result(out, lse, *gradients), expect(q, k, v, dout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["dark first", "light first"])
def test_what_one_tile_does_not_see_another_may(dtype: torch.dtype, order: tuple[int, int]) -> None:
    out = torch.randn(1, 4, 2, 8).to(dtype)
    lse = torch.randn(1, 2, 4)
    dark = (torch.full_like(out, float("nan")), torch.full_like(lse, INF))
    results = PartialResults(out, 8)
    for number in order:
        results.add(Interval(0, 4), *((dark, (out.clone(), lse.clone()))[number]))
    found = results.finish()
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def attend_marked(team: Team, case: Case) -> tuple[Tensor, ...]:
    context = team.context(BurstConfig(**case.config))
    q, k, v, dout = case.inputs(context.ranks)
    q, k, v, dout = (context.shard(x, dim=1) for x in (marked(q), k, v, dout))
    call = context.prepare(q, k, v, case.mask, case.dim**-0.5)
    call = replace(call, kernel=FlashLike(call.kernel, INF))
    out, lse = forward(q, k, v, call)
    results = out, lse.transpose(1, 2), *backward(dout, q, k, v, out, lse, call)
    return tuple(context.unshard(x, dim=1) for x in results)


@pytest.mark.parametrize("topology", ["flat", "double"])
@pytest.mark.parametrize("backward_ring", ["kv", "query"])
def test_they_may_travel(workers: WorkerPool, backward_ring: str, topology: str) -> None:
    config = {"backward": backward_ring, "topology": topology, "ranks_per_node": 2}
    case = Case(config=config)
    for out, lse, dq, dk, dv in workers.run(4, attend_marked, case):
        q, k, v, dout = case.inputs(4)
        check(oracle.Result(out, lse.transpose(1, 2), dq, dk, dv), expect(marked(q), k, v, dout))
