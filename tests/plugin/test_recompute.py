"""What checkpointed layers keep is found by its own second pass and by no other. (fast tier)

Layers with our core attention under torch's checkpoint, which saves its inputs and runs as
Megatron's does; tests/training runs the same with Megatron itself.
"""

import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig
from megatron_burst.attention.saved import AttentionMemory
from tests.plugin.contexts import copies_at_once
from tests.tier import in_turn, one_in

pytest.importorskip("megatron.training.models.gpt")
from megatron.core.models.gpt import GPTModel  # noqa: E402

from megatron_burst.plugin.attention.recompute import Checkpoints, RecomputeHooks  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from tests.plugin.test_layer_spec import build  # noqa: E402

pytestmark = pytest.mark.usefixtures("little_to_collect")

TOKENS, SIZE, LAYERS = 12, 16, 4
type Run = Callable[["Model", Tensor], Tensor]  # the layers of a model


class Counting(Checkpoints):
    """Counts the second passes that found something and those that did not."""

    def __init__(self, fraction: float, offload: bool = False) -> None:
        super().__init__(fraction, offload)
        self.found = self.missed = 0

    def memory(self, attention: object, query: Tensor) -> Any:
        memory = super().memory(attention, query)
        if torch.is_grad_enabled():
            has = memory is not None and memory.saved is not None
            self.found, self.missed = self.found + has, self.missed + (not has)
        return memory

    @property
    def calls(self) -> int:
        """How many are still known."""
        gc.collect()
        return len(self._calls)

    @property
    def kept(self) -> int:
        """How many attention calls have something kept."""
        gc.collect()
        return sum(
            m.saved is not None for call in self._calls.values() if call for m in call.values()
        )


