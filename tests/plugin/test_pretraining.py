"""What our forward step hands to the model, and what it leaves to Megatron-LM's script. (fast tier)

tests/training trains with it.
"""

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_burst import pretrain
from megatron_burst.transport import lock

pretraining = pytest.importorskip("megatron_burst.plugin.pretraining")
from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    RotaryEmbedding,
)

TIMER = SimpleNamespace(start=lambda: None, stop=lambda: None)


def given_to_the_model(
    monkeypatch: pytest.MonkeyPatch,
    batch: dict[str, Any],
    stage: int | None = None,
    trains: bool = True,
    **options: bool,
) -> dict[str, Any]:
    """Run a step on a batch as the data loader and Megatron's flattening make it.

    With the lengths of the documents that Megatron's FLOPs count, if any.
    """
    given: dict[str, Any] = {}

    class Model(torch.nn.Module):
        vp_stage = stage

        def forward(self, *_: Any, **options: Any) -> torch.Tensor:
            given.update(options)
            return torch.zeros(1)

        def build_schedule_plan(self, *args: Any, **options: Any) -> torch.Tensor:
            assert self.training
            return self.forward(*args, **options)

    keys = (*pretraining._BATCH_KEYS, *pretraining._DOCUMENT_KEYS)
    args = SimpleNamespace(micro_batch_size=2, eval_micro_batch_size=2, seq_length=8)
    monkeypatch.setattr(pretraining, "get_args", lambda: args)
    monkeypatch.setattr(pretraining, "get_timers", lambda: lambda *_, **__: TIMER)
    monkeypatch.setattr(pretraining, "_next_batch", lambda *_: dict.fromkeys(keys) | batch)
    count = lambda bounds: given.update(counted=bounds.diff().tolist())  # noqa: E731
    monkeypatch.setattr(pretraining, "update_seqlen_stats_from_cu_seqlens", count)
    pretraining.forward_step(iter(()), Model().train(trains), **options)
    return given


def test_layers_of_megatrons_own_know_where_documents_begin_and_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = {"cu_seqlens": torch.tensor([[0, 5, 8, 16]]), "max_seqlen": torch.tensor([8])}
    packed = given_to_the_model(monkeypatch, batch)["packed_seq_params"]
    # Without a GPU the embedding itself cannot be made; the method uses nothing of it here.
    length = RotaryEmbedding.get_rotary_seq_len(object(), None, None, None, None, packed)
    assert length == 8 and isinstance(length, int)
    assert packed.cu_seqlens_q.tolist() == [0, 5, 8, 16] and packed.tokens_per_sample == 8
    assert packed.seq_idx.tolist() == [5 * [0] + 3 * [1] + 8 * [2]]  # of Mamba layers


def test_flops_count_the_documents_of_a_training_micro_batch_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not of an evaluation, and not again on each of a rank's virtual stages."""
    batch = {"cu_seqlens": torch.tensor([[0, 5, 8, 16]]), "max_seqlen": torch.tensor([8])}
    for stage, trains, counted in ((0, True, [5, 3, 8]), (1, True, None), (None, False, None)):
        assert given_to_the_model(monkeypatch, batch, stage, trains).get("counted") == counted
    assert given_to_the_model(monkeypatch, batch)["counted"] == [5, 3, 8]


def test_a_plan_is_asked_for_with_what_a_forward_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_to_the_model(monkeypatch, {})
    assert given and given_to_the_model(monkeypatch, {}, return_schedule_plan=True) == given


