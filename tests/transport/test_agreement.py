"""Ranks that differ in a call, or fail in one alone: all of them say so, in seconds. (fast tier)"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_burst import BurstConfig, BurstContext, Mask, latent_ring_attention, ring_attention
from megatron_burst.attention import autograd, preparing
from megatron_burst.attention import context as context_module
from megatron_burst.attention.saved import AttentionMemory
from megatron_burst.kernels import KERNELS
from megatron_burst.kernels.cpu import CpuKernel
from megatron_burst.transport import agreement
from megatron_burst.transport.agreement import Said
from tests.transport.test_comm_faults import BROKEN, attend, in_a_context, job
from tests.workers import Team, WorkerPool

SECONDS = 30  # of a machine with more to do; far less than the time limit of these contexts
CONFIG = BurstConfig(timeout_seconds=200)


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


def disagree_on_the_configuration(team: Team) -> str:
    config = BurstConfig(kernel="cpu" if team.rank == 1 else "auto")
    return error_of(lambda: team.context(config))


def listed_by_rank(messages: list[str], what: str) -> list[str]:
    """The values in the message, which must be the same on every rank, in the job's numbers."""
    assert len(set(messages)) == 1
    first, *lines = messages[0].splitlines()
    assert first == f"the context-parallel ranks disagree on {what}:"
    named = [re.fullmatch(r"  rank (\d): (.*)", line) for line in lines]
    assert [int(line[1]) for line in named if line] == [5, 6, 7]  # the pool's last three
    return [line[2] for line in named if line]


def test_ranks_that_disagree_on_the_configuration_all_say_so(workers: WorkerPool) -> None:
    values = listed_by_rank(workers.run(3, disagree_on_the_configuration), "the configuration")
    assert ["kernel='cpu'" in value for value in values] == [False, True, False]
    assert ["kernel='auto'" in value for value in values] == [True, False, True]