class Layer(torch.nn.Module):
    """Called as Megatron calls one, by keyword; returns a pair as Megatron's does."""

    def __init__(self, shared: SharedState, number: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(SIZE, 3 * SIZE)
        self.selective = False
        self.attention = build(shared=shared, layer_number=number)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        heads = self.qkv(hidden_states).unflatten(2, (2, -1))
        q, k, v = heads.chunk(3, dim=3)
        attend = self.attention
        if self.selective:
            out = checkpoint(attend, q, k, v, None, use_reentrant=True)
        else:
            out = attend(q, k, v, None)
        return hidden_states + out.tanh(), None


class Mtp(torch.nn.Module):
    """Megatron's checkpoint of an MTP layer, whose attention gets what was made inside."""

    def __init__(self, shared: SharedState) -> None:
        super().__init__()
        self.layer = Layer(shared, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(lambda x: self.layer(x * 1.5)[0], hidden, use_reentrant=True)


class Model(GPTModel):
    """A model as far as the hooks know one."""

    def __init__(self, fraction: float | None, offload: bool = False) -> None:
        torch.nn.Module.__init__(self)
        torch.manual_seed(0)
        self.config = SimpleNamespace(cuda_graph_impl="none")  # Megatron's main asks in every call
        shared = SharedState(BurstConfig(recompute_fraction=fraction))
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(Layer(shared, n + 1) for n in range(LAYERS))
        self.embedding, self.mtp = torch.nn.Linear(SIZE, SIZE), Mtp(shared)
        self.checkpoints: Any = None
        if fraction is not None:
            shared.checkpoints = self.checkpoints = Counting(fraction, offload)
            assert RecomputeHooks(shared.checkpoints)([self]) == [self]

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return run(self, self.embedding(x)).square().sum()

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.parameters() if p.grad is not None]


def layers(model: Model, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    def run(hidden: Tensor) -> Tensor:
        for layer in model.decoder.layers[start:stop]:
            hidden, _ = layer(hidden_states=hidden)
        return hidden

    return run


def uniform(model: Model, hidden: Tensor, chunk: int = 1) -> Tensor:
    for start in range(0, LAYERS, chunk):
        hidden = checkpoint(layers(model, start, start + chunk), hidden, use_reentrant=True)
    return hidden


def in_pairs(model: Model, hidden: Tensor) -> Tensor:
    return uniform(model, hidden, 2)


def block(model: Model, hidden: Tensor) -> Tensor:
    """The first two layers checkpointed, the others not."""
    for start in range(2):
        hidden = checkpoint(layers(model, start, start + 1), hidden, use_reentrant=True)
    return layers(model, 2, LAYERS)(hidden)


def selective(model: Model, hidden: Tensor) -> Tensor:
    for layer in model.decoder.layers:
        layer.selective = True
    return layers(model, 0, LAYERS)(hidden)


def behind_other_work(model: Model, hidden: Tensor) -> Tensor:
    """Layers whose input is made inside the checkpoint: they cannot be told apart."""
    hidden = checkpoint(layers(model, 0, 1), hidden, use_reentrant=True)
    for start in range(1, LAYERS):
        run = layers(model, start, start + 1)
        hidden = checkpoint(lambda x, run=run: run(x * 1.5), hidden, use_reentrant=True)
    return hidden


RUNS = {"uniform": uniform, "pairs": in_pairs, "block": block, "selective": selective}


def batch(number: int) -> Tensor:
    return torch.randn(TOKENS, 2, SIZE, generator=torch.Generator().manual_seed(number))


def expected(*numbers: int, run: Run = uniform) -> list[Tensor]:
    model = Model(None)
    for number in numbers:
        model(batch(number), run).backward()
    return model.gradients()


def check(model: Model, wanted: list[Tensor], *, found: int | None = None) -> None:
    for x, y in zip(model.gradients(), wanted, strict=True):
        assert (x - y).norm() <= 2e-6 * y.norm()
    if found is not None:
        assert model.checkpoints.found == found
    assert model.checkpoints.kept == 0


def test_a_stale_result_would_show() -> None:
    """The batches differ by more than what `check` allows, in every parameter."""
    for x, y in zip(expected(1), expected(2), strict=True):
        assert (x - y).norm() > 0.01 * y.norm()


@pytest.mark.parametrize(
    ("fraction", "name", "order"),
    one_in(5, itertools.product([0.0, 0.3], RUNS, [(0, 1, 2), (2, 1, 0), (1, 2, 0)])),
)
def test_forwards_in_flight_find_what_is_theirs(
    fraction: float, name: str, order: tuple[int, ...]
) -> None:
    run = RUNS[name]
    model = Model(fraction)
    losses = [model(batch(number), run) for number in range(3)]
    again = 2 if run is block else LAYERS
    assert model.checkpoints.kept == 3 * again
    for number in order:
        losses[number].backward()
    check(model, expected(*order, run=run), found=3 * again)
    del losses
    assert model.checkpoints.calls == 0


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("training", [True, False])
def test_evaluation_between_forward_and_backward(run: Run, training: bool) -> None:
    model = Model(0.5)
    loss = model(batch(0), run)
    model.train(training)
    with torch.no_grad():
        model(batch(1), run)
    model.train()
    loss.backward()
    check(model, expected(0, run=run), found=2 if run is block else LAYERS)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_evaluation_of_an_input_that_requires_a_gradient(run: Run) -> None:
    """As a later pipeline stage receives one."""
    model, received = Model(0.5), [batch(n).requires_grad_() for n in range(2)]
    loss = run(model, received[0]).square().sum()
    with torch.no_grad():
        run(model, received.pop())
    loss.backward()
    plain, wanted = Model(None), batch(0).requires_grad_()
    run(plain, wanted).square().sum().backward()
    check(model, plain.gradients(), found=2 if run is block else LAYERS)
    assert (received[0].grad - wanted.grad).norm() <= 2e-6 * wanted.grad.norm()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(("name", "layer"), in_turn(RUNS, (0, 3)))
def test_an_exception_between_leaves_nothing_behind(name: str, layer: int) -> None:
    """In a forward and between forward and backward; new tensors may get the memory of the old."""
    model, run = Model(0.5), RUNS[name]

    def interrupt(*_: Any) -> None:
        raise Interrupted

    for number in range(5):
        hook = model.decoder.layers[layer].register_forward_pre_hook(interrupt)
        with pytest.raises(Interrupted):
            model(batch(number), run)
        hook.remove()
        model(batch(number + 10), run)  # never gets its backward
    model(batch(20), run).backward()
    check(model, expected(20, run=run), found=2 if run is block else LAYERS)
    assert model.checkpoints.calls == 0


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_an_exception_in_the_second_pass(run: Run) -> None:
    model = Model(0.5)
    loss = model(batch(0), run)

    def interrupt(*_: Any) -> None:
        raise Interrupted

    hook = model.decoder.layers[1].attention.register_full_backward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        loss.backward()
    hook.remove()
    model.zero_grad()
    model.checkpoints.found = 0
    del loss
    model(batch(1), run).backward()
    check(model, expected(1, run=run), found=2 if run is block else LAYERS)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_second_backward_runs_all_of_attention_again(run: Run) -> None:
    model = Model(0.5)
    loss = model(batch(0), run)
    loss.backward(retain_graph=True)
    again = model.checkpoints.found
    other = model(batch(1), run)
    loss.backward()
    assert model.checkpoints.found == again, "nothing of the other forward was taken"
    other.backward()
    check(model, expected(0, 0, 1, run=run), found=2 * again)


@pytest.mark.parametrize("first", [True, False])
def test_passes_in_different_modes_find_nothing(first: bool) -> None:
    model = Model(0.5).train(first)
    loss = model(batch(0), uniform)
    model.train(not first)
    loss.backward()
    del loss
    check(model, expected(0), found=0)
    assert model.checkpoints.calls == 0


def test_two_calls_that_save_one_storage_keep_nothing() -> None:
    """Nobody could tell whose second pass it is: here two samples are parts of one tensor."""
    wanted, model = Model(None), Model(0.5)
    for each in (wanted, model):
        samples = batch(0).requires_grad_().split(1, dim=1)
        losses = [uniform(each, sample).square().sum() for sample in samples]
        for loss in losses:
            loss.backward(retain_graph=True)
    check(model, wanted.gradients(), found=2 * (LAYERS - 1))


def with_mtp(model: Model, hidden: Tensor) -> Tensor:
    return model.mtp(in_pairs(model, hidden))


def shared_in_one_call(model: Model, hidden: Tensor) -> Tensor:
    once = layers(model, 0, 1)
    return checkpoint(lambda x: once(once(x)), hidden, use_reentrant=True)


def shared_in_and_behind_a_call(model: Model, hidden: Tensor) -> Tensor:
    once = layers(model, 0, 1)
    return once(checkpoint(once, hidden, use_reentrant=True))


def without_checkpoints(model: Model, hidden: Tensor) -> Tensor:
    return layers(model, 0, LAYERS)(hidden)


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (behind_other_work, 1),
        (with_mtp, LAYERS),
        (shared_in_one_call, 0),
        (shared_in_and_behind_a_call, 1),
        (without_checkpoints, 0),
    ],
)
def test_what_cannot_be_told_apart_keeps_nothing(run: Run, found: int) -> None:
    """Layers whose input is made in a checkpoint, those of MTP, and those that run twice."""
    model = Model(0.5)
    losses = [model(batch(number), run) for number in range(3)]
    assert (model.checkpoints.calls == 0) == (run is without_checkpoints)
    for loss in losses:
        loss.backward(retain_graph=True)
    check(model, expected(0, 1, 2, run=run), found=3 * found)


