"""TransformerEngine and Apex have what we use of them, and Megatron in our name. (fast tier)

Where they are not installed, TRANSFORMER_ENGINE_PATH and APEX_PATH may name folders with their
sources, TransformerEngine's at the version that Megatron-Core 0.19 pins, 2.17.1.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.plugin.package_sources import Sources, find

TE = "transformer_engine.pytorch"
_LINEAR = (
    "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
    "get_rng_state_tracker init_method bias return_bias parallel_mode params_dtype device "
)
# What takes what. The classes are the bases of Megatron's; the functions are called by Megatron
# around our attention, and general_gemm by plugin/hooks/main_grad.py.
TRANSFORMER_ENGINE = {
    f"{TE}.Linear": _LINEAR + "ub_overlap_ag ub_overlap_rs ub_name rng_tracker_name "
    "delay_wgrad_compute symmetric_ar_type",
    f"{TE}.LayerNormLinear": _LINEAR + "eps normalization return_layernorm_output "
    "zero_centered_gamma ub_bulk_wgrad ub_bulk_dgrad ub_overlap_ag ub_overlap_rs_dgrad ub_name "
    "delay_wgrad_compute symmetric_ar_type",
    f"{TE}.GroupedLinear": _LINEAR + "num_gemms rng_tracker_name ub_name delay_wgrad_compute",
    # Norms take `device` and `params_dtype` among **kwargs, which no signature shows.
    f"{TE}.LayerNorm": "normalized_shape eps sequence_parallel zero_centered_gamma",
    f"{TE}.RMSNorm": "normalized_shape eps sequence_parallel zero_centered_gamma",
    f"{TE}.DotProductAttention": "num_attention_heads kv_channels attention_dropout "
    "attn_mask_type sequence_parallel tp_size get_rng_state_tracker tp_group layer_number "
    "num_gqa_groups attention_type cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale "
    "softmax_type window_size return_max_logit",
    f"{TE}.attention.rope.apply_rotary_pos_emb": "t freqs tensor_format interleaved fused "
    "cu_seqlens cp_size cp_rank",
    f"{TE}.distributed.checkpoint": "",
    f"{TE}.distributed.activation_recompute_forward": "activation_recompute recompute_phase",
    f"{TE}.fp8.FP8GlobalStateManager": "",
    f"{TE}.fp8.fp8_autocast": "enabled fp8_recipe fp8_group",
    f"{TE}.fp8.fp8_model_init": "enabled",
    f"{TE}.module.base.get_dummy_wgrad": "shape dtype zero",
    f"{TE}.cpp_extensions.general_gemm": "A B out_dtype layout out accumulate grad",
    f"{TE}.optimizers.FusedAdam": "params lr betas eps weight_decay",
    f"{TE}.optimizers.multi_tensor_applier": "",
    f"{TE}.optimizers.multi_tensor_l2norm": "",
    f"{TE}.optimizers.multi_tensor_scale": "",
}
APEX = {
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction": "",
    "apex.contrib.layer_norm.layer_norm.FastLayerNormFN": "",
    "apex.optimizers.FusedAdam": "params lr betas eps weight_decay",
    "apex.multi_tensor_apply.multi_tensor_applier": "",
}
# Extensions that have no Python source, with the function that is called.
APEX_EXTENSIONS = {
    "fused_weight_gradient_mlp_cuda": ("wgrad_gemm_accum_fp32", "input_2d d_output_2d d_weight"),
    "scaled_upper_triang_masked_softmax_cuda": ("forward", ""),
    "amp_C": ("multi_tensor_l2norm", ""),
}
# Megatron's classes that stay where TransformerEngine is there, and what each is of it.
MEGATRON_EXTENSIONS = {
    "TELinear": "Linear",
    "TELayerNormColumnParallelLinear": "LayerNormLinear",
    "TEGroupedLinear": "GroupedLinear",
    "TEDotProductAttention": "DotProductAttention",
}


def check(package: str, variable: str, table: dict[str, str]) -> None:
    found = find(package, variable)
    missing = {}
    for name, wanted in table.items():
        try:
            lacking = set(wanted.split()) - found.parameters(name) if wanted else set()
            if not wanted:
                found.parameters(name)
        except (AttributeError, ImportError) as error:
            lacking = {str(error)}
        if lacking:
            missing[name] = lacking
    assert not missing


def test_transformer_engine_has_what_is_used() -> None:
    check("transformer_engine", "TRANSFORMER_ENGINE_PATH", TRANSFORMER_ENGINE)


def test_general_gemm_takes_no_workspace() -> None:
    """By that plugin/hooks/main_grad.py tells the TransformerEngines apart."""
    found = find("transformer_engine", "TRANSFORMER_ENGINE_PATH")
    assert "workspace" not in found.parameters(f"{TE}.cpp_extensions.general_gemm")


def test_apex_has_what_is_used() -> None:
    check("apex", "APEX_PATH", APEX)


def test_apexs_extensions_have_what_is_used() -> None:
    found = find("apex", "APEX_PATH")
    if not isinstance(found, Sources):
        for module, (function, _) in APEX_EXTENSIONS.items():
            if importlib.util.find_spec(module):
                assert hasattr(importlib.import_module(module), function)
        return
    sources = {path: path.read_text() for path in found.folder.glob("csrc/**/*.cpp")}
    for function, arguments in APEX_EXTENSIONS.values():
        assert any(f'"{function}"' in text for text in sources.values()), function
        assert all(any(a in text for text in sources.values()) for a in arguments.split())


@pytest.mark.parametrize(
    ("package", "variable", "optimizer"),
    [
        ("transformer_engine", "TRANSFORMER_ENGINE_PATH", f"{TE}.optimizers.FusedAdam"),
        ("apex", "APEX_PATH", "apex.optimizers.FusedAdam"),
    ],
)
def test_their_adam_is_not_torchs_which_we_mend(
    package: str, variable: str, optimizer: str
) -> None:
    bases = find(package, variable).bases(optimizer)
    assert any(base.endswith("Optimizer") for base in bases)
    assert not [base for base in bases if base.endswith(("Adam", "AdamW"))]


def test_megatrons_classes_pass_what_the_table_says() -> None:
    megatron = importlib.util.find_spec("megatron")
    if megatron is None:
        pytest.skip("megatron-core is not installed")
    assert megatron.submodule_search_locations
    folders = map(Path, megatron.submodule_search_locations)
    files = (folder / "core/extensions/transformer_engine.py" for folder in folders)
    source = next(file for file in files if file.is_file()).read_text()
    classes = {n.name: n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)}
    shared = {"params_dtype", "device"}  # _get_extra_te_kwargs makes them for all
    for ours, theirs in MEGATRON_EXTENSIONS.items():
        assert [ast.unparse(b) for b in classes[ours].bases] == [f"te.pytorch.{theirs}"]
        text = ast.unparse(classes[ours])
        wanted = set(TRANSFORMER_ENGINE[f"{TE}.{theirs}"].split()) - shared
        assert [name for name in sorted(wanted) if name not in text] == [], ours
