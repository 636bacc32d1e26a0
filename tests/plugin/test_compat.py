import argparse
import functools
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_burst.cpu_platform import torch_adam
from megatron_burst.plugin import compat

gpt_layer_specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from megatron_burst.plugin import local_layers  # noqa: E402
from tests.plugin.test_layer_spec import leaves  # noqa: E402


def config(**changes: object) -> SimpleNamespace:
    values = {
        "normalization": "LayerNorm",
        "sequence_parallel": True,
        "layernorm_zero_centered_gamma": False,
        "persist_layer_norm": False,
        "memory_efficient_layer_norm": False,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_norm_equals_torchs_with_gradients_and_is_marked(name: str, marked: bool) -> None:
    settings = config(normalization=name, sequence_parallel=marked)
    ours = local_layers.SequenceParallelNorm(settings, 12, eps=1e-3)
    torchs = getattr(torch.nn, name)(12, eps=1e-3)
    x = torch.randn(5, 2, 12).requires_grad_()
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(5, 2, 12)
    (ours(x) * weight).sum().backward()
    (torchs(y) * weight).sum().backward()
    assert torch.equal(ours(x), torchs(y)) and torch.equal(x.grad, y.grad)
    for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad) and mine.sequence_parallel is marked


@pytest.mark.parametrize("tokens", [1, 7])  # blocks of two
def test_an_rms_norm_in_blocks_of_rows_equals_the_whole(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(local_layers, "_NORM_NUMBERS", 2 * 3 * 4)
    ours = local_layers.SequenceParallelNorm(config(normalization="RMSNorm"), 4).double()
    torchs, found = torch.nn.RMSNorm(4, eps=1e-5).double(), []
    data = torch.randn(tokens, 3, 4, dtype=torch.float64)
    for norm in (ours, torchs):
        torch.nn.init.constant_(norm.weight, 1.5)
        x = data.clone().requires_grad_()
        out = norm(x)
        out.sin().sum().backward()
        found.append((out, x.grad, norm.weight.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_a_norm_refuses_what_megatrons_does() -> None:
    with pytest.raises(AssertionError, match="persist_layer_norm not supported"):
        local_layers.SequenceParallelNorm(config(persist_layer_norm=True), 4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization": "RMSNorm", "qk_layernorm": True},
        {"num_experts": 4, "qk_layernorm": True},
        {"multi_latent_attention": True, "qk_layernorm": True},
    ],
)
def test_every_norm_of_a_spec_is_replaced_and_nothing_else(options: dict[str, object]) -> None:
    layer = gpt_layer_specs.get_gpt_layer_local_spec(**options)
    block = TransformerBlockSubmodules(layer_specs=[layer, layer], layer_norm=WrappedTorchNorm)
    before = [*leaves(block).values()]
    after = [*leaves(local_layers.block_spec(block, config())).values()]
    assert before.count(WrappedTorchNorm) >= 5
    expected = [
        local_layers.SequenceParallelNorm if leaf is WrappedTorchNorm else leaf for leaf in before
    ]
    assert after == expected
    assert [*leaves(block).values()] == before


def test_norms_inside_partials_lists_and_dicts_are_replaced() -> None:
    spec = {"a": [functools.partial(int, WrappedTorchNorm, base=(WrappedTorchNorm, 1))]}
    built = local_layers.with_sequence_parallel_norm(spec)["a"][0]
    assert built.args == (local_layers.SequenceParallelNorm,)
    assert built.keywords == {"base": (local_layers.SequenceParallelNorm, 1)}


@pytest.mark.parametrize(
    ("normalization", "ours"), [("LayerNorm", False), ("RMSNorm", True), ("L2Norm", True)]
)
def test_apexs_norm_stays_the_last_one_where_it_can_be(
    normalization: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    block = "megatron.core.transformer.transformer_block"
    monkeypatch.setattr(f"{block}.LayerNormImpl", FusedLayerNorm)
    monkeypatch.setattr(f"{block}.get_num_layers_to_build", lambda *_: 1)
    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=normalization)
    found = local_layers.block_spec(layer, config(normalization=normalization)).layer_norm
    assert found is (local_layers.SequenceParallelNorm if ours else FusedLayerNorm)


@pytest.mark.parametrize(
    ("installed", "off"),
    [
        ((), set(compat.DEFAULTS_WITHOUT_TRANSFORMER_ENGINE)),
        (("apex", "fused_weight_gradient_mlp_cuda"), {"gradient_accumulation_fusion"}),
        (tuple(compat.APEX_EXTENSIONS.values()), set(compat.APEX_EXTENSIONS)),
        (("transformer_engine",), set(compat.DEFAULTS_WITHOUT_TRANSFORMER_ENGINE)),
    ],
)
def test_what_is_installed_stays_megatrons_default(
    installed: tuple[str, ...], off: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in installed:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    if "transformer_engine" not in installed:
        monkeypatch.setitem(sys.modules, "transformer_engine", None)  # the real one may be there
    parser = argparse.ArgumentParser()
    parser.set_defaults(**dict.fromkeys(compat.DEFAULTS_WITHOUT_TRANSFORMER_ENGINE, "Megatron's"))
    compat.set_defaults_without_transformer_engine(parser)
    ours = {k for k, v in vars(parser.parse_args([])).items() if v != "Megatron's"}
    every = set(compat.DEFAULTS_WITHOUT_TRANSFORMER_ENGINE)
    assert ours == (every - off if installed else every)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_with_initialised_state_trains_the_same(optimizer_class: type) -> None:
    results = []
    for initialised in (False, True):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2))]
        optimizer = optimizer_class(parameters, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            if initialised:
                torch_adam.initialise_adam_state(optimizer)  # again it keeps what is there
            sum((p**3).sum() for p in parameters).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([p.detach() for p in parameters]))
    assert torch.equal(*results)


