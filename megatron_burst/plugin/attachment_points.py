"""What of Megatron our parts are attached to, and the signatures that they reckon with.

By these a Megatron is judged, not by its version: branches keep a number for months while names
move. What has no signature that matters here is found missing where it is imported.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

from megatron_burst.plugin import compat
from megatron_burst.plugin.refusals import refuse_all

_CORE = "megatron.core"
_LAYERS, _DATASETS = f"{_CORE}.transformer", f"{_CORE}.datasets"
_TRAINING = "megatron.training"
_BATCHES = f"{_CORE}.num_microbatches_calculator:StepBatchsizeNumMicroBatchesCalculator"
_ROTARY = f"{_CORE}.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"
_OF_A_CALL = "input_ids position_ids labels loss_mask decoder_input padding_mask packed_seq_params"

# Parameters by which ours reads or changes a call of Megatron's; all others are handed on.
WRAPPED: Mapping[str, str] = {
    f"{_TRAINING}.arguments:parse_args": "extra_args_provider ignore_unknown_args",
    f"{_TRAINING}.argument_utils:gpt_config_from_args": "args",
    f"{_TRAINING}.argument_utils:hybrid_config_from_args": "args",
    f"{_TRAINING}.models.gpt:mtp_block_spec": "config",
    f"{_TRAINING}.training:build_train_valid_test_data_iterators": "",
    f"{_TRAINING}.training:get_megatron_optimizer": "",
    f"{_TRAINING}.training:get_model": "model_provider_func",
    f"{_TRAINING}.training:maybe_finalize_async_save": "",
    f"{_TRAINING}.training:save_checkpoint": "iteration",
    f"{_TRAINING}.checkpointing:_load_base_checkpoint": "load_dir args",
    f"{_DATASETS}.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices": "",
    f"{_DATASETS}.gpt_dataset:GPTDataset._query_document_sample_shuffle_indices": "idx",
    f"{_DATASETS}.blended_dataset:BlendedDataset._build_indices": "",
    f"{_CORE}.utils:get_batch_on_this_cp_rank": "batch",
    f"{_BATCHES}._parse_schedule": "schedule_str seq_length",
    f"{_CORE}.rerun_state_machine:RerunStateMachine.should_checkpoint_and_exit": "",
    f"{_CORE}.models.gpt.gpt_model:GPTModel.__init__": (
        "config transformer_layer_spec mtp_block_spec vp_stage"
    ),
    f"{_CORE}.models.gpt.gpt_model:GPTModel.forward": _OF_A_CALL,
    f"{_CORE}.models.gpt.gpt_model:GPTModel.build_schedule_plan": _OF_A_CALL,
    f"{_CORE}.models.hybrid.hybrid_model:HybridModel.__init__": "config hybrid_stack_spec",
    f"{_CORE}.models.hybrid.hybrid_model:HybridModel.forward": _OF_A_CALL,
    f"{_CORE}.models.hybrid.hybrid_block:HybridStack.__init__": (
        "config submodules layer_type_list post_layer_norm post_process pg_collection"
    ),
    f"{_CORE}.ssm.mamba_mixer:MambaMixer.__init__": "pg_collection",
    f"{_CORE}.ssm.mamba_mixer:MambaMixer.forward": (
        "hidden_states inference_context inference_params packed_seq_params"
    ),
    f"{_CORE}.ssm.gated_delta_net:GatedDeltaNet.__init__": "pg_collection",
    f"{_CORE}.ssm.gated_delta_net:GatedDeltaNet.forward": (
        "hidden_states attention_mask inference_context packed_seq_params sequence_len_offset "
        "inference_params"
    ),
    f"{_LAYERS}.multi_token_prediction:roll_tensor": "cp_group",
    f"{_LAYERS}.transformer_layer:TransformerLayer.forward": "hidden_states",
}
# Megatron calls ours in the place of these, with these parameters and no others.
REPLACED: Mapping[str, str] = {
    f"{_TRAINING}.initialize:_compile_dependencies": "",
    f"{_TRAINING}.checkpointing:read_metadata": "tracker_filename",
    f"{_TRAINING}.checkpointing:checkpoint_exists": "checkpoints_path",
    f"{_LAYERS}.attention:CoreAttentionBuilder.__call__": (
        "config layer_number attn_mask_type attention_type cp_comm_type softmax_scale pg_collection"
    ),
    f"{_LAYERS}.attention:CoreAttentionInterface.forward": (
        "query key value attention_mask attn_mask_type attention_bias packed_seq_params"
    ),
    f"{_CORE}.models.gpt.gpt_model:GPTModel.compute_language_model_loss": "labels logits",
    f"{_CORE}.models.hybrid.hybrid_model:HybridModel.compute_language_model_loss": "labels logits",
    f"{_CORE}.tensor_parallel:ColumnParallelLinear.forward": "input_ weight runtime_gather_output",
    f"{_ROTARY}.get_rotary_seq_len": (
        "inference_context transformer transformer_input transformer_config packed_seq_params "
        "inference_params"
    ),
}
# Ours calls these with these parameters; any other has a default.
CALLED: Mapping[str, str] = {
    f"{_ROTARY}.get_emb": "max_seq_len",
    f"{_TRAINING}.models.gpt:default_layer_spec": "config vp_stage",
    f"{_LAYERS}.transformer_block:get_num_layers_to_build": "config vp_stage",
    f"{_LAYERS}.transformer_block:TransformerBlockSubmodules": "layer_specs layer_norm",
    f"{_LAYERS}.spec_utils:get_module": "spec_or_module",
    f"{_LAYERS}.utils:is_layer_window_attention": (
        "window_size window_attn_skip_freq layer_number"
    ),
    f"{_CORE}.models.gpt.moe_module_specs:get_moe_module_spec": "use_te num_experts",
    f"{_CORE}.ssm.gated_delta_net:GatedDeltaNet._apply_gated_norm": "x gate",
    f"{_CORE}.utils:flatten_batch_for_packed_sequences": "batch",
    f"{_CORE}.utils:make_viewless_tensor": "inp requires_grad keep_graph",
    f"{_CORE}.packed_seq_params:PackedSeqParams": (
        "qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded "
        "max_seqlen_q max_seqlen_kv tokens_per_sample"
    ),
}


def check() -> None:
    """Refuse a Megatron whose attachment points are missing or differ; imports all of them.

    Raises:
        ValueError: with each of them, what it has and what ours needs, and where Megatron lies.
    """
    where = f"megatron-core {compat.check_megatron_version()} in {compat.megatron_folder()}"
    refuse_all(f"{where} is not one that megatron_burst can be attached to", differences())


def differences() -> Iterator[str]:
    """Yield what of the tables the Megatron that is imported has not, one line each."""
    tests: tuple[tuple[Mapping[str, str], Callable[[set[str], set[str], set[str]], bool]], ...] = (
        (WRAPPED, lambda ours, theirs, _: ours <= theirs),
        (REPLACED, lambda ours, theirs, _: ours == theirs),
        (CALLED, lambda ours, theirs, required: required <= ours <= theirs),
    )
    for table, fits in tests:
        for target, names in table.items():
            try:
                parameters = _parameters(target)
            except (ImportError, AttributeError) as error:
                yield f"{target} is missing: {error}"
                continue
            required = {p.name for p in parameters if _is_required(p)}
            theirs = [p.name for p in parameters]
            if not fits({*names.split()}, {*theirs}, required):
                yield f"{target} takes ({', '.join(theirs)}), not ({', '.join(names.split())})"


def _parameters(target: str) -> list[inspect.Parameter]:
    """Return those of the function, method or class "module:name", not what we put around it."""
    module, _, path = target.partition(":")
    function: Any = reduce(getattr, path.split("."), importlib.import_module(module))
    signature = inspect.signature(getattr(function, "original", function))
    return [p for p in signature.parameters.values() if p.name != "self"]


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variable
