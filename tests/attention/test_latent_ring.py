"""Latents that travel in the place of K and V, against dense attention in float64. (fast tier)

Output and the gradients of queries, latents, rotary keys and the up-projection; counted bytes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, latent_ring_attention, ring_attention
from megatron_burst.attention.kv import Latents, expand
from megatron_burst.attention.saved import AttentionMemory
from megatron_burst.attention.sums import Sums
from megatron_burst.kernels import KERNELS, KernelInput
from megatron_burst.plans.choice import kv_or_latents
from megatron_burst.plans.choice.cost import LatentShape, Shape
from megatron_burst.plans.choice.kv_or_latents import latents_pay
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.choice.machine import H100
from megatron_burst.plans.choice.planning import choose
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.reference.dense import Visibility
from megatron_burst.reference.verify import Finding, attend_beside_reference
from tests import oracle
from tests.attention.cases import FLOAT32_TOLERANCE, LAYOUT_NAMES, choice_of, logged, planned_bytes
from tests.attention.faults import lost_gradient, no_fault, replaced
from tests.plans.masks import Masking, hard_maskings
from tests.plans.simulator import bytes_sent
from tests.tier import slow_if, some
from tests.workers import Team, WorkerPool

LATENT = {"mla": "latent"}


class Results(NamedTuple):
    """Whole tensors, tokens second; of the weight's gradient the sum over the ranks."""

    out: Tensor
    dq: Tensor
    dlatent: Tensor
    drotary: Tensor
    dweight: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    chunk: int = 3  # tokens of half a rank's share
    heads: int = 4
    content: int = 5  # of a head's query and key, what is not rotary
    rotary: int = 3
    value: int = 6
    rank: int = 7  # of the latent
    masking: Masking = Masking()
    dtype: torch.dtype = torch.float32

    def inputs(self, ranks: int) -> tuple[Tensor, ...]:
        """Whole q, latent and rotary key, the weight, and dout."""
        generator = torch.Generator().manual_seed(0)
        tokens, rows = 2 * ranks * self.chunk, self.heads * (self.content + self.value)
        shapes = [
            (self.batch, tokens, self.heads, self.content + self.rotary),
            (self.batch, tokens, self.rank),
            (self.batch, tokens, self.rotary),
            (rows, self.rank),
            (self.batch, tokens, self.heads, self.value),
        ]
        made = [torch.randn(shape, generator=generator) for shape in shapes]
        made[3] /= self.rank**0.5
        return tuple(x.to(self.dtype) for x in made)

    def expected(self, ranks: int) -> Results:
        inputs = self.inputs(ranks)
        visible = self.masking.visible(inputs[0].shape[1])
        return Results(*oracle.latent_attention(*inputs, visible))

    def one_kernel_call(self, ranks: int) -> Results:
        """The same by one call of the CPU's kernel, K and V made of the whole sequence."""
        *inputs, dout = self.inputs(ranks)
        q, latent, rotary, weight = (x.requires_grad_() for x in inputs)
        k, v = expand(latent[:, :, None], rotary[:, :, None], weight, self.heads, self.value)
        size = q.shape[3]
        padded = torch.nn.functional.pad(v, (0, size - self.value)).detach()
        kernel = KERNELS["cpu"]
        tile = KernelInput(q.detach(), k.detach(), padded, Band.CAUSAL, size**-0.5)
        out, lse = kernel.forward(tile)
        wide_dout = torch.nn.functional.pad(dout, (0, size - self.value))
        dq, dk, dv = kernel.backward(tile, wide_dout, out, lse)
        made = torch.autograd.grad((k, v), (latent, rotary, weight), (dk, dv[..., : self.value]))
        return Results(out[..., : self.value], dq, *made)


@dataclass(frozen=True)
class Reply:
    results: Results  # of this rank
    sent: tuple[int, int]
    grid: str
    log: list[str]


def answer(team: Team, cases: Sequence[Case]) -> list[Reply]:
    """One rank's part in the cases, one after the other."""
    return [answer_one(team, case) for case in cases]