def test_a_fraction_of_1_needs_no_checkpoints() -> None:
    assert SharedState(BurstConfig(recompute_fraction=1.0)).checkpoints is None
    assert SharedState(BurstConfig()).checkpoints is None


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is fetched from the host and what is put into results, in order, by number of layer."""
    log: list[str] = []
    numbers: dict[int, int] = {}  # of layers, by memory
    count = itertools.count()
    save, fetch, recall = (getattr(AttentionMemory, n) for n in ("save", "fetch", "recall"))

    def saving(memory: AttentionMemory, *arguments: Any) -> None:
        numbers[id(memory)] = next(count) % LAYERS
        save(memory, *arguments)

    def fetching(memory: AttentionMemory) -> None:
        stored = memory.saved and memory.saved.results
        before = stored and stored._back
        fetch(memory)
        if stored and stored._back is not before:
            log.append(f"fetch {numbers[id(memory)]}")

    def recalling(memory: AttentionMemory) -> Any:
        if memory.saved:
            log.append(f"put {numbers[id(memory)]}")
        return recall(memory)

    monkeypatch.setattr(AttentionMemory, "save", saving)
    monkeypatch.setattr(AttentionMemory, "fetch", fetching)
    monkeypatch.setattr(AttentionMemory, "recall", recalling)
    return log


@pytest.mark.parametrize(
    ("run", "order"),
    [
        (uniform, "fetch 3, fetch 2, put 3, fetch 1, put 2, fetch 0, put 1, put 0"),
        # A call's second pass goes through its layers as the first does.
        (in_pairs, "fetch 2, fetch 3, put 2, fetch 0, put 3, fetch 1, put 0, put 1"),
    ],
)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_what_waits_on_the_host_is_fetched_a_layer_ahead_on_one_stream(
    monkeypatch: pytest.MonkeyPatch, copies: list[str], run: Run, order: str, in_flight: int
) -> None:
    streams, model = copies_at_once(monkeypatch), Model(0.5, offload=True)
    losses = [model(batch(number), run) for number in range(in_flight)]
    assert not copies, "nothing is fetched in a forward"
    for loss in losses:
        loss.backward()
    # What was saved last is still on the card.
    orders = [order] * (in_flight - 1) + [order.replace("fetch 3, ", "")]
    assert ", ".join(copies) == ", ".join(orders)
    assert len(streams) == 1
    check(model, expected(*range(in_flight), run=run), found=LAYERS * in_flight)


def test_a_forward_between_backwards_is_not_fetched_early(
    monkeypatch: pytest.MonkeyPatch, copies: list[str]
) -> None:
    """One forward, one backward, as pipelines alternate them."""
    copies_at_once(monkeypatch)
    model = Model(0.5, offload=True)
    losses = [model(batch(0), uniform), model(batch(1), uniform)]
    losses[0].backward()
    losses.append(model(batch(2), uniform))
    for loss in losses[1:]:
        loss.backward()
    a_backward = "fetch 3, fetch 2, put 3, fetch 1, put 2, fetch 0, put 1, put 0"
    orders = [a_backward] * 2 + [a_backward.removeprefix("fetch 3, ")]
    assert ", ".join(copies) == ", ".join(orders)
    check(model, expected(0, 1, 2), found=3 * LAYERS)
