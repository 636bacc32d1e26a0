"""--recompute-offload over whole steps of a model: what waits for which copy. (fast tier)

Of Megatron's GPTModel, on fake tensors of the CPU that stand for those of a card.
"""

from typing import Any

import pytest
import torch

from megatron_burst.transport.host import HostMemory
from tests.streams import Stream, Streams

pytest.importorskip("megatron.core.models.gpt")

from fake_step import Settings, as_on_a_gpu, model_of  # noqa: E402

LAYERS, STEPS = 5, 2
SMALL = Settings(
    layers=LAYERS,
    tokens=64,
    ranks=2,
    hidden=32,
    ffn=64,
    heads=4,
    kv_heads=2,
    vocabulary=64,
    savings=frozenset({"chunked_loss", "offload", "mlp", "head_chunks"}),
    head_chunks=2,
)


class Inputs:
    """The inputs of layers that were on the card, and how many of them still are."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._seen: list[Any] = []
        store, back = HostMemory.store, HostMemory.start_back

        def leaving(host: HostMemory, x: torch.Tensor) -> Any:
            self._seen.append(x.untyped_storage()._weak_ref())
            return store(host, x)

        def arriving(host: HostMemory, *there: Any) -> Any:
            copy = back(host, *there)
            self._seen.append(copy.tensors[0].untyped_storage()._weak_ref())
            return copy

        patch.setattr(HostMemory, "store", leaving)
        patch.setattr(HostMemory, "start_back", arriving)

    @property
    def alive(self) -> int:
        return sum(not torch.UntypedStorage._expired(reference) for reference in self._seen)


def train(patch: pytest.MonkeyPatch) -> tuple[Streams, int, dict[str, list[int]]]:
    """Train; return how many inputs were on the card, and where layers begin and differentiate
    their projections of queries, how many copies are under way that nothing has waited for."""
    streams, inputs, alive = Streams(card="cpu"), Inputs(patch), []
    under_way: dict[str, list[int]] = {"begins": [], "projects back": []}

    def look(where: str) -> None:
        alive.append(inputs.alive)
        side = streams.made[0] if streams.made else Stream()
        under_way[where].append(side.clock[side] - streams.default.clock[side])

    def projected(_: Any, __: Any, output: Any) -> None:
        if output[0].requires_grad:
            output[0].register_hook(lambda _: look("projects back"))

    with as_on_a_gpu(SMALL), streams.recording():
        model = model_of(SMALL)
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: look("begins"))
            layer.self_attention.linear_qkv.register_forward_hook(projected)
        tokens = torch.zeros(1, SMALL.tokens, dtype=torch.long)
        for _ in range(STEPS):
            model(tokens, tokens, None, labels=tokens).sum().backward()
    return streams, max(alive), under_way


def test_inputs_leave_and_come_back_beside_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, most, under_way = train(monkeypatch)
    assert len(streams.made) == 1
    a_step = LAYERS * ["to the host"] + (LAYERS - 1) * ["to the device"]
    assert streams.copies == STEPS * a_step
    assert most == 2
    # In the forward the input of the layer before is leaving. In the backward it comes behind
    # attention, and is waited for before its layer begins.
    assert under_way["begins"] == STEPS * [0, *(LAYERS - 1) * [1], *LAYERS * [0]]
    assert under_way["projects back"] == STEPS * [*(LAYERS - 1) * [1], 0]


@pytest.mark.parametrize("step", ["wait_stream", "wait_event"])
def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(Stream, step, lambda *_: None)
    with pytest.raises(AssertionError, match="may run before|given away|may overwrite"):
        train(monkeypatch)
