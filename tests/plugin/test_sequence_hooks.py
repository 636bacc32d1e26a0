"""Positions, the exchange between layouts and the hooks of a model, on stand-ins. (fast tier)

tests/training runs the same with Megatron itself.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig
from megatron_burst.plans.balance.balanced import balanced
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from tests.plugin.contexts import Context, Copies, group_of, rotary_on_the_cpu
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.training.models.gpt")
from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (  # noqa: E402
    YarnRotaryEmbedding,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer import multi_token_prediction  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402

from megatron_burst.plugin.attention.core_attention import BurstCoreAttention  # noqa: E402
from megatron_burst.plugin.attention.documents import PackedDocuments  # noqa: E402
from megatron_burst.plugin.attention.layouts import Layouts  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.hooks.batch_cut import BatchCut  # noqa: E402
from megatron_burst.plugin.hooks.rotary import (  # noqa: E402
    Positions,
    RotaryAtPositions,
    WholeSequence,
    within_documents,
)
from megatron_burst.plugin.hooks.sequence_hooks import (  # noqa: E402
    SequenceHooks,
    _check_core_attention,
    _flatten_input,
    _StageHooks,
    _unflatten_output,
    _window_of_all,
    replace_rotary,
)

SEGMENTED = BurstConfig(layout="segmented-zigzag")
BALANCED = BurstConfig(layout="balanced")


# Positions and rotary embeddings.


def test_positions_start_again_in_every_document() -> None:
    found = within_documents(torch.arange(8), (0, 1, 4, 8))
    assert found.tolist() == [0, 0, 1, 2, 0, 1, 2, 3]
    assert within_documents(torch.tensor([6, 2]), (0, 1, 4, 8)).tolist() == [2, 1]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary_on_the_cpu(monkeypatch)


def rotary(kind: str) -> Any:
    made = {"use_cpu_initialization": True, "cp_group": group_of(1)}
    if kind == "yarn":
        return YarnRotaryEmbedding(8, **made)
    return RotaryEmbedding(8, 1.0, rope_scaling=kind == "scaled", **made)


def ask(module: RotaryAtPositions, rows: int, packed: Any = None) -> Any:
    """Ask as GPTModel and MLA do."""
    config = SimpleNamespace(
        sequence_parallel=False, tensor_model_parallel_size=1, context_parallel_size=2
    )
    length = module.get_rotary_seq_len(None, None, torch.zeros(rows, 1, 1), config, packed)
    return module(length, packed_seq=False, cp_group=None)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("kind", ["rope", "scaled", "yarn"])
@pytest.mark.parametrize("config", [BurstConfig(), SEGMENTED], ids=["zigzag", "segmented"])
def test_rotary_rows_are_those_of_the_ranks_positions_MC_560(
    kind: str, config: BurstConfig
) -> None:
    whole = rotary(kind).get_emb(16)
    for rank in (0, 1):
        module = RotaryAtPositions(rotary(kind), Positions(Context(config, 2, rank)))
        found = ask(module, 8)
        table = whole
        if kind == "yarn":
            assert found[1] == whole[1], "the scale is lost"
            found, table = found[0], whole[0]
        expected = make_layout(config, 16, 2).shard(table, rank, 0)
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("on_the_cpu")
def test_rotary_rows_within_documents_belong_to_the_call() -> None:
    """Micro-batches take turns, and one that is computed again gets the rows that it had."""
    table = rotary("rope").get_emb(16)
    module = RotaryAtPositions(rotary("rope"), Positions(Context(BurstConfig(), 2, 1)))
    positions = make_layout(BurstConfig(), 16, 2).positions(1)
    for bounds in ((0, 5, 16), (0, 16), (0, 5, 16)):
        found = ask(module, 8, PackedDocuments(bounds=bounds))
        assert torch.equal(found, table[within_documents(positions, bounds)])
    assert torch.equal(ask(module, 8), table[positions])


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("kind", ["rope", "yarn"])
def test_rotary_rows_of_mla_have_no_batch_dimension_where_there_are_documents(kind: str) -> None:
    """As its tensors; with one they would be broadcast against each other, row by row."""
    positions = Positions(Context(BurstConfig(), 2, 1))
    module = RotaryAtPositions(rotary(kind), positions, in_layer=True)
    found = [ask(module, 8, packed) for packed in (None, PackedDocuments(bounds=(0, 16)))]
    plain, packed = (x[0] if kind == "yarn" else x for x in found)
    assert plain.shape[:-1] == (8, 1, 1) and torch.equal(plain[:, 0], packed)


class FakeRotary(torch.nn.Module):
    def get_emb(self, length: int) -> Tensor:
        return torch.zeros(length, 1, 1, 2, device="meta")


def test_positions_go_to_the_device_once_a_sequence() -> None:
    positions = Positions(Context(BurstConfig(), 2, 0))
    layers = [RotaryAtPositions(FakeRotary(), positions) for _ in range(3)]
    for number, bounds in enumerate((None, (0, 5, 16)), start=1):
        with Copies() as copies:
            for layer in layers:
                layer(WholeSequence(16, bounds))
        assert copies.count == 1, number


def test_inference_is_refused() -> None:
    module = RotaryAtPositions(FakeRotary(), Positions(Context(BurstConfig(), 1, 0)))
    with pytest.raises(ValueError, match="inference is not possible with documents"):
        module.get_rotary_seq_len(object(), None, torch.zeros(4, 1, 1), None)


@pytest.mark.usefixtures("on_the_cpu")
def test_rotary_embeddings_are_replaced_or_refused() -> None:
    """Those of layers, too: MLA has one in each."""
    positions = Positions(Context(BurstConfig(), 1, 0))
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.config = SimpleNamespace(apply_rope_fusion=True)
    model.layer.rotary_pos_emb = rotary("rope")
    with pytest.raises(ValueError, match="pass --no-rope-fusion"):
        replace_rotary(model, positions)
    model.layer.config.apply_rope_fusion = False
    replace_rotary(model, positions)
    replaced = model.layer.rotary_pos_emb
    assert isinstance(replaced, RotaryAtPositions)
    assert not model.state_dict(), "checkpoints are as they were"
    replace_rotary(model, positions)
    assert model.layer.rotary_pos_emb is replaced, "once is enough"
    model.rotary_pos_emb = MultimodalRotaryEmbedding(8, 1.0, cp_group=SimpleNamespace())
    with pytest.raises(ValueError, match="mrope cannot follow"):
        replace_rotary(model, positions)


def test_a_layer_with_another_attention_is_refused() -> None:
    """It would take what is moved, or documents, for Megatron's own zigzag."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for number, layer in enumerate(model.layers, start=1):
        layer.layer_number, layer.core_attention = number, IdentityOp()
    _check_core_attention(model)
    model.layers[1].core_attention = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="attention in every layer; layer 2 has Linear"):
        _check_core_attention(model)