def answer_one(team: Team, case: Case) -> Reply:
    context = team.context(BurstConfig(**{**LATENT, **case.config}))
    *inputs, weight, dout = case.inputs(context.ranks)
    leaves = [context.shard(x, dim=1).requires_grad_() for x in inputs]
    leaves.append(weight.requires_grad_())
    mask = case.masking.mask
    with logged() as lines:
        out = latent_ring_attention(*leaves, context, mask=mask)
    between = context.bytes_sent
    out.backward(context.shard(dout, dim=1))
    gradients = [x.grad for x in leaves]
    results = Results(out.detach(), *(g for g in gradients if g is not None))
    return Reply(results, (between, context.bytes_sent - between), str(context.grid), lines)


type Answering = Callable[[Team, Sequence[Case]], list[Reply]]


def answer_as_if_latents_pay(team: Team, cases: Sequence[Case]) -> list[Reply]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_or_latents, "latents_pay", lambda *_: True)
        return answer(team, cases)


def run(
    workers: WorkerPool, ranks: int, cases: Sequence[Case], function: Answering = answer
) -> list[tuple[Results, list[Reply]]]:
    by_case = [list(of) for of in zip(*workers.run(ranks, function, cases), strict=True)]
    return [(whole(c, replies), replies) for c, replies in zip(cases, by_case, strict=True)]


def whole(case: Case, replies: Sequence[Reply]) -> Results:
    tokens = 2 * len(replies) * case.chunk
    layout = make_layout(BurstConfig(**case.config), tokens, len(replies))
    *by_token, dweights = zip(*(reply.results for reply in replies), strict=True)
    joined = [layout.unshard(parts, dim=1) for parts in by_token]
    return Results(*joined, torch.stack([x.double() for x in dweights]).sum(0))


def errors(found: Results, expected: Results) -> dict[str, float]:
    # A query that sees one key alone has no gradient; what comes out is rounding.
    least = max(expected.dlatent.norm().item(), 1e-300)
    named = zip(Results._fields, found, expected, strict=True)
    return {name: oracle.relative_error(*pair, at_least=least) for name, *pair in named}


PLACES = {
    "2 on a node": (2, 8),
    "3 on a node": (3, 8),
    "4 on a node": (4, 8),
    "2 nodes x 2": (4, 2),
    "3 nodes x 2": (6, 2),
    "2 nodes x 4": (8, 4),
    "4 nodes x 2": (8, 2),
    "8 on a node": (8, 8),
    "5 on a node": (5, 8),
    "7 on a node": (7, 8),
}
FAST = {"3 on a node", "2 nodes x 2"}
EVERY_PLACE = pytest.mark.parametrize("name", slow_if({*PLACES} - FAST, PLACES))
WAYS = [
    {"backward": sent, "topology": topology}
    for sent, topology in itertools.product(("kv", "query"), ("flat", "double"))
]
MESHES = [{**way, "topology": "mesh"} for way in WAYS[::2]]


def cases_of(ranks: int, per_node: int) -> list[Case]:
    maskings = [Masking(), Masking(False), *hard_maskings(ranks, 4).values()]
    cases = []
    for number, masking in enumerate(maskings):
        config = WAYS[number % len(WAYS)] | {"layout": LAYOUT_NAMES[number % 3 and number % 4]}
        shape = {"batch": 2, "heads": 3, "value": 4} if number % 2 else {}
        cases.append(
            Case(config=config | {"ranks_per_node": per_node}, chunk=4, masking=masking, **shape)
        )
    plain = [Case(config=way | {"ranks_per_node": per_node}, chunk=5, heads=2) for way in WAYS]
    return [*plain, *some(cases, 4, 1)]


@EVERY_PLACE
def test_float32_equals_dense_attention_and_bytes_equal_the_plans(
    workers: WorkerPool, name: str
) -> None:
    check(workers, PLACES[name][0], cases_of(*PLACES[name]))


def test_meshes_send_latents_too(workers: WorkerPool) -> None:
    cases = [Case(config=way | {"ranks_per_node": 8}, chunk=5, heads=2) for way in MESHES]
    check(workers, 4, cases)


