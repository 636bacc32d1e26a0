"""The unsharded reference, and the comparison with it: right calls pass, faults are found. (fast)

The faults are put in: a swapped chunk, a stale buffer, a wrong window and scale, a
gradient that is lost.
"""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.attention import preparing
from megatron_burst.attention.autograd import _RingAttention
from megatron_burst.attention.preparing import prepare
from megatron_burst.attention.sums import Sums
from megatron_burst.kernels import KERNELS
from megatron_burst.plans.choice.head_parallel import HeadGroups
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.reference.dense import (
    Expected,
    Reference,
    Spread,
    Visibility,
    megatrons_positions,
)
from megatron_burst.reference.verify import Finding, compare, table, worst
from megatron_burst.tools import verify as tool
from megatron_burst.tools.arguments.verify import MASKS, parse
from megatron_burst.tools.command import main
from megatron_burst.transport.comm import Transfers
from tests import oracle
from tests.attention.cases import Case as Shape
from tests.attention.faults import lost_gradient, no_fault, replaced, stale_buffer, swapped_chunk
from tests.plans.masks import Masking, hard_maskings
from tests.tier import in_turn, some
from tests.workers import Team, WorkerPool

CPU = torch.device("cpu")


# The reference.


def visibility(masking: Masking, tokens: int) -> Visibility:
    return Visibility(
        causal=masking.causal,
        left=-1 if masking.window is None else masking.window,
        cu_seqlens=None if masking.documents is None else torch.tensor(masking.documents),
        lengths=None if masking.lengths is None else torch.tensor(masking.lengths),
        blocks=masking._table,
        tokens_per_sample=tokens,
    )


MASKINGS = hard_maskings(1, 6)


@pytest.mark.parametrize("name", MASKINGS)
def test_what_sees_what(name: str) -> None:
    masking, positions = MASKINGS[name], torch.randperm(12)
    found = visibility(masking, 12).pairs(positions, positions.flip(0))
    assert torch.equal(found, masking.visible(12)[positions][:, positions.flip(0)])


def test_a_window_behind_and_samples_with_blocks_of_their_own() -> None:
    positions = torch.arange(8)
    seen = Visibility(causal=False, left=1, right=2).pairs(positions, positions)
    distance = positions - positions[:, None]
    assert torch.equal(seen, (distance >= -1) & (distance <= 2))
    table = torch.tensor([[True, False], [True, True]])
    ours = Visibility(causal=False, blocks=table, tokens_per_sample=4).pairs(positions, positions)
    one = table.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(ours, torch.block_diag(one, one).bool())


def test_megatrons_positions() -> None:
    for tokens, ranks in ((8, 1), (8, 2), (24, 3)):
        ours = [zigzag(tokens, ranks).positions(rank) for rank in range(ranks)]
        assert [x.tolist() for x in megatrons_positions(tokens, ranks)] == [
            x.tolist() for x in ours
        ]


