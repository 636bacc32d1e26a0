"""Whether the Megatron that is installed has what our parts are attached to. (fast tier)"""

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.training")

from megatron_burst import launch  # noqa: E402
from megatron_burst.plugin import attachment_points  # noqa: E402
from megatron_burst.plugin.attachment_points import CALLED, REPLACED, WRAPPED  # noqa: E402
from megatron_burst.plugin.limits import DEV_LIMITS  # noqa: E402
from megatron_burst.plugin.refusals import layer_pattern, refusals  # noqa: E402


def test_the_installed_megatron_has_every_attachment_point() -> None:
    assert [*attachment_points.differences()] == []
    attachment_points.check()


@pytest.mark.parametrize(
    ("target", "change", "said"),
    [
        (
            "megatron.training.training:get_model",
            lambda provider, **options: None,
            "takes (provider, options), not (model_provider_func)",
        ),
        (
            "megatron.core.tensor_parallel:ColumnParallelLinear.forward",
            lambda self, input_, weight, runtime_gather_output, output_dtype=None: None,
            "takes (input_, weight, runtime_gather_output, output_dtype), not (input_, weight, ",
        ),
        (
            "megatron.core.utils:flatten_batch_for_packed_sequences",
            lambda batch, how: None,
            "takes (batch, how), not (batch)",
        ),
        ("megatron.core.utils:make_viewless_tensor", None, "is missing: "),
    ],
)
def test_what_differs_is_named_with_both_signatures(
    target: str, change: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each table: one that ours wraps, one that it replaces, two that it calls."""
    assert sum(target in table for table in (WRAPPED, REPLACED, CALLED)) == 1
    place = target.replace(":", ".")
    if change is None:
        monkeypatch.delattr(place)
    else:
        monkeypatch.setattr(place, change)
    (line,) = attachment_points.differences()
    assert line.startswith(f"{target} ") and said in line
    with pytest.raises(ValueError, match=r"megatron-core 0\.\d+\.\d+ in /.* is not one that"):
        attachment_points.check()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dynamic_context_parallel": True}, "drop --dynamic-context-parallel"),
        ({"sequence_packing_scheduler": "dp_balanced"}, "drop --sequence-packing-scheduler"),
        ({"cp_partition_mode": "contiguous"}, "drop --cp-partition-mode contiguous"),
        ({"use_varlen_dataset": True}, "or take --sft"),
        ({"rotary_base_per_layer": [1e4, 1e6]}, "drop --rotary-base-per-layer"),
        ({"hybrid_layer_pattern": "*-C-H-W-"}, "C H W in the pattern"),
    ],
)
def test_what_dev_alone_has_is_refused(settings: dict[str, object], reason: str) -> None:
    (line,) = refusals(SimpleNamespace(**settings))
    assert reason in line


def test_mains_name_of_gated_delta_nets_is_known() -> None:
    settings = SimpleNamespace(experimental_attention_variant="gdn", mtp_num_layers=None)
    assert refusals(settings) == [] and layer_pattern(settings) == "G"
    settings.mtp_num_layers = 1
    (line,) = refusals(settings)
    assert "has no MTP beside gdn" in line
    settings.hybrid_layer_pattern = "G*/*"
    assert refusals(settings) == [] and layer_pattern(settings) == "G*/*"
    (line,) = refusals(SimpleNamespace(experimental_attention_variant="gdn2"))
    assert line.startswith("experimental_attention_variant = gdn2: ")


def test_devs_defaults_pass() -> None:
    settings = dict.fromkeys(DEV_LIMITS) | {"cp_partition_mode": "zigzag"}
    assert refusals(SimpleNamespace(**settings)) == []


def test_what_stands_around_a_function_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    around = SimpleNamespace(original=lambda model_provider_func: None)
    monkeypatch.setattr("megatron.training.training.get_model", around)
    assert [*attachment_points.differences()] == []


@pytest.mark.parametrize("name", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_gpus_memory_without_settings_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str | None
) -> None:
    """And the launcher ends with what an older Megatron misses: the number says nothing."""
    for each in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "x:1")
    monkeypatch.setattr(launch, "_show_our_log", lambda: None)
    monkeypatch.setattr(launch.cpu_platform, "cpu_platform_wanted", lambda: False)
    monkeypatch.setattr(launch, "mend_wheel", lambda: pytest.fail("it goes on"))
    monkeypatch.delattr("megatron.training.training.get_model")
    missing = pytest.raises(SystemExit, match=r"(?s)megatron-core 0.*get_model is missing")
    with caplog.at_level("INFO", "megatron_burst"), missing:
        launch.start(own_entry=True)
    assert ("expandable_segments:True" in caplog.text) == (name is None)