def test_a_visitor_that_comes_twice_is_read_where_it_is(workers: WorkerPool) -> None:
    """In a mesh, a step later, to another place; the first is others' by then."""
    config = {"backward": "kv", "topology": "mesh", "ranks_per_node": 2}
    check(workers, 8, [Case(config=config, chunk=8, heads=2, masking=Masking(window=42))])


def check(workers: WorkerPool, ranks: int, cases: Sequence[Case]) -> None:
    for case, (found, replies) in zip(cases, run(workers, ranks, cases), strict=True):
        worst = errors(found, case.expected(ranks))
        assert max(worst.values()) < FLOAT32_TOLERANCE, (case, worst)
        config = BurstConfig(**{**LATENT, **case.config})
        tiling = Tiling(make_layout(config, 2 * ranks * case.chunk, ranks), case.masking.mask)
        shape = shape_of(case)
        planned = planned_bytes(choice_of(config, tiling, shape), shape, 2 * case.chunk)
        assert [reply.sent for reply in replies] == planned, case


def shape_of(case: Case) -> Shape:
    size = case.rank + case.rotary
    return Shape(
        tokens=case.batch * 2 * case.chunk,
        query_heads=case.heads,
        kv_heads=case.heads,
        head_dim=case.content + case.rotary,
        value_head_dim=case.value,
        element_bytes=case.dtype.itemsize,
        gradient_bytes=max(4, case.dtype.itemsize),
        row_bytes=max(4, case.dtype.itemsize),
        latents=LatentShape(size, case.heads * (case.content + case.value) * case.rank),
    )


def test_float64_is_exact(workers: WorkerPool) -> None:
    cases = [replace(c, dtype=torch.float64) for c in cases_of(4, 2)[4:8]]
    for case, (found, _) in zip(cases, run(workers, 4, cases), strict=True):
        assert max(errors(found, case.expected(4)).values()) < 1e-14, case


