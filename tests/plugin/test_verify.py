"""--burst-check reference in layers of ours: right ones pass, faults stop all ranks. (fast)

The faults are put in from here, in one of two layers; tests/training runs whole trainings.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig
from megatron_burst.attention.sums import Sums
from megatron_burst.plans.choice.head_parallel import HeadGroups
from megatron_burst.plugin.training_config import LayerConfig
from megatron_burst.transport.comm import Transfers
from tests.attention import faults
from tests.plugin.contexts import Context, group_of, rotary_on_the_cpu
from tests.tier import in_turn
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.training.models.gpt")
from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    RotaryEmbedding,
)

from megatron_burst.plugin.attention.documents import PackedDocuments  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.hooks.rotary import Positions, RotaryAtPositions, WholeSequence  # noqa: E402
from megatron_burst.plugin.hooks.verify_positions import PositionHooks  # noqa: E402
from megatron_burst.reference.verify import VerificationError  # noqa: E402
from tests.plugin.test_layer_spec import build  # noqa: E402

LOCAL, HEADS, KV_HEADS, DIM, VALUE_DIM = 24, 4, 2, 8, 6
BOUNDS = (0, 1, 30, 31, 2 * LOCAL)


class Layers:
    """Two layers of attention, one on top of the other; the second sees a window."""

    def __init__(self, team: Team | None, dtype: torch.dtype, **config: Any) -> None:
        self.settings = BurstConfig(**config)
        self.shared = SharedState(self.settings, layer_config=LayerConfig(check="reference"))
        group = None
        if team is not None:
            group, context = team.group, team.context(self.settings)
            self.shared.contexts.of = lambda *_: context  # type: ignore[method-assign]
        self.shared.follow_layout()
        self.dtype, self.rank = dtype, 0 if team is None else team.rank
        self.layers = [self._layer(number, group) for number in (1, 2)]
        self.frozen: list[Any] = []

    def _layer(self, number: int, group: Any) -> Any:
        config = {"softmax_type": "learnable", "init_method": torch.nn.init.normal_}
        return build(
            shared=self.shared,
            config=config | {"window_size": (9, 0), "window_attn_skip_freq": [0, 1]},
            layer_number=number,
            pg_collection=SimpleNamespace(cp=group, tp=group_of(1)),
        )

    def freeze(self, count: int) -> None:
        """Let the first layers have no gradient."""
        self.frozen = self.layers[:count]
        for layer in self.frozen:
            layer.requires_grad_(False)

    def step(self, recompute: bool = False, bounds: tuple[int, ...] | None = None) -> list[Tensor]:
        """One forward and backward; return the gradients."""
        generator = torch.Generator().manual_seed(self.rank)
        shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)]
        batch = 1 if bounds else 2
        q, *kv = (
            torch.randn(LOCAL, batch, *s, generator=generator).to(self.dtype).requires_grad_()
            for s in shapes
        )
        documents = None
        if bounds:
            padded = torch.tensor((*bounds, bounds[-1]), dtype=torch.int32)
            documents = PackedDocuments(qkv_format="sbhd", cu_seqlens_q=padded, bounds=bounds)
        x = q
        for layer in self.layers:

            def run(x: Tensor, k: Tensor, v: Tensor, layer: Any = layer) -> Tensor:
                if layer in self.frozen:
                    x, k, v = x.detach(), k.detach(), v.detach()
                return layer(x, k, v, None, packed_seq_params=documents)

            out = checkpoint(run, x, *kv, use_reentrant=True) if recompute else run(x, *kv)
            x = q + out.unflatten(2, (HEADS, VALUE_DIM)).sum(-1, keepdim=True)
        x.square().sum().backward()
        return [t.grad for t in (q, *kv)]  # type: ignore[misc]


@contextmanager
def log_of_verify() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_burst.plugin.attention.verify")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def first_step(
    team: Team | None,
    config: dict[str, Any],
    fault: str = "",
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    bounds: tuple[int, ...] | None = None,
) -> tuple[str, list[str]]:
    """Run a step and one more; return what was raised and what was logged."""
    torch.manual_seed(0)  # the sinks of all ranks are one
    layers = Layers(team, dtype, **config)
    with log_of_verify() as lines, FAULTS[fault](layers):
        try:
            first = layers.step(recompute, bounds)
        except VerificationError as error:
            return str(error), lines
        before = len(lines)
        again = layers.step(recompute, bounds)
        assert len(lines) == before, "only the first micro-batch is checked"
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), (
            "it changes nothing"
        )
        assert layers.shared.verification is not None and layers.shared.verification.is_over
    return "", lines


RIGHT: dict[str, dict[str, Any]] = {
    "plain": {"config": {}},
    "bfloat16": {"config": {}, "dtype": torch.bfloat16},
    "recompute": {"config": {}, "recompute": True},
    "recompute of a part": {"config": {"recompute_fraction": 0.5}, "recompute": True},
    "documents": {"config": {}, "bounds": BOUNDS},
    "documents in segments": {
        "config": {"layout": "segmented-zigzag"},
        "bounds": BOUNDS,
        "recompute": True,
    },
    "heads": {"config": {"head_parallel_size": 2}},
    "bfloat16 gradients": {
        "config": {"backward": "query", "grad_dtype": "model"},
        "dtype": torch.bfloat16,
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_layers_pass_and_one_rank_shows_the_table(workers: WorkerPool, name: str) -> None:
    replies = workers.run(2, _first_step, RIGHT[name])
    assert [error for error, _ in replies] == ["", ""]
    shown = [line for _, lines in replies for line in lines]
    # The last process of the pool is the job's rank 7: none of the two speaks for the job.
    assert shown == []


def _first_step(team: Team, options: dict[str, Any]) -> tuple[str, list[str]]:
    return first_step(team, **options)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_table_of_one_rank(tmp_path: Path, recompute: bool) -> None:
    file = tmp_path / "blocks.npy"
    numpy.save(file, numpy.tril(numpy.ones((4, 4), dtype=bool)) & ~numpy.eye(4, k=-2, dtype=bool))
    error, (text,) = first_step(None, {"block_mask": str(file)}, recompute=recompute)
    assert not error
    title, names, *rows = text.splitlines()
    assert (
        "over 1 context-parallel rank(s) the first micro-batch equals the unsharded reference"
        in title
    )
    assert names.split() == ["layer", "out", "lse", "dq", "dk", "dv", "dsink"]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert all(row.count("<") == 6 for row in rows)


@pytest.mark.parametrize("frozen", [1, 2])
def test_layers_without_a_gradient_hide_no_other_layer(frozen: int) -> None:
    layers = Layers(None, torch.float32)
    layers.freeze(frozen)
    with log_of_verify() as lines:
        for _ in range(3):  # without any backward it reports when the second micro-batch comes
            layers.step()
    (text,) = lines
    rows = [line.split()[0] for line in text.splitlines()[2:]]
    assert rows == ["1", "2"]
    gradients = [row.count("<") == 6 for row in text.splitlines()[2:]]
    assert gradients == [False, frozen == 1]


# Faults.


def in_layer_2(change: Callable[[Any], None]) -> Callable[[Layers], Any]:
    @contextmanager
    def fault(layers: Layers) -> Iterator[None]:
        change(layers.layers[1])
        yield

    return fault


def everywhere(holder: Any, name: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda _: faults.replaced(holder, name, make)


def longer_window(layer: Any) -> None:
    layer._window = (layer._window[0] + 1, layer._window[1])


def other_scale(layer: Any) -> None:
    layer._softmax_scale = 1.02 * DIM**-0.5


def other_documents(layer: Any) -> None:
    original = layer._mask
    other = PackedDocuments(bounds=(0, 1, 31, 2 * LOCAL))
    layer._mask = lambda mask_type, _: original(mask_type, other)


def longer_window_at_first(layer: Any) -> None:
    """In the pass without a graph, which makes the loss of a layer that is recomputed."""
    original = layer._mask

    def mask(*arguments: Any) -> Any:
        layer._window = 9 if torch.is_grad_enabled() else 10, True
        return original(*arguments)

    layer._mask = mask


FAULTS: dict[str, Callable[[Any], Any]] = {
    "": lambda _: faults.no_fault(),
    "swapped chunk": everywhere(HeadGroups, "ring_layout", faults.swapped_chunk),
    "stale buffer": everywhere(Transfers, "land", faults.stale_buffer),
    "lost gradient": everywhere(Sums, "take", faults.lost_gradient),
    "wrong window": in_layer_2(longer_window),
    "wrong window at first": in_layer_2(longer_window_at_first),
    "wrong scale": in_layer_2(other_scale),
    "wrong documents": in_layer_2(other_documents),
}
MESSAGES = {
    "swapped chunk": r"layer 1, out on rank \d: .*first tokens \d+ to \d+",
    "stale buffer": r"layer 1, d[qkv] on rank \d: .*first tokens \d+ to \d+",
    "lost gradient": r"layer 1, dk on rank \d: .*first tokens \d+ to \d+",
    "wrong window": r"layer 2, out on rank \d: .*first tokens \d+ to \d+",
    "wrong scale": r"layer 2, lse on rank \d: .*first tokens \d+ to \d+",
    "wrong documents": r"layer 2, out on rank \d: .*first tokens 12 to 35",
}


@pytest.mark.parametrize(("fault", "recompute"), in_turn(MESSAGES, (False, True)))
def test_a_fault_stops_all_ranks_and_is_named(
    workers: WorkerPool, fault: str, recompute: bool
) -> None:
    bounds = BOUNDS if fault == "wrong documents" else None
    options = {"config": {"backward": "kv"}, "fault": fault, "recompute": recompute}
    # Of two ranks each gets one block, and the chunks of the second are one behind the other.
    ranks = 3 if fault in ("swapped chunk", "stale buffer") else 2
    replies = workers.run(ranks, _first_step, {**options, "bounds": bounds})
    first = replies[0][0]
    assert all(error == first for error, _ in replies)
    assert first.startswith(
        "--burst-check reference: attention over the context-parallel ranks is not"
    )
    assert re.search(MESSAGES[fault], first), first
    if "layer 2" in MESSAGES[fault]:
        assert "layer 1" not in first
    assert any(line.startswith("burst check: layer ") for _, lines in replies for line in lines)


def test_a_fault_of_the_first_of_two_passes_is_found() -> None:
    """What was recomputed is right, and so are the gradients; the loss was not."""
    error, _ = first_step(None, {}, "wrong window at first", recompute=True)
    assert "layer 2, out" in error and "layer 2, dq" not in error


# Positions.


def hooks_of(rank: int) -> tuple[PositionHooks, Any, dict[str, str]]:
    """Those of a rank of two, its context, and what they will have found."""
    shared = SharedState(BurstConfig(), layer_config=LayerConfig(check="reference"))
    context = Context(shared.config, 2, rank)
    context.group = group_of(2, rank)
    assert shared.verification is not None
    return PositionHooks(shared), context, shared.verification.positions


def look_at_ids(rows: list[int], bounds: tuple[int, ...] | None = None) -> str:
    """What is said of the position ids of rank 1."""
    packed = None
    if bounds is not None:
        starts = torch.tensor(bounds)
        packed = PackedDocuments(qkv_format="sbhd", cu_seqlens_q=starts, bounds=bounds)
    given = {"position_ids": torch.tensor([rows, rows]), "packed_seq_params": packed}
    hooks, context, wrong = hooks_of(1)
    hooks._look_at_ids(context, context, given, None)
    return wrong["position ids"]


def test_position_ids_are_those_of_megatrons_zigzag() -> None:
    assert look_at_ids([2, 3, 4, 5]) == ""
    for swapped in ([4, 5, 2, 3], [0, 1, 6, 7]):  # in itself, or with the other rank
        found = look_at_ids(swapped)
        assert "position ids on rank 0 (context-parallel rank 1) are not those" in found
        assert "4 of 4 are wrong, of tokens 2 to 5" in found
    assert "1 of 4 are wrong, of tokens 4 to 4" in look_at_ids([2, 3, 9, 5])


def test_position_ids_of_documents_begin_anew() -> None:
    bounds = (0, 3, 8, 8)
    assert look_at_ids([2, 0, 1, 2], bounds) == ""
    assert "of tokens 3 to 5" in look_at_ids([2, 3, 4, 5], bounds)


def rotary(rank: int) -> RotaryEmbedding:
    return RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=group_of(2, rank))


def test_angles_of_megatrons_rotary_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for a wrong rank, or another order, on one rank of several."""
    rotary_on_the_cpu(monkeypatch)
    for rank, given in product((0, 1), (0, 1)):
        hooks, context, wrong = hooks_of(rank)
        module = rotary(given)
        hooks._look_at_angles(context, module, (8,), {}, module(8))
        assert (wrong["rotary angles"] == "") == (given == rank)


def test_angles_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary_on_the_cpu(monkeypatch)
    sequence = WholeSequence(8, (0, 3, 8))
    for rank in (0, 1):
        hooks, context, wrong = hooks_of(rank)
        module = RotaryAtPositions(rotary(rank), Positions(context))
        angles = module(sequence)
        hooks._look_at_angles(context, module, (sequence,), {}, angles)
        assert wrong["rotary angles"] == ""
        hooks._look_at_angles(context, module, (WholeSequence(8, None),), {}, angles)
        assert "are wrong" in wrong["rotary angles"]