def test_a_batch_without_documents_has_no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_to_the_model(monkeypatch, {})["packed_seq_params"] is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"mock_data": False}, "no data is given: pass --data-path PREFIX, or --mock-data"),
        ({"mock_data": False, "data_path": ["corpus"]}, None),
        ({"mock_data": False, "per_split_data_args_path": "splits.json"}, None),
        ({"mock_data": False, "ckpt_convert_format": "torch_dist"}, None),
        ({"sft": True}, "--sft reads conversations: pass --data-path FILE in the place of"),
        ({"sft": True, "data_path": ["conversations.jsonl"]}, None),
        ({"eval_iters": 9}, None),  # made-up data are split evenly
        ({"eval_iters": 9, "data_path": ["corpus"], "split": "9,1,0"}, None),
        ({"data_path": ["corpus"], "split": "9,0,1"}, None),
        (
            {"eval_iters": 9, "data_path": ["corpus"], "split": "9,0,1"},
            "--split 9,0,1: there is no validation set for --eval-iters 9: pass one, or --eval-it",
        ),
        ({"eval_iters": 9, "train_data_path": ["corpus"]}, "no --valid-data-path: there is no val"),
        ({"full_validation": True}, "of them: add --multiple-validation-sets"),
        ({"full_validation": True, "multiple_validation_sets": True}, None),
        ({"dataloader_type": "external"}, "brings no loader: take single or cyclic"),
        ({"moe_use_upcycling": True}, "fails before it loads"),
        ({"position_embedding_type": "mrope"}, "three positions a token"),
        ({"freeze_all_layers": True}, "0.19 would train all weights"),
        ({"iterations_to_skip": [2], "pipeline_model_parallel_size": 2}, None),
        ({"iterations_to_skip": [2], "pipeline_model_parallel_size": 3}, "skips none with virtual"),
        ({"iterations_to_skip": [2], "virtual_pipeline_model_parallel_size": 2}, "skips none with"),
        ({"mtp_num_layers": 0}, None),  # as None, no MTP
        ({"mtp_num_layers": 1}, None),
        ({"pipeline_model_parallel_layout": "E|tL"}, None),
        ({"fim_data": True, "hybrid_layer_pattern": "*-"}, "PATH/pretrain_hybrid.py"),
        (
            {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "E|mL", "fim_data": True},
            "--fim-data, --mtp-num-layers with --pipeline-model-parallel-layout needs Megatron",
        ),
    ],
)
def test_what_this_entry_cannot_train_is_named(changes: dict[str, Any], named: str | None) -> None:
    off = dict.fromkeys((*pretraining._DATA, *pretraining._NEEDS_UPSTREAM_SCRIPT), False)
    off |= {"mock_data": True, "sft": False, "eval_iters": 0, "split": None}
    off |= dict.fromkeys(("full_validation", "multiple_validation_sets"), False)
    off |= {"valid_data_path": None, "dataloader_type": None, "freeze_all_layers": False}
    off |= {"moe_use_upcycling": False, "position_embedding_type": "rope"}
    off |= {"iterations_to_skip": [], "pipeline_model_parallel_size": 1}
    off |= {"virtual_pipeline_model_parallel_size": None}
    off |= dict.fromkeys(("logits_load_dir", "mtp_num_layers"))  # None is Megatron's default
    off |= dict.fromkeys(("pipeline_model_parallel_layout", "hybrid_layer_pattern"))
    said = pretraining.refusal(SimpleNamespace(**off | changes))
    assert said is None if named is None else named in said


def test_the_default_tokenizer_is_that_of_upstreams_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def parse(**options: Any) -> None:
        given.update(options)
        sys.exit()

    monkeypatch.setattr("megatron.training.arguments.parse_and_validate_args", parse)
    with pytest.raises(SystemExit):
        pretrain._train()
    assert given == {"args_defaults": {"tokenizer_type": "GPT2BPETokenizer"}}


def hold(save: Path | None, rank: int = 0, *, skip_train: bool = False) -> None:
    saved = None if save is None else str(save)
    pretraining.hold_checkpoints(Namespace(save=saved, rank=rank, skip_train=skip_train))


def test_a_second_job_does_not_save_where_a_first_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first rank alone, and not before the first had time to end. It may evaluate."""
    monkeypatch.setattr(pretraining, "_PATIENCE_SECONDS", 0.1)
    with lock.held(tmp_path / "saved", say=print):
        hold(tmp_path / "saved", 1)
        hold(tmp_path / "saved", skip_train=True)
        hold(tmp_path / "elsewhere")
        hold(None)
        with pytest.raises(SystemExit, match="^megatron_burst: .*/saved is in use by a process on"):
            hold(tmp_path / "saved")


def test_a_directory_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first checkpoint, maybe of hours, would be lost. Root may write wherever it can be."""
    (tmp_path / "file").touch()
    for save in ("file", "file/below"):
        with pytest.raises(SystemExit, match=f"--save .*/{save} is no directory that can be writ"):
            hold(tmp_path / save)
    monkeypatch.setattr("os.access", lambda path, _: path != str(tmp_path))
    with pytest.raises(SystemExit, match="can be written to"):
        hold(tmp_path)