@pytest.mark.parametrize("name", ["causal", "a window in documents", "blocks that see nothing"])
@pytest.mark.parametrize("at_once", [5, 10**6])
def test_the_reference_is_the_oracle(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices of any size."""
    monkeypatch.setattr("megatron_burst.reference.dense._PAIRS_AT_ONCE", at_once)
    masking = {**MASKINGS, "causal": Masking()}[name]
    shape = Shape(batch=2, chunk=6, heads=(4, 2), dim=6, value_dim=5, has_sink=True)
    q, k, v, dout = shape.inputs(1)
    expected = oracle.attention(q, k, v, dout, masking.visible(12), sink=shape.sink())
    spread = Spread([torch.arange(12)], None)
    reference = Reference(spread, visibility(masking, 12), 6**-0.5, q, k, v, shape.sink())
    for each in [*reference.expect(), *reference.expect(dout)]:
        whole = getattr(expected, each.tensor)
        if each.tensor == "lse":
            whole = whole.transpose(1, 2)[..., None]
        whole = whole[None, None, :, None] if each.tensor == "dsink" else whole
        torch.testing.assert_close(each.value, whole[:, :, each.heads], atol=1e-12, rtol=1e-12)
        assert (each.allowed >= 0).all() and each.allowed.isfinite().all()


# The comparison.


def one_head(
    found: Tensor, *, value: float = 1.0, allowed: float = 0.1, tensor: str = "dk", start: int = 64
) -> Finding:
    found = found[:, :, None]
    expected = torch.full_like(found, value).double()
    bound = torch.full(found.shape[:3], allowed).double()
    each = Expected(tensor, slice(0, 1), expected, bound)
    positions = torch.arange(start, start + found.shape[1])
    (finding,) = compare([each], {tensor: found}, positions)
    return finding


def test_stretches_are_even() -> None:
    found = torch.ones(1, 33, 4)
    found[0, 16:] += 1.0
    where = one_head(found, start=0).where
    assert where == "all heads, 2 of 2 stretches of tokens, first tokens 0 to 16"
    found[0, 16] -= 1.0
    where = one_head(found, start=0).where
    assert where == "all heads, 1 of 2 stretches of tokens, first tokens 17 to 32"


def test_of_a_sink_no_tokens_are_named() -> None:
    assert one_head(torch.zeros(1, 1, 1), tensor="dsink").where == "all heads"


def test_an_error_is_named_by_its_tokens() -> None:
    found = torch.ones(1, 64, 4)
    assert one_head(found).where == "" and one_head(found).error == 0
    found[0, 40] += 1.0
    finding = one_head(found)
    assert finding.where == "all heads, 1 of 2 stretches of tokens, first tokens 96 to 127"
    assert finding.error == pytest.approx((4 / 128) ** 0.5)
    assert "dk on rank 0: error 1.8e-01 where 5.0e-02 is allowed, all heads" in str(finding)
    found[0, 3] -= 1.0
    assert "2 of 2 stretches of tokens, first tokens 64 to 95" in one_head(found).where


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_wrong(value: float) -> None:
    found = torch.ones(1, 64, 4)
    found[0, 0, 0] = value
    assert one_head(found).where and one_head(found).share == math.inf


def test_equal_infinities_are_equal() -> None:
    found = torch.full((1, 64, 1), -math.inf)
    assert not one_head(found, value=-math.inf, allowed=0.0).where
    assert one_head(found.neg(), value=-math.inf).where


def test_the_table_shows_the_worst_rank() -> None:
    few, many = Finding("out", 0.1, 1.0, 0), Finding("out", 0.2, 0.1, 1, "everywhere")
    row = worst([few, many, Finding("dq", 0.0, 0.0, 0)])
    text = table("layer", {"7": row, "8": {"dq": few}})
    assert text.splitlines() == [
        "layer                out                 dq",
        "    7  2.0e-01 > 1.0e-01  0.0e+00 < 0.0e+00",
        "    8                  -  1.0e-01 < 1.0e+00",
    ]


# Calls over ranks, by the tool's own check.


SHAPE = (
    "--batch 2 --tokens-per-rank 48 --heads 4 --kv-heads 2 --head-dim 16 --value-head-dim 8 --sink"
)


def case(dtype: str = "float32", mask: str = "causal", **config: Any) -> tool.Case:
    return tool.Case(BurstConfig(**config), mask, dtype, parse(SHAPE.split()))


CLEAN = [
    *(case(dtype, mask) for dtype in ("float32", "bfloat16") for mask in MASKS),
    case("float16"),
    case("bfloat16", backward="query"),
    case("bfloat16", algorithm="ring", grad_dtype="model"),
    case("bfloat16", mask="documents", layout="segmented-zigzag"),
    case("bfloat16", topology="double", ranks_per_node=2, backward="kv"),
    case("bfloat16", topology="mesh"),
    case("bfloat16", mask="window", head_parallel_size=2),
    case("bfloat16", algorithm="allgather"),
    case("bfloat16", algorithm="ulysses"),
    case("float32", algorithm="ring", layout="contiguous"),
]


def run(team: Team, cases: Sequence[tool.Case], fault: str = "") -> list[dict[str, Finding]]:
    with FAULTS[fault]():
        return [tool.check(c, team.context(c.config), CPU)[1] for c in cases]


@pytest.mark.parametrize("ranks", [1, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_right_calls_pass(workers: WorkerPool, ranks: int) -> None:
    cases: Sequence[tool.Case] = CLEAN
    if ranks == 1:
        cases = [c for c in CLEAN[::2] if c.config.head_parallel_size == 1]
    if ranks == 4:
        cases = some(CLEAN, 5, first=1)
    if ranks == 8:  # 4 heads do not go over 8 ranks
        cases = [c for c in CLEAN if c.config.algorithm != "ulysses"]
    first, *others = workers.run(ranks, run, cases)
    assert all(other == first for other in others), "all ranks know all"
    for each, found in zip(cases, first, strict=True):
        assert set(found) == ALL
        assert [str(f) for f in found.values() if f.where] == [], each
        assert all(f.share < 0.9 for f in found.values()), (str(each), found)


def longer_window(original: Callable[..., Any]) -> Callable[..., Any]:
    def masks(name: str, tokens: int) -> Any:
        return Mask.causal(window=tokens // 5 + 1), original(name, tokens)[1]

    return masks


def other_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, *more: Any, **options: Any) -> Any:
        return original(q, k, *more, softmax_scale=1.02 * q.shape[3] ** -0.5, **options)

    return attend


def no_gradient_of_k(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any) -> Any:
        dq, _, *others = original(*args)
        return dq, None, *others

    return backward


def call_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever arrives in a call arrived in the call before, if there was one."""
    last: dict[tuple[str, int], list[Tensor]] = {}

    def land(self: Transfers, number: int) -> Any:
        landed = original(self, number)
        blocks, key = [x for _, block in landed for x in block], (self._name, number)
        new = [x.clone() for x in blocks]
        for x, old in zip(blocks, last.get(key, new), strict=True):
            x.copy_(old)
        last[key] = new
        return landed

    return land


FAULTS: dict[str, Callable[[], Any]] = {
    "": no_fault,
    "swapped chunk": lambda: replaced(HeadGroups, "ring_layout", swapped_chunk),
    "stale buffer": lambda: replaced(Transfers, "land", stale_buffer),
    "lost gradient": lambda: replaced(Sums, "take", lost_gradient),
    "no gradient": lambda: replaced(_RingAttention, "backward", no_gradient_of_k),
    "call before": lambda: replaced(Transfers, "land", call_before),
    "wrong window": lambda: replaced(tool, "masks", longer_window),
    "wrong scale": lambda: replaced(tool, "ring_attention", other_scale),
}
ALL = {"out", "lse", "dq", "dk", "dv", "dsink"}
FOUND = {  # what must be wrong, and what may be
    "swapped chunk": (ALL - {"dsink"}, ALL),
    "stale buffer": (ALL - {"dsink"}, ALL),
    "lost gradient": ({"dk", "dv"}, {"dk", "dv"}),
    "no gradient": ({"dk"}, {"dk"}),
    "wrong window": (ALL - {"dsink"}, ALL),
    "wrong scale": (ALL - {"dsink", "dv", "out"}, ALL),
}


@pytest.mark.parametrize(("fault", "dtype"), in_turn(FOUND, ("float32", "bfloat16")))
def test_faults_are_found(workers: WorkerPool, fault: str, dtype: str) -> None:
    mask = "window" if fault == "wrong window" else "causal"
    each = case(dtype, mask, backward="kv", topology="flat")
    found = workers.run(4, run, [each], fault)[0][0]
    wrong = {name for name, finding in found.items() if finding.where}
    least, most = FOUND[fault]
    assert least <= wrong <= most, {name: str(f) for name, f in found.items()}
    assert all("first tokens" in found[name].where for name in wrong - {"dsink"})


def test_a_lost_gradient_of_the_query_ring_is_found(workers: WorkerPool) -> None:
    found = workers.run(4, run, [case(backward="query", topology="flat")], "lost gradient")[0][0]
    assert {name for name, finding in found.items() if finding.where} == {"dq"}


def test_a_call_by_a_plan_that_is_known_has_other_tokens(workers: WorkerPool) -> None:
    once = case(backward="kv", topology="flat")
    found = workers.run(4, run, [once, once._replace(is_again=True)], "call before")[0]
    assert [any(f.where for f in each.values()) for each in found] == [False, True]


# The command.


@pytest.mark.parametrize("tokens", [15, 16])  # an odd number of tokens is one block
@pytest.mark.parametrize("name", MASKS)
def test_the_reference_is_told_of_the_same_mask(name: str, tokens: int) -> None:
    mask, visibility = tool.masks(name, tokens)
    table = torch.tensor(mask.blocks) if mask.block_table else None
    expected = oracle.visible_pairs(tokens, mask.is_causal, mask.window, mask.documents, table)
    places = torch.arange(tokens)
    assert torch.equal(visibility.pairs(places, places), expected)


def command(team: Team, words: str, fault: str = "") -> tuple[int, str]:
    with FAULTS[fault](), redirect_stdout(StringIO()) as said:
        return tool.main([*SMALL, *words.split(), "--backend", "gloo"]), said.getvalue()


SMALL = "--tokens-per-rank 32 --heads 2 --head-dim 8 --mask causal --dtype float32".split()


def test_the_command_runs_over_all_ranks_of_the_job(workers: WorkerPool) -> None:
    """Documents are those of the whole sequence; two heads do not go over 8 ranks."""
    right = workers.run(8, command, "--backward kv --mask documents --gpus-per-node 4")
    assert {status for status, _ in right} == {0}
    found = workers.run(8, command, "--algorithm burst ulysses --backward kv", "lost gradient")
    assert {status for status, _ in found} == {1}
    assert re.search(r"(?s)burst, kv.* dk on rank \d: error.*\nulysses, .* cannot run", found[0][1])


@pytest.mark.slow
def test_the_command_may_take_a_mesh(workers: WorkerPool) -> None:
    mesh = workers.run(8, command, "--backward kv --topology mesh --gpus-per-node 2")
    assert {status for status, _ in mesh} == {0}
    assert "causal, float32, 2 x 2 kv mesh, cpu" in mesh[0][1]


def test_the_kernel_that_it_names_is_that_of_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = iter((KERNELS["reference"], KERNELS["cpu"]))
    monkeypatch.setattr(preparing, "select_kernel", lambda *_: next(chosen))
    context, x = BurstContext.create(BurstConfig()), torch.ones(1, 4, 2, 8)
    for mask, name in ((Mask.causal(), "reference"), (Mask.full(), "cpu")) * 2:
        prepare(context, x, x, x, mask, 1.0)
        assert context.kept.last.kernel.name == name


def test_the_command_on_one_rank_checks_the_kernel_and_says_that_nothing_was_spread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--kv-heads", "1", "--value-head-dim", "4", "--sink"]
    assert tool.main([*SMALL, *options, "--backend", "gloo"]) == 1
    printed, meanwhile = capsys.readouterr()
    first, *cases = meanwhile.splitlines()
    assert first.startswith("verify: one rank:") and len(cases) == printed.count(", causal, ") > 0
    assert "1 rank(s) on cpu (no process group), zigzag; a rank has 2 x 32 tokens" in printed
    assert printed.count("burst, kv") == 2 and "all is right" not in printed
    assert "verify: the kernel is right, but on one rank nothing was spread" in printed
    assert "start several: torchrun --nproc-per-node 4 -m megatron_burst verify" in printed
    with replaced(tool, "ring_attention", other_scale):
        assert tool.main([*SMALL, "--backend", "gloo"]) == 1
    printed = capsys.readouterr().out
    assert "burst, query, causal, float32, lse on rank 0: error" in printed
    assert "verify: something is wrong" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch 999999999", "--batch 999999999 x --tokens-per-rank 256 with 8 heads of 64 and"),
        ("--head-dim 2147483647", "take less"),
        ("--device cuda", "--device cuda: torch "),
        ("--backend nccl", "--backend nccl: torch "),
    ],
)
def test_what_this_machine_cannot_hold_or_has_not_is_refused(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["verify", *words.split()]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_by_default_what_a_kernel_serves_is_tried() -> None:
    assert tool.usual_dtypes(torch.device("cuda")) == ["bfloat16"]
    assert tool.usual_dtypes(torch.device("cpu")) == ["float32", "bfloat16"]
    args = parse([])
    assert args.dtype is None
    assert (args.batch, args.heads, args.kv_heads) == (2, 8, 2), "faults of either would not show"
    assert parse(["--heads", "12"]).kv_heads == 12  # 3 go over neither 2 nor 4 ranks
    args.dtype = ["float32"]
    cases = [*map(str, tool._cases(args))]
    again = ["burst, kv, causal, float32, again", "burst, query, causal, float32, again"]
    assert len(cases) == 10 and cases[8:] == again