@pytest.mark.parametrize("name", slow_if({"2 nodes x 4"}, ["2 nodes x 2", "2 nodes x 4"]))
def test_bfloat16_is_nearly_as_exact_as_one_call_of_flash_attention(
    workers: WorkerPool, name: str
) -> None:
    ranks, per_node = PLACES[name]
    sizes = {"chunk": 512 // ranks, "content": 24, "rotary": 8, "value": 24, "rank": 48}
    cases = [
        Case(config=way | {"ranks_per_node": per_node}, dtype=torch.bfloat16, **sizes)
        for way in WAYS
        if way["topology"] == "double"
    ]
    expected = cases[0].expected(ranks)
    flash = errors(cases[0].one_kernel_call(ranks), expected)
    for case, (found, _) in zip(cases, run(workers, ranks, cases), strict=True):
        for result, error in errors(found, expected).items():
            assert error <= 1.5 * flash[result], (case, result, error, flash[result])


def test_hops_have_the_bytes_of_the_formula_and_deepseeks_shape_sends_an_eighth() -> None:
    n, ranks = 4096, 8
    tensors = {"head_dim": 192, "value_head_dim": 128, "element_bytes": 2, "gradient_bytes": 4}
    heads = Shape(tokens=n, query_heads=16, kv_heads=16, **tensors)  # of 128, TP 8
    latents = replace(heads, latents=LatentShape(512 + 64, 16 * 256 * 512))
    small, large = latents.item_bytes(), heads.item_bytes()
    assert (small[Kind.KV], small[Kind.D_KV]) == (n * 576 * 2, n * 576 * 4)
    tiling = Tiling(zigzag(n * ranks, ranks), Mask.causal())
    for per_node, pays in ((1, True), (8, False)):
        nodes = [r // per_node for r in range(ranks)]
        grid, _ = choose_grid(BurstConfig().shape_of_rings, nodes)
        with_heads, with_latents = (
            choose(BurstConfig(backward="kv", topology="flat"), tiling, grid, shape, nodes)
            for shape in (heads, latents)
        )
        for rank in range(ranks):
            pairs = zip(with_heads.plans(rank), with_latents.plans(rank), strict=True)
            for theirs, ours in pairs:
                assert 8 * bytes_sent(ours, small) <= bytes_sent(theirs, large)
        # Within a node messages of heads hide under attention, and expanding takes time.
        links = Links.of(nodes, heads, H100, 1)
        assert latents_pay(with_heads, with_latents, links, latents) is pays


@pytest.mark.parametrize(("tokens", "pays"), [(512, True), (768, False)])
def test_expanding_again_in_the_backward_counts(tokens: int, pays: bool) -> None:
    """On 8 ranks of a node; without those FLOPs latents would be worth it at 768 tokens, too."""
    heads = Shape(tokens, 16, 16, 192, 128, 2, 4, sends_raw=True)
    latents = replace(heads, latents=LatentShape(512 + 64, 16 * 256 * 512), sends_raw=False)
    tiling, nodes = Tiling(zigzag(8 * tokens, 8), Mask.causal()), [0] * 8
    grid, _ = choose_grid(BurstConfig().shape_of_rings, nodes)
    choices = [choose(BurstConfig(), tiling, grid, shape, nodes) for shape in (heads, latents)]
    of_devices = replace(H100, hop_seconds=(0.0, 0.0))
    assert latents_pay(*choices, Links.of(nodes, heads, of_devices, 1), latents) is pays


def attend_twice(team: Team, case: Case, fraction: float) -> tuple[Tensor, int, int]:
    """Both passes of a checkpointed call: the largest difference, and the bytes of each."""
    context = team.context(BurstConfig(**{**LATENT, **case.config}))
    *inputs, weight, _ = case.inputs(context.ranks)
    q, latent, rotary = (context.shard(x, dim=1) for x in inputs)
    k, v = expand(latent[:, :, None], rotary[:, :, None], weight, case.heads, case.value)
    made = Latents(latent, weight)
    memory = AttentionMemory(fraction)
    outs, sent = [], [0]
    for _ in range(2):
        given = {"mask": Mask.causal(), "latents": made, "memory": memory}
        outs.append(ring_attention(q, k, v, context, **given))
        sent.append(context.bytes_sent)
    return (outs[0] - outs[1]).abs().max(), sent[1], sent[2] - sent[1]


def test_a_call_in_two_passes_equals_one(workers: WorkerPool) -> None:
    case = Case(chunk=4, config={"layout": "segmented-zigzag", "recompute_fraction": 0.5})
    for difference, first, second in workers.run(2, attend_twice, case, 0.5):
        assert difference < 1e-6 and 0 < second < first


def test_auto_says_what_travels_and_heads_send_heads(workers: WorkerPool) -> None:
    cases = [Case(config={"mla": "heads"}), Case(config={"mla": "auto"}), Case()]
    found = run(workers, 2, cases)
    (_, heads), (_, auto), (_, latent) = found
    assert heads[0].sent[0] == cases[0].heads * (8 + 6) * 6 * 4
    assert latent[0].sent[0] == (7 + 3) * 6 * 4
    assert "latents travel: K and V would send" in latent[0].log[-1]
    assert "travel" not in heads[0].log[-1] and "travel" in auto[0].log[-1]
    for result, _ in found:
        assert max(errors(result, cases[0].expected(2)).values()) < FLOAT32_TOLERANCE


HEAD_PARALLEL = [
    {"algorithm": "ulysses", "mla": "auto"},
    {"algorithm": "ring", "mla": "auto", "topology": "flat", "head_parallel_size": 2},
    *({"mla": mla, "head_parallel_size": 2, "layout": "striped"} for mla in ("auto", "heads")),
]


def test_behind_an_all_to_all_heads_travel(workers: WorkerPool) -> None:
    """There a rank has a part of the heads, and latents have none."""
    cases = [Case(config=c | {"ranks_per_node": 4}, chunk=4, heads=8) for c in HEAD_PARALLEL]
    found_by_case = run(workers, 4, cases, answer_as_if_latents_pay)
    for case, (found, _) in zip(cases, found_by_case, strict=True):
        assert max(errors(found, case.expected(4)).values()) < FLOAT32_TOLERANCE, case


@pytest.fixture
def alone() -> BurstContext:
    return BurstContext.create(BurstConfig(**LATENT))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({3: (43, 7)}, r"\(43, 7\) does not make k and v for q \(1, 6, 4, 8\)"),
        ({3: (44,)}, r"weight must be \[rows, rank\], got \(44,\)"),
        ({1: (6, 7)}, r"latent must be \[batch, tokens, rank\], got \(6, 7\)"),
        ({2: (1, 6, 0)}, r"does not make k and v.* rotary key \(1, 6, 0\)"),
        ({2: (1, 6, 9)}, r"does not make k and v.* rotary key \(1, 6, 9\)"),
        ({1: (1, 4, 7)}, r"does not make k and v.* latent \(1, 4, 7\)"),
        ({0: (1, 6, 0, 8)}, r"must be at least 1; got q \(1, 6, 0, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    alone: BurstContext, changed: dict[int, tuple[int, ...]], message: str
) -> None:
    shapes = dict(enumerate([(1, 6, 4, 8), (1, 6, 7), (1, 6, 3), (44, 7)])) | changed
    with pytest.raises(ValueError, match=message):
        latent_ring_attention(*map(torch.zeros, shapes.values()), alone, mask=Mask.causal())


def test_another_dtype_is_refused(alone: BurstContext) -> None:
    q, latent, rotary, weight, _ = Case().inputs(1)
    with pytest.raises(ValueError, match="q has torch.bfloat16 on cpu, latent has torch.float32"):
        latent_ring_attention(q.bfloat16(), latent, rotary, weight, alone, mask=Mask.causal())
    k, v = expand(latent[:, :, None], rotary[:, :, None], weight, 4, 6)
    qkv, wrong = (x.bfloat16() for x in (q, k, v)), Latents(latent, weight)
    with pytest.raises(ValueError, match="dtype of k and v, torch.bfloat16; .* torch.float32"):
        ring_attention(*qkv, alone, mask=Mask.causal(), latents=wrong)
    ring_attention(q, k, v, alone, mask=Mask.causal(), latents=wrong)
    wider = Latents(latent.double(), weight.double())
    with pytest.raises(ValueError, match="dtype of k and v, torch.float32; .* torch.float64"):
        ring_attention(q, k, v, alone, mask=Mask.causal(), latents=wider)


@pytest.mark.parametrize("rows", [20, 43])
def test_a_weight_that_made_no_such_keys_is_refused(alone: BurstContext, rows: int) -> None:
    q, latent, *_ = Case().inputs(1)
    made_of = Latents(latent, torch.zeros(rows, 7))
    with pytest.raises(ValueError, match=rf"made of a latent .* by a weight \({rows}, 7\)"):
        ring_attention(q, q, q[..., :6], alone, mask=Mask.causal(), latents=made_of)


def verified(team: Team, case: Case, fault: bool) -> dict[str, bool]:
    """Of each tensor that --burst-check reference looks at, whether it is wrong on this rank."""
    context = team.context(BurstConfig(**LATENT))
    *inputs, weight, dout = case.inputs(context.ranks)
    q, latent, rotary, dout = (context.shard(x, dim=1) for x in (*inputs, dout))
    q, latent, rotary, weight = (x.requires_grad_() for x in (q, latent, rotary, weight))
    k, v = expand(latent[:, :, None], rotary[:, :, None], weight, case.heads, case.value)
    wrong: dict[str, bool] = {}

    def take(_: bool, findings: list[Finding]) -> None:
        wrong.update({finding.tensor: bool(finding.where) for finding in findings})

    with replaced(Sums, "take", lost_gradient) if fault else no_fault():
        out = attend_beside_reference(
            *(ring_attention, q, k, v, context, Visibility(causal=True), q.shape[3] ** -0.5, take),
            latents=Latents(latent, weight),
            mask=Mask.causal(),
        )
        out.backward(dout)
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_compares_the_gradients_that_travel(workers: WorkerPool, dtype: torch.dtype) -> None:
    case = Case(chunk=16, content=8, rotary=8, value=8, rank=16, dtype=dtype)
    right = dict.fromkeys(("out", "lse", "dq", "dlatent", "drotary"), False)
    assert workers.run(3, verified, case, False) == [right] * 3
    found = workers.run(3, verified, case, True)
    assert {name for rank in found for name, wrong in rank.items() if wrong} == {
        "dlatent",
        "drotary",
    }
