"""Attention calls spread over the ranks of a team, and the dense oracle's answers to them."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.attention.preparing import prepare
from megatron_burst.kernels import KERNELS, KernelInput
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.choice.planning import Choice, choose
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.transport.links import machine_here
from tests import oracle
from tests.plans.masks import Masking
from tests.plans.simulator import bytes_sent
from tests.workers import Team, WorkerPool

FLOAT32_TOLERANCE = 3e-6
LAYOUT_NAMES = ("zigzag", "segmented-zigzag", "contiguous", "striped")
HEADS = {"mha": (4, 4), "gqa 4:1": (8, 2), "gqa 8:1": (8, 1)}

type Traffic = Counter[Channel]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call; what a rank does with it follows from `config` and its team."""

    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    chunk: int = 3  # tokens of half a rank's share
    heads: tuple[int, int] = (4, 2)
    dim: int = 6
    value_dim: int | None = None  # None: as that of queries and keys
    masking: Masking = Masking()
    dtype: torch.dtype = torch.float32
    seed: int = 0
    scale: float | None = None
    soft_cap: float | None = None
    has_sink: bool = False
    layout: Layout | None = None  # given with the call; None: the configuration's

    def layout_of(self, ranks: int) -> Layout:
        own = make_layout(BurstConfig(**self.config), 2 * ranks * self.chunk, ranks)
        return self.layout or own

    def inputs(self, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the whole q, k, v and dout."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.batch, 2 * ranks * self.chunk

        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(*shape, heads, dim, generator=generator).to(self.dtype)

        value_dim = self.value_dim or self.dim
        query_heads, kv_heads = self.heads
        return (
            draw(query_heads, self.dim),
            draw(kv_heads, self.dim),
            draw(kv_heads, value_dim),
            draw(query_heads, value_dim),
        )

    def sink(self) -> Tensor | None:
        if not self.has_sink:
            return None
        generator = torch.Generator().manual_seed(100 + self.seed)
        # From next to nothing to more than all the keys together.
        return 3 * torch.randn(self.heads[0], generator=generator)

    def expected(self, ranks: int) -> oracle.Result:
        visible = self.masking.visible(2 * ranks * self.chunk)
        return oracle.attention(
            *self.inputs(ranks), visible, scale=self.scale, soft_cap=self.soft_cap, sink=self.sink()
        )

    @property
    def mask(self) -> Mask:
        return self.masking.mask

    @property
    def shape(self) -> Shape:
        dims = self.dim, self.value_dim or self.dim
        sent_as = BurstConfig(**self.config).grad_dtype
        rows = self.batch * 2 * self.chunk
        return Shape.of(rows, self.heads, dims, self.dtype.itemsize, sent_as)

    def choice(self, ranks: int) -> Choice:
        tiling = Tiling(self.layout_of(ranks), self.mask)
        return choice_of(BurstConfig(**self.config), tiling, self.shape)

    def planned_bytes(self, ranks: int) -> list[tuple[int, ...]]:
        return planned_bytes(self.choice(ranks), self.shape, 2 * self.chunk)

    def one_kernel_call(self, ranks: int, kernel_name: str, device: str = "cpu") -> oracle.Result:
        """The same by one call of a kernel for the whole sequence."""
        q, k, v, dout = (x.to(device) for x in self.inputs(ranks))
        band = Band.CAUSAL if self.mask.is_causal else Band.FULL
        kernel, tile = KERNELS[kernel_name], KernelInput(q, k, v, band, self.dim**-0.5)
        out, lse = kernel.forward(tile)
        gradients = kernel.backward(tile, dout, out, lse)
        return oracle.Result(*(x.cpu() for x in (out, lse, *gradients)))


def choice_of(config: BurstConfig, tiling: Tiling, shape: Shape) -> Choice:
    """What ranks take whose numbers begin with a node."""
    nodes = [rank // (config.ranks_per_node or tiling.ranks) for rank in range(tiling.ranks)]
    grid, _ = choose_grid(config.shape_of_rings, nodes)
    links = Links.of(nodes, shape, machine_here(), 1)
    return choose(config, tiling, grid, shape, nodes, links=links)


def planned_bytes(choice: Choice, shape: Shape, local_tokens: int) -> list[tuple[int, ...]]:
    """What each rank sends forward and backward by the plans of a choice."""
    sizes = [shape.item_bytes(backward=backward) for backward in (False, True)]
    both = local_tokens, local_tokens
    ranks = range(choice.tiling.ranks)
    return [tuple(map(bytes_sent, choice.plans(rank), sizes, both)) for rank in ranks]


@dataclass(frozen=True)
class Reply:
    """What one rank has to say of a case."""

    results: tuple[Tensor, ...]  # its rows of out, lse, dq, dk and dv, all with the tokens second
    dsink: Tensor  # its part
    forward: Traffic
    backward: Traffic
    grid: str

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes, forward and backward."""
        return self.forward.total(), self.backward.total()


type MakeContext = Callable[[Team, BurstConfig], BurstContext]


def answer(
    team: Team, cases: Sequence[Case], device: str = "cpu", make_context: MakeContext = Team.context
) -> list[Reply]:
    """One rank's part in the cases, one after the other."""
    contexts: dict[str, BurstContext] = {}
    replies = []
    for case in cases:
        if str(case.config) not in contexts:
            contexts[str(case.config)] = make_context(team, BurstConfig(**case.config))
        context = contexts[str(case.config)]
        layout, whole = case.layout_of(context.ranks), case.inputs(context.ranks)
        q, k, v, dout = (layout.shard(x, context.rank, dim=1).to(device) for x in whole)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        sink = case.sink()
        if sink is not None:
            sink = sink.to(device).requires_grad_()
        sent = context.communicator.bytes_by_channel
        before = sent.copy()
        out, lse = ring_attention(
            *(q, k, v, context),
            mask=case.mask,
            softmax_scale=case.scale,
            soft_cap=case.soft_cap,
            sink=sink,
            layout=case.layout,
            return_lse=True,
        )
        between = sent.copy()
        out.backward(dout)
        assert q.grad is not None and k.grad is not None and v.grad is not None
        results = (out.detach(), lse.transpose(1, 2), q.grad, k.grad, v.grad)
        dsink = torch.zeros(0) if sink is None or sink.grad is None else sink.grad.cpu()
        traffic = between - before, sent - between
        replies.append(Reply(tuple(x.cpu() for x in results), dsink, *traffic, str(context.grid)))
    return replies


@dataclass(frozen=True)
class Answer:
    """The whole results of a case, put together, and every rank's reply."""

    found: oracle.Result
    replies: list[Reply]


def run_cases(
    workers: WorkerPool,
    ranks: int | Sequence[int],
    cases: Sequence[Case],
    *,
    device: str = "cpu",
    make_context: MakeContext = Team.context,
) -> list[Answer]:
    by_rank = workers.run(ranks, answer, cases, device, make_context)
    return put_together(cases, by_rank)


def put_together(cases: Sequence[Case], by_rank: Sequence[Sequence[Reply]]) -> list[Answer]:
    by_case = zip(*by_rank, strict=True)
    return [
        Answer(_join(case, replies), list(replies))
        for case, replies in zip(cases, by_case, strict=True)
    ]


def _join(case: Case, replies: Sequence[Reply]) -> oracle.Result:
    layout = case.layout_of(len(replies))
    out, lse, dq, dk, dv = (
        layout.unshard([reply.results[i] for reply in replies], dim=1) for i in range(5)
    )
    dsink = torch.stack([reply.dsink for reply in replies]).sum(0)
    return oracle.Result(out, lse.transpose(1, 2), dq, dk, dv, dsink)


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the context says in the meantime; pytest's own capture does not reach the workers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_burst.attention")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def lines_of_plans(team: Team, case: Case) -> list[str]:
    """What is logged of two calls."""
    with logged() as lines:
        context = team.context(BurstConfig(**case.config))
        q, k, v, _ = (context.shard(x, dim=1) for x in case.inputs(context.ranks))
        for _ in range(2):
            prepare(context, q, k, v, case.mask, 1.0)
    return lines


def errors(
    found: oracle.Result, expected: oracle.Result, at_least: float = 1e-300
) -> dict[str, float]:
    return {
        name: oracle.relative_error(getattr(found, name), x, at_least)
        for name, x in expected._asdict().items()
    }


def check_results(case: Case, answer: Answer) -> None:
    """They are the oracle's, under masks that may leave little."""
    expected = case.expected(len(answer.replies))
    # A query that sees one key alone has no gradient; what comes out is rounding of dO · V.
    worst = errors(answer.found, expected, max(expected.dv.norm().item(), 1e-300))
    assert max(worst.values()) < FLOAT32_TOLERANCE, (case, worst)


def check(cases: Sequence[Case], ranks: int, workers: WorkerPool) -> list[Answer]:
    answers = run_cases(workers, ranks, cases)
    for case, answer in zip(cases, answers, strict=True):
        check_results(case, answer)
    return answers


def variants(
    topologies: Sequence[str], grad_dtypes: Sequence[str] = ("float32",)
) -> list[dict[str, Any]]:
    """Every setting that changes what is sent or computed.

    Where all is float32, `grad_dtype` changes nothing.
    """
    algorithms = [
        {"algorithm": "burst", "backward": "kv"},
        {"algorithm": "burst", "backward": "query"},
        {"algorithm": "ring"},
        {"algorithm": "allgather"},
    ]
    ways = itertools.product(algorithms, topologies, grad_dtypes)
    rings = [
        {**algorithm, "topology": topology, "grad_dtype": dtype}
        for algorithm, topology, dtype in ways
    ]
    return [*rings, {"algorithm": "ulysses"}]
