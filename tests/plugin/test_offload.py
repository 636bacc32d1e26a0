"""Inputs of checkpoints go to the host's memory, and attention's results are still found."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.training.models.gpt")
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_burst.plugin.attention.core_attention import BurstCoreAttention  # noqa: E402
from megatron_burst.plugin.hooks import host_room  # noqa: E402
from megatron_burst.plugin.hooks.mlp import ChunkedMlps  # noqa: E402
from megatron_burst.plugin.hooks.offload import OffloadInputs  # noqa: E402
from megatron_burst.plugin.training_config import MlpConfig  # noqa: E402
from megatron_burst.transport.host import HostMemory  # noqa: E402
from tests.plugin.contexts import copies_at_once  # noqa: E402
from tests.plugin.test_recompute import (  # noqa: E402
    LAYERS,
    RUNS,
    Model,
    Run,
    batch,
    block,
    in_pairs,
    selective,
    uniform,
)

CHECKPOINTS = {uniform: LAYERS, in_pairs: LAYERS // 2, block: 2, selective: 0}


class Decoder(torch.nn.Module):
    """Calls the layers, as Megatron's block does, inside of its own forward."""

    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, model: Any, hidden: Tensor, run: Run) -> Tensor:
        return run(model, hidden).tanh()  # a norm behind the layers saves its output


class Offloading(Model):
    def __init__(self, fraction: float | None) -> None:
        super().__init__(fraction)
        self.decoder = Decoder(self.decoder.layers)
        OffloadInputs(self.checkpoints)([self])

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return self.decoder([self][0], self.embedding(x), run).square().sum()


class Plain(Offloading):
    def __init__(self) -> None:
        Model.__init__(self, None)
        self.decoder = Decoder(self.decoder.layers)


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many inputs went and came back; the CPU stands in for the card."""
    seen: Counter[str] = Counter()
    for name in ("store", "start_back"):
        original = getattr(HostMemory, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            seen[name] += 1
            return original(*args)

        monkeypatch.setattr(HostMemory, name, counted)
    copies_at_once(monkeypatch)
    return seen


def wanted(*numbers: int, run: Run) -> list[Tensor]:
    model = Plain()
    for number in numbers:
        model(batch(number), run).backward()
    return model.gradients()


@pytest.mark.parametrize("fraction", [None, 0.3])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_gradients_are_the_same_and_inputs_are_copied_once(
    copies: Counter[str], run: Run, fraction: float | None
) -> None:
    model = Offloading(fraction)
    losses = [model(batch(number), run) for number in range(3)]
    assert copies == Counter(store=3 * CHECKPOINTS[run]) + Counter()
    for loss in losses:
        loss.backward()
    for x, y in zip(model.gradients(), wanted(0, 1, 2, run=run), strict=True):
        assert (x - y).norm() <= 2e-6 * y.norm()
    if CHECKPOINTS[run]:  # the one that left last is still on the card
        assert copies["start_back"] == 3 * CHECKPOINTS[run] - 1
    if fraction is not None:
        found = 2 if run is block else LAYERS
        assert (model.checkpoints.found, model.checkpoints.kept) == (3 * found, 0)


class Scale(torch.autograd.Function):
    """As Megatron's linears do: their backward looks for what a weight has beside its values."""

    seen: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Scale.seen.append(hasattr(weight, "main_grad"))
        return grad * weight, (grad * x).sum()


def test_layers_without_a_checkpoint_save_their_weights_themselves() -> None:
    model, weight = Offloading(None), torch.nn.Parameter(torch.tensor(2.0))
    weight.main_grad = torch.zeros(())

    def scaled(_: Any, args: Any, given: dict[str, Any]) -> Any:
        return args, {**given, "hidden_states": Scale.apply(given["hidden_states"], weight)}

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(scaled, with_kwargs=True)
    Scale.seen.clear()
    for _ in range(2):
        model(batch(0), block).backward()
    assert Scale.seen == 2 * LAYERS * [True]