# The hooks of one pipeline stage.


class Stage(torch.nn.Module):
    """A stage of a GPTModel: it returns what it is given."""

    def __init__(self, post_process: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False, mtp_num_layers=None)
        self.post_process = post_process
        self.decoder = SimpleNamespace(input_tensor=None)
        self.seen: dict[str, Any] = {}

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        decoder_input: Any = None,
        labels: Any = None,
        packed_seq_params: Any = None,
        *,
        loss_mask: Any = None,
        output: Any = None,
    ) -> Any:
        self.seen = {**locals(), "roll": multi_token_prediction.roll_tensor}
        return labels.float() if output is None else output


def hooks_of(stage: Stage, context: Any, cut: BatchCut | None = None) -> _StageHooks:
    return _StageHooks(stage, Layouts(context), SharedState(context.config), cut)


def hooked(context: Any, post_process: bool = True, mtp: int | None = None) -> Stage:
    stage = Stage(post_process)
    stage.config.mtp_num_layers = mtp
    hooks_of(stage, context)
    return stage


def _hooks(team: Team) -> None:
    context = team.context(SEGMENTED)
    whole = torch.arange(2 * 8 * context.ranks).view(2, -1)
    theirs = zigzag(whole.shape[1], context.ranks).shard(whole, context.rank, 1)
    ours = context.shard(whole, 1)
    stage = hooked(context)
    losses = stage(theirs, theirs + 1, None, labels=theirs + 2, loss_mask=theirs + 3.0)
    assert torch.equal(losses, theirs + 2.0), "losses come back"
    for number, name in enumerate(("input_ids", "position_ids", "labels", "loss_mask")):
        assert torch.equal(stage.seen[name], ours + number), name
    stage(None, None, None, labels=theirs)  # the last of several stages
    assert stage.seen["input_ids"] is None
    logits = torch.stack([ours, -ours], -1)
    for ids in (theirs, None):  # the last of several stages, too
        assert torch.equal(
            stage(ids, ids, None, output=logits), torch.stack([theirs, -theirs], -1)
        ), "logits come back"
    with pytest.raises(ValueError, match="segmented-zigzag moves what the model returns for each"):
        stage(theirs, theirs, None, labels=theirs, output=torch.zeros(3))
    with pytest.raises(ValueError, match="decoder_input stays where it is while the tokens move"):
        stage(theirs, theirs, None, decoder_input=torch.zeros(8, 2, 4))
    first = hooked(context, post_process=False)
    hidden = torch.zeros(3, 2, 5)
    assert first(theirs, theirs, None, output=hidden) is hidden
    assert torch.equal(first.seen["input_ids"], ours)