def cannot_choose(team: Team) -> tuple[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        if team.rank == 0:  # the others have nothing to choose
            patch.setattr(context_module, "choose_degree", lambda *_: raised(KeyError("no NIC")))
        start = time.monotonic()
        return error_of(lambda: team.context(CONFIG)), time.monotonic() - start


def test_what_the_first_rank_cannot_choose_all_say_at_once(workers: WorkerPool) -> None:
    found = workers.run(3, cannot_choose, timeout=60)
    (message,) = {text for text, _ in found}
    assert "Ulysses degree" in message and message.endswith("rank 5 raised KeyError: 'no NIC'")
    assert max(seconds for _, seconds in found) < SECONDS


# Of one call.

USUAL: dict[str, Any] = {"mask": Mask.causal(), "softmax_scale": 0.25}
SINK = torch.zeros(2)


def shaped(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> dict[str, Any]:
    x = torch.zeros(shape, dtype=dtype, requires_grad=grad)
    return {"q": x, "k": x, "v": x}


@dataclass
class Disagreement:
    odd: dict[str, Any]
    here: str  # in what the odd rank says
    there: str  # in what the others say
    usual: dict[str, Any] | None = None


DISAGREEMENTS = {
    "tokens": Disagreement(shaped(1, 8, 2, 8), "k (1, 8, 2, 8)", "k (1, 4, 2, 8)"),
    "heads": Disagreement(shaped(1, 4, 4, 8), "q (1, 4, 4, 8)", "q (1, 4, 2, 8)"),
    "dtype": Disagreement(shaped(1, 4, 2, 8, dtype=torch.bfloat16), ".bfloat16", ".float32"),
    "mask": Disagreement({"mask": Mask.full()}, ", full", ", causal"),
    "scale": Disagreement({"softmax_scale": 0.5}, "scale 0.5", "scale 0.25"),
    "a sink": Disagreement({"sink": SINK}, "a sink (2,) torch.float32", "no sink"),
    "a sink's dtype": Disagreement(
        {"sink": SINK.double()}, "torch.float64, w", "torch.float32, w", {"sink": SINK}
    ),
    "its log-sum-exp": Disagreement(
        {"return_lse": True}, "with its log-sum-exp", "no sink, without"
    ),
    "backward": Disagreement(shaped(1, 4, 2, 8, grad=True), "with a b", "without a b"),
    "pass": Disagreement({"memory": AttentionMemory(0.5)}, "the first pass of 0.5", "no sink, w"),
}


def call(context: BurstContext, **arguments: Any) -> None:
    tensors = shaped(1, 4, 2, 8) | {n: arguments.pop(n) for n in "qkv" if n in arguments}
    ring_attention(**tensors, context=context, **USUAL | arguments)


def disagree(team: Team, name: str, were_met: bool) -> tuple[str, float]:
    context, case = team.context(CONFIG), DISAGREEMENTS[name]
    usual = case.usual or {}
    if were_met:  # by all: nobody plans any more
        call(context, **usual)
        call(context, **usual | case.odd)
    began = time.monotonic()
    error = error_of(lambda: call(context, **usual | (case.odd if team.rank == 1 else {})))
    call(context)  # of what all agree on again
    return error, time.monotonic() - began


@pytest.mark.parametrize("name", DISAGREEMENTS)
@pytest.mark.parametrize("were_met", [False, True], ids=["new", "met before"])
def test_ranks_that_disagree_on_a_call_all_say_so(
    workers: WorkerPool, name: str, were_met: bool
) -> None:
    if were_met and name == "pass":
        pytest.skip("its memory is full then")
    found = workers.run(3, disagree, name, were_met)
    values = listed_by_rank([text for text, _ in found], "what attention is asked for")
    case, number = DISAGREEMENTS[name], 3 if were_met else 1
    assert all(value.startswith(f"call {number} of q ") for value in values)
    assert [case.here in value for value in values] == [False, True, False], values
    assert [case.there in value for value in values] == [True, False, True], values
    assert max(seconds for _, seconds in found) < SECONDS


def disagree_before_heads_are_spread(team: Team) -> str:
    context = team.context(BurstConfig(algorithm="ulysses", timeout_seconds=200))
    return error_of(lambda: call(context, **shaped(1, 8 if team.rank == 1 else 4, 6, 8)))


def test_the_all_to_all_over_heads_waits_for_it_too(workers: WorkerPool) -> None:
    values = listed_by_rank(
        workers.run(3, disagree_before_heads_are_spread), "what attention is asked for"
    )
    assert ["q (1, 8, 6, 8)" in value for value in values] == [False, True, False]


def takes_another_kernel(team: Team) -> str:
    context = team.context(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        if team.rank == 1:
            patch.setattr(preparing, "select_kernel", lambda *_: KERNELS["reference"])
        return error_of(lambda: call(context))


def test_a_rank_with_another_kernel_is_named(workers: WorkerPool) -> None:
    values = listed_by_rank(workers.run(3, takes_another_kernel), "how to attend")
    assert [value.split(",")[0] for value in values] == [
        f"kernel {name}" for name in ("cpu", "reference", "cpu")
    ]


def plans_otherwise(team: Team) -> str:
    """What is chosen depends on numbers that are never compared."""
    context = team.context(BurstConfig(backward="auto", timeout_seconds=200))
    if team.rank == 1:
        context.config = BurstConfig(backward="kv", timeout_seconds=200)
    return error_of(lambda: call(context, **shaped(1, 4, 2, 8, grad=True)))


def test_a_rank_with_another_plan_is_named(workers: WorkerPool) -> None:
    values = listed_by_rank(workers.run(3, plans_otherwise), "how to attend")
    assert ["backward the query ring" in value for value in values] == [True, False, True]


NO_LATENTS = (1, 4, 2, 8), (4,), (1, 4, 4), (16, 8)


def cannot_alone(team: Team, how: str) -> tuple[str, float]:
    context, began = team.context(CONFIG), time.monotonic()
    if how != "at first":
        call(context)
    odd: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if team.rank == 1 and how == "its input":
            odd = {"soft_cap": -1.0}
        elif team.rank == 1 and how == "its mask's type":
            odd = {"mask": [True]}
        elif team.rank == 1 and how != "before it calls":
            odd = {} if how == "at first" else {"softmax_scale": 0.5}
            error = ValueError("no kernel here")
            patch.setattr(preparing, "select_kernel", lambda *_: raised(error))
            patch.setattr(preparing, "_call", preparing._plan)
        text = error_of(lambda: in_a_layer(context, how, team.rank, odd))
    call(context)
    return text, time.monotonic() - began


def in_a_layer(context: BurstContext, how: str, rank: int, odd: dict[str, Any]) -> None:
    """As the plug-in calls, which looks at what its layer is given first."""
    if how == "its latents" and rank == 1:
        latent_ring_attention(*map(torch.zeros, NO_LATENTS), context, mask=Mask.causal())
    with context.agreed.told("layer 3"):
        if how == "before it calls" and rank == 1:
            raise ValueError("no kernel here")
    call(context, **odd)


def raised(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    "how",
    [
        "at first",
        "where others have planned before",
        "its input",
        "its mask's type",
        "before it calls",
        "its latents",
    ],
)
def test_a_rank_that_cannot_is_named_by_all(workers: WorkerPool, how: str) -> None:
    found = workers.run(3, cannot_alone, how)
    texts, why = [text for text, _ in found], "no kernel here"
    if how == "its input":
        why = "a soft cap is positive and finite, got -1.0; None is no cap"
    elif how == "its mask's type":
        why = "mask must be a Mask, as Mask.causal() is; got [True]"
    elif how == "its latents":
        why = "latent must be [batch, tokens, rank], got (4,)"
    assert texts[1] == why
    assert texts[0] == texts[2] and f"Error: {why}" in texts[0].splitlines()[2]
    assert max(seconds for _, seconds in found) < SECONDS


def all_cannot(team: Team) -> str:
    context = team.context(CONFIG)
    text = error_of(lambda: call(context, soft_cap=-1.0))
    call(context)
    return text


def test_a_failure_of_many_lines_is_one_all_the_same() -> None:
    said = Said("q", "kernel cpu"), Said("q", "RuntimeError: no\n" + 500 * "a frame\n", True)
    texts = {rank: one.text(1)[:4096] for rank, one in enumerate(said)}  # as they are cut
    found = agreement._difference(texts)
    assert isinstance(found, ValueError) and "whether attention is possible" in str(found)
    assert "rank 1: call 1 of q: it cannot: RuntimeError: no" in str(found)


def test_what_no_rank_can_each_says_in_its_own_words(workers: WorkerPool) -> None:
    assert all(text.startswith("a soft cap is") for text in workers.run(3, all_cannot))


def masks_in_two_orders(team: Team) -> str:
    """Documents that end with the ranks' rows need no messages, so nothing holds a rank back."""
    context = team.context(BurstConfig(layout="contiguous"))
    one, other = (Mask.causal(documents=tuple(range(0, 13, length))) for length in (4, 2))
    masks = (one, other, one) if team.rank == 1 else (one, one, other)
    return error_of(lambda: [call(context, mask=mask) for mask in masks])


def test_a_call_is_compared_with_that_of_its_number(workers: WorkerPool) -> None:
    messages = workers.run(3, masks_in_two_orders)
    values = listed_by_rank(messages, "what attention is asked for")
    assert [value[: len("call 0")] for value in values] == ["call 2"] * 3


def groups_of_comparisons(team: Team) -> bool:
    """Whether comparisons keep clear of the channels."""
    context = team.context(CONFIG)
    attend(context)
    agreement, channels = context.communicator.agreement, context.communicator._channels.values()
    assert agreement is not None and agreement._number == 1
    return agreement._group not in {team.group, *channels}


def test_calls_are_compared_on_a_communicator_that_no_message_uses(workers: WorkerPool) -> None:
    assert workers.run(2, groups_of_comparisons) == [True] * 2


# As on NCCL, where the host does not wait for calls that were met before.


def one_changes_its_scale(context: BurstContext) -> None:
    """Without messages, for which gloo would wait."""
    context.communicator.is_by_gloo = lambda _: False  # type: ignore[method-assign]
    usual = {"mask": Mask.causal(documents=(0, 4, 8, 12))}
    for scale in (0.25, 0.5):
        call(context, softmax_scale=scale, **usual)
    try:
        for _ in range(40):
            call(context, softmax_scale=0.5 if context.rank == BROKEN else 0.25, **usual)
            time.sleep(0.05)
    except ValueError:  # its messages have gone: no later call may take them for its own
        call(context, softmax_scale=0.25, **usual)


def test_where_the_host_goes_on_it_is_noticed_some_calls_later(tmp_path: Path) -> None:
    config = BurstConfig(timeout_seconds=200, layout="contiguous")
    with job(tmp_path / "store", 3, in_a_context, one_changes_its_scale, config) as going_on:
        for kind, text, seconds in going_on.replies([0, 1, 2]).values():
            assert kind == "ValueError" and seconds < SECONDS, text
            first, *lines = text.splitlines()
            assert first.endswith("ranks disagree on what attention is asked for:")
            assert all(line[4:].startswith(f"nk {n}: call 3 of q") for n, line in enumerate(lines))
            assert ["scale 0.5," in line for line in lines] == [False, True, False]


# A pass that fails.


PLACES: dict[str, tuple[Any, str]] = {
    "in a tile": (CpuKernel, "forward"),
    "before the first message": (autograd, "side_by_side"),
}


def fails(context: BurstContext, where: str) -> None:
    """Another rank goes on to wait for messages; what is raised is caught, and the next tried."""
    attend(context)
    place = PLACES[where]
    original = getattr(*place)
    if context.rank == BROKEN:
        setattr(*place, lambda *_, **__: raised(MemoryError("no room")))
    errors = []
    for _ in range(2):
        began = time.monotonic()
        try:
            attend(context, batch=1 << 14)  # a message that takes a while
        except (MemoryError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - began < SECONDS
        setattr(*place, original)
    raise AssertionError("\n--\n".join(errors))


@pytest.mark.parametrize("where", PLACES)
def test_a_pass_that_failed_ends_the_next_call_at_once_on_all_ranks(
    tmp_path: Path, where: str
) -> None:
    config = BurstConfig(timeout_seconds=SECONDS + 10)
    scenario = partial(fails, where=where)
    with job(tmp_path / "store", 3, in_a_context, scenario, config) as failing:
        found = failing.replies([0, 1, 2])
        cause = "it failed in call 2, forward: MemoryError: no room"
        for rank, (_, text, _) in found.items():
            first, second = text.split("\n--\n")
            if rank == BROKEN:
                assert first == "MemoryError: no room"
                assert (
                    "can send nothing since it failed in call 2, forward: MemoryError: no room; end"
                    in second
                )
            else:
                assert re.match(rf"CommunicationError: rank {rank}, forward step \d: could", first)
                assert first.splitlines()[1] == f"  rank 1: {cause}"
                assert (
                    "can send nothing since it failed in call 2, forward: CommunicationError: rank"
                    in second
                )