def test_an_input_comes_back_while_the_layer_behind_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    back = HostMemory.start_back
    monkeypatch.setattr(
        HostMemory, "start_back", lambda *given: (seen.append("fetch"), back(*given))[1]
    )
    model = Offloading(None)
    loss = model(batch(0), uniform)
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append("layer"))
    loss.backward()
    assert seen == (LAYERS - 1) * ["fetch", "layer"] + ["layer"]


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def of_layers(layers: int, **settings: Any) -> Any:
    config = TransformerConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        params_dtype=torch.bfloat16,
        bf16=True,
        **FULL | settings,
    )
    made = GPTModel.__new__(GPTModel)
    torch.nn.Module.__init__(made)
    made.config, made.decoder = config, SimpleNamespace(layers=[None] * layers)
    return made


def attention() -> torch.nn.Module:
    made = BurstCoreAttention.__new__(BurstCoreAttention)
    torch.nn.Module.__init__(made)
    return made


def test_what_the_node_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(host_room, "get_num_microbatches", lambda: 1)
    for gib, fits in ((255, False), (257, True)):  # 8 ranks · 32 layers · 1 GiB
        monkeypatch.setattr(host_room, "available_bytes", lambda gib=gib: gib * 2**30)
        with nullcontext() if fits else pytest.raises(ValueError, match="8 ranks on this node 256"):
            host_room.HostRoom(131072, None)([of_layers(32)])
    room = host_room.HostRoom(131072, None)
    first, second = of_layers(16), of_layers(16)  # virtual stages, that come one by one
    first.vp_stage, second.vp_stage = 0, 1
    monkeypatch.setattr(host_room, "available_bytes", lambda: 255 * 2**30)
    for _ in range(2):  # as often as a model is built
        room([first])
        with pytest.raises(ValueError, match="8 ranks on this node 256"):
            room([second])
    weights = of_layers(1)
    weights.dense = torch.nn.Parameter(torch.empty(2**30, device="meta"))
    weights.expert = torch.nn.Parameter(torch.empty(2**28, device="meta"))
    weights.expert.allreduce = False
    given = SimpleNamespace(
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.5,
        use_distributed_optimizer=True,
        world_size=64,
        num_distributed_optimizer_instances=2,
        pipeline_model_parallel_size=2,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    share = host_room.optimizer_share(given)  # 16 / 8 / 2 GiB, 4 / 4 / 2 GiB; inputs of 1 GiB
    with pytest.raises(ValueError, match=r"puts 2\.5 GiB .* node 20\.0 .*offload \(1\.5 GiB"):
        monkeypatch.setattr(host_room, "available_bytes", lambda: 19 * 2**30)
        host_room.HostRoom(131072, None, share)([weights])
    monkeypatch.setattr(host_room, "available_bytes", lambda: 0)
    with pytest.raises(ValueError, match=r"puts 8\.0 GiB"):  # of 4 inputs, for torch pins as much
        host_room.HostRoom(131072 + 64, None)([of_layers(4)])
    # Steps of 1 micro-batch, later of 6 over 8 stages, or of 64 that are not all at work at once.
    monkeypatch.setattr(host_room, "get_current_global_batch_size", lambda: 2)
    for schedule, gib in ((None, 4), ("0:2 1K:12,9K:4", 24), ("0:2, 1K:0.128K", 32)):
        batches = host_room.scheduled_batches(SimpleNamespace(step_batch_size_schedule=schedule))
        staged = of_layers(4, pipeline_model_parallel_size=8, pipeline_dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=f"puts {gib}.0 GiB"):
            host_room.HostRoom(131072, None, (0.0, 0.0), batches)([staged])
    # Two virtual stages of 4 layers on 4 ranks: (7 + a group) / 2 are under way.
    pipeline: dict[str, Any] = {
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.bfloat16,
    }
    monkeypatch.setattr(host_room, "get_num_microbatches", lambda: 64)
    for group, gib in ((4, 44), (16, 92)):
        stages = 2 * [of_layers(4, microbatch_group_size_per_vp_stage=group, **pipeline)]
        with pytest.raises(ValueError, match=f"puts {gib}.0 GiB"):
            host_room.HostRoom(131072, None)(stages)


def test_what_is_counted() -> None:
    assert host_room.offloaded(of_layers(32), 131072, None) == {2**30: 32}
    spread = of_layers(32, tensor_model_parallel_size=2, sequence_parallel=True)
    assert host_room.offloaded(spread, 131072, None) == {2**29: 32}
    wide = of_layers(32, fp32_residual_connection=True)
    assert host_room.offloaded(wide, 131072, None) == {2**31: 32}
    predicting = of_layers(32, mtp_num_layers=2, mtp_use_repeated_layer=True)
    predicting.mtp = SimpleNamespace(layers=[None])  # its checkpoints save embeddings, too
    assert host_room.offloaded(predicting, 131072, None) == {2**30: 36}
    rows = 131072 // 4 * 16  # of a rank's heads
    for recompute, inputs, calls in (
        ({}, 32, 32),
        ({"recompute_method": "block", "recompute_num_layers": 2}, 2, 2),
        (dict.fromkeys(FULL) | {"recompute_granularity": "selective"}, 0, 33),
    ):
        spread = of_layers(32, tensor_model_parallel_size=2, sequence_parallel=True, **recompute)
        spread.decoder.layers = [attention() for _ in range(32)]
        spread.layers = torch.nn.ModuleList([*spread.decoder.layers, attention()])  # one of MTP's
        expected = {2**29: inputs, rows * 256: calls, rows * 4: calls}
        assert host_room.offloaded(spread, 131072, 0.75) == expected


def test_an_evaluation_copies_nothing(copies: Counter[str]) -> None:
    model = Offloading(0.5)
    with torch.no_grad():
        model(batch(0), uniform)
    assert not copies


def test_an_exception_leaves_nothing_behind(copies: Counter[str]) -> None:
    model = Offloading(0.5)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    handle = model.decoder.layers[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        model(batch(0), uniform)
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    loss = model(batch(1), uniform)
    handle = model.decoder.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward()
    handle.remove()
    del loss
    model.zero_grad()
    model(batch(2), uniform).backward()
    for x, y in zip(model.gradients(), wanted(2, run=uniform), strict=True):
        assert (x - y).norm() <= 2e-6 * y.norm()


@pytest.mark.parametrize(
    ("own", "tree", "names", "of_all"),
    [
        ("0::/job/step", ".", "memory.max memory.current", ""),
        ("9:memory:/job/step", "memory", "memory.limit_in_bytes memory.usage_in_bytes", "total_"),
    ],
    ids=["version 2", "version 1"],
)
def test_a_control_group_bounds_what_is_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, tree: str, names: str, of_all: str
) -> None:
    folder, (limit, held) = tmp_path / tree / "job" / "step", names.split()
    folder.mkdir(parents=True)
    files = f"active_file 0\ninactive_file 0\n{of_all}active_file {2**30}\n"
    for group, bytes_ in ((folder, 2**62 if of_all else "max"), (folder.parent, 7 * 2**30)):
        (group / limit).write_text(f"{bytes_}\n")
        (group / held).write_text(f"{6 * 2**30}\n")  # of it 5 of files that were read
        (group / "memory.stat").write_text(f"{files}{of_all}inactive_file {4 * 2**30}\n")
    (tmp_path / "cgroup").write_text(f"4:cpu:/other\n{own}\n")
    monkeypatch.setattr(host_room, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_room, "_OWN_CGROUPS", tmp_path / "cgroup")
    free = SimpleNamespace(available=100 * 2**30)
    monkeypatch.setattr(host_room.psutil, "virtual_memory", lambda: free)
    assert host_room.available_bytes() == 6 * 2**30


@pytest.mark.parametrize(
    "hook", [host_room.HostRoom(1, None), ChunkedMlps(MlpConfig(chunks=2))], ids=["inputs", "MLPs"]
)
def test_other_models_are_refused(hook: Any) -> None:
    with pytest.raises(ValueError, match="needs a GPTModel or HybridModel, not a Linear"):
        hook([torch.nn.Linear(1, 1)])