def test_a_stage_moves_what_it_has_and_its_losses_back(workers: WorkerPool) -> None:
    workers.run(2, _hooks)


def packed(*bounds: int) -> PackedSeqParams:
    return PackedSeqParams("thd", cu_seqlens_q=torch.tensor(bounds))


def _balanced_hooks(team: Team) -> None:
    """Every micro-batch has the layout of its documents, whatever came between."""
    context = team.context(BALANCED)
    whole = torch.arange(32)[None]
    theirs = zigzag(32, context.ranks).shard(whole, context.rank, 1)
    stage, layouts = hooked(context), set()
    for bounds in ((0, 20, 32), (0, 12, 14, 32), (0, 20, 32)):
        losses = stage(theirs, theirs, None, labels=theirs, packed_seq_params=packed(*bounds))
        documents = stage.seen["packed_seq_params"]
        assert documents.layout == balanced(Mask.causal(documents=bounds), 32, [0] * 2, 1).layout
        layouts.add(documents.layout)
        ours = documents.layout.shard(whole, context.rank, 1)
        assert torch.equal(stage.seen["input_ids"], ours)
        assert torch.equal(losses, theirs.float())
    assert len(layouts) == 2 and zigzag(32, 2) not in layouts
    stage(theirs, theirs, None, labels=theirs)
    assert torch.equal(stage.seen["input_ids"], theirs), "without documents nothing moves"
    with pytest.raises(ValueError, match="the documents end at 16, the sequence has 32 tokens"):
        stage(theirs, theirs, None, labels=theirs, packed_seq_params=packed(0, 16))


def test_a_stage_moves_tokens_by_the_documents_of_the_micro_batch(workers: WorkerPool) -> None:
    workers.run(2, _balanced_hooks)