def test_steps_are_no_longer_shared_after_loading() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    torch_adam.initialise_adam_state(optimizer)
    optimizer.register_load_state_dict_post_hook(torch_adam.give_each_parameter_its_step)
    state = optimizer.state_dict()
    step = torch.tensor(5.0)
    for entry in state["state"].values():
        entry["step"] = step
    optimizer.load_state_dict(state)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    assert [float(entry["step"]) for entry in optimizer.state.values()] == [6.0, 6.0]


def test_only_distributed_optimizers_with_torchs_adam_are_mended() -> None:
    plain = SimpleNamespace(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
    built = torch_adam.with_torch_adam(lambda: SimpleNamespace(chained_optimizers=[plain]))()
    assert built.chained_optimizers[0] is plain
    assert not plain.optimizer.state


def test_a_distributed_optimizer_loads_into_views_of_parameters() -> None:
    """And takes no step to have moments to load: they are there."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter])
    write = lambda *_: parameter.view(2, 2)[0].zero_()  # noqa: E731
    names = "load_state_dict load_parameter_state load_parameter_state_from_dp_reshardable"
    names += " _get_main_param_and_optimizer_states _set_main_param_and_optimizer_states"
    names += " sharded_param_state_fully_reshardable"
    part = SimpleNamespace(
        optimizer=optimizer,
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        _init_optimizer_states_with_dummy_values=optimizer.step,
        **dict.fromkeys(names.split(), write),
    )
    mended = torch_adam.with_torch_adam(lambda: part)()
    for name in ("load_state_dict", "load_parameter_state"):
        getattr(mended, name)("distrib_optim.pt")
    mended._init_optimizer_states_with_dummy_values()
    assert parameter.tolist() == [0, 0, 1, 1] and optimizer.state[parameter]["step"] == 0


def fake_megatron(folder, minor: int, parts=("core", "training")) -> str:
    for part in parts:
        (folder / "megatron" / part).mkdir(parents=True)
        (folder / "megatron" / part / "__init__.py").touch()
    if "core" in parts:
        text = f"MAJOR = 0\nMINOR = {minor}\nPATCH = 3\n"
        (folder / "megatron" / "core" / "package_info.py").write_text(text)
    return str(folder / "megatron")


def use_megatron(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    def find_spec(name: str) -> SimpleNamespace | None:
        files = [Path(place, *name.split(".")[1:], "__init__.py") for place in places]
        found = next((file for file in files if file.is_file()), None)
        return found and SimpleNamespace(origin=str(found))

    monkeypatch.setattr("importlib.util.find_spec", find_spec)


def test_the_installed_version_is_found() -> None:
    assert re.fullmatch(r"0\.\d+\.\d+", compat.check_megatron_version())
    assert (compat.megatron_folder() / "core").is_dir()


def test_no_number_is_refused(tmp_path, monkeypatch) -> None:
    """A branch keeps its number while names move: `attachment_points` looks at these."""
    use_megatron(monkeypatch, fake_megatron(tmp_path, 21))
    assert compat.check_megatron_version() == "0.21.3"
    assert compat.megatron_folder() == tmp_path / "megatron"


def forget_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing of it was imported yet."""
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)


def test_an_editable_install_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As setuptools makes it: `megatron` has no folder, a finder knows those of its parts."""
    place = fake_megatron(tmp_path, 20)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name == "megatron":
                spec = ModuleSpec(name, None, is_package=True)
                spec.submodule_search_locations = ["__editable__.megatron_core"]
                return spec
            if name not in ("megatron.core", "megatron.training"):
                return None
            file = Path(place, name.removeprefix("megatron."), "__init__.py")
            return importlib.util.spec_from_file_location(name, file)

    forget_megatron(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert compat.check_megatron_version() == "0.20.3"
    assert compat.megatron_folder() == Path(place)
    assert "megatron.core" not in sys.modules


def test_a_mix_of_two_installations_is_refused(tmp_path, monkeypatch) -> None:
    first = fake_megatron(tmp_path / "checkout", 19, parts=("training",))
    second = fake_megatron(tmp_path / "wheel", 19)
    use_megatron(monkeypatch, first, second)
    with pytest.raises(ValueError, match="remove one of the two"):
        compat.check_megatron_version()


def test_no_megatron_is_said(monkeypatch) -> None:
    use_megatron(monkeypatch)
    assert compat.megatron_folder() is None
    with pytest.raises(ValueError, match="not installed"):
        compat.check_megatron_version()