def test_megatrons_roll_is_ours_while_a_stage_with_mtp_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it fails, and no longer."""
    monkeypatch.setattr(multi_token_prediction, "roll_tensor", "Megatron's")
    tokens = torch.zeros(1, 8)
    for layers, ranks in ((2, 2), (None, 2), (2, 1)):
        context = Context(BurstConfig(), ranks, 0)
        context.group = group_of(ranks) if ranks > 1 else None
        stage = hooked(context, mtp=layers)
        stage(tokens, tokens, None, labels=tokens)
        assert (stage.seen["roll"] != "Megatron's") == (layers == ranks == 2)
        with pytest.raises(AttributeError):
            stage(tokens, tokens, None)
        assert multi_token_prediction.roll_tensor == "Megatron's"


@pytest.mark.parametrize(
    ("size", "skip", "window"),
    [(None, None, None), ((7, 0), None, 7), ((-1, 0), None, None), ((7, 0), 2, None)],
)
def test_the_window_that_all_layers_have(size: Any, skip: Any, window: int | None) -> None:
    config = SimpleNamespace(window_size=size, window_attn_skip_freq=skip, num_layers=4)
    assert _window_of_all(config) == window


def test_samples_that_are_one_sequence_pass_the_pipeline_in_megatrons_shape() -> None:
    documents = PackedDocuments(bounds=(0, 8, 16), samples=2)
    hidden = torch.randn(8, 1, 3, requires_grad=True)  # of two ranks
    sent = _unflatten_output(hidden * 1.0, documents)
    assert sent.shape == (4, 2, 3) and sent._base is None, "Megatron frees what it has sent"
    sent.backward(torch.arange(24.0).view(4, 2, 3))
    assert torch.equal(hidden.grad.flatten(), torch.arange(24.0))
    assert _unflatten_output(hidden, PackedDocuments(bounds=(0, 16))) is hidden
    decoder = SimpleNamespace(input_tensor=sent)
    decoder.set_input_tensor = lambda x: setattr(decoder, "input_tensor", x)
    _flatten_input(decoder)
    assert torch.equal(decoder.input_tensor, hidden)


def test_tokens_that_nobody_moved_to_the_layout_are_refused() -> None:
    """A layer spec without the hooks would attend to the wrong tokens."""
    attention: Any = SimpleNamespace(_shared=SharedState(SEGMENTED))
    attention.context = Context(SEGMENTED, 2, 0)
    with pytest.raises(ValueError, match=r"not in --burst-layout segmented-zigzag: .*SequenceHook"):
        BurstCoreAttention._refuse(attention, None, None, attention.context)
    assert SharedState(BurstConfig()).follows_layout


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a GPTModel or HybridModel, not a Stage"):
        SequenceHooks(None)([Stage()])


def test_a_mixer_that_passes_no_states_is_refused_where_it_would_have_to() -> None:
    config, whole = BurstConfig(layout="contiguous"), torch.arange(8)[None]
    layer = torch.nn.Module()
    layer.layer_number, layer.mixer = 1, torch.nn.Linear(1, 1)
    stage = Stage()
    stage.hybrid_layer_pattern, stage.decoder.layers = "M", [layer]
    over_two, alone = (hooks_of(stage, Context(config, ranks, 0)) for ranks in (2, 1))
    refused = pytest.raises(ValueError, match="layer 1, M, is a Linear: states are passed by")
    with refused:
        over_two.let_layers_differ()
    alone.let_layers_differ()
    with refused:
        alone.before(stage, {"packed_seq_params": packed(0, 3, 8)})
    assert alone.before(stage, {"input_ids": whole})["input_ids"] is whole


# Batches that are cut by our layout.


def _cut(team: Team) -> None:
    """Nothing moves, whatever of the batch a stage is given; and what was not cut is refused."""
    context = team.context(BALANCED)
    cut = BatchCut(lambda batch, **_: batch | {"by": "Megatron"})
    assert cut({"tokens": torch.arange(8)[None]}, is_hybrid_cp=False)["by"] == "Megatron"
    stage = Stage()
    hooks = hooks_of(stage, context, cut)
    cut.follow(hooks.layout_of, Positions(context).in_sequence)
    whole = torch.arange(32)[None]
    for bounds in ((0, 20, 32), (0, 12, 14, 32), None):
        starts = None if bounds is None else torch.tensor([bounds])
        given = {"tokens": whole, "labels": whole + 1, "loss_mask": None, "cu_seqlens": starts}
        batch = cut(given, is_hybrid_cp=False, use_per_sequence_balancing=True)
        assert given["tokens"] is whole, "it may come again"
        said = None if bounds is None else packed(*bounds)
        layout = zigzag(32, 2) if bounds is None else hooks._read(said, context).layout
        mine = layout.shard(whole, context.rank, 1)
        assert torch.equal(batch["tokens"], mine) and torch.equal(batch["labels"], mine + 1)
        options = {"labels": batch["labels"], "packed_seq_params": said}
        losses = stage(batch["tokens"], None, None, loss_mask=mine.half(), **options)
        assert stage.seen["input_ids"] is batch["tokens"] and torch.equal(losses, mine + 1.0)
    with pytest.raises(ValueError, match="hand over what it returns, or take --burst-layout zig"):
        stage(batch["tokens"].clone(), None, None, labels=batch["labels"].clone())
    padded = {"cu_seqlens_padded": torch.tensor([[0, 20, 32]])}
    given = {"tokens": whole, "cu_seqlens": torch.tensor([[0, 18, 30]])} | padded
    assert cut(given)["by"] == "Megatron", "each document is in a zigzag of its own"


def test_a_batch_that_is_cut_by_our_layout_moves_nothing(workers: WorkerPool) -> None:
    workers.run(2, _cut)
