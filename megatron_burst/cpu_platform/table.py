"""The table of names that stand in for CUDA where Megatron trains without a GPU."""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.constants import default_pg_timeout

from megatron_burst.cpu_platform import recurrences
from megatron_burst.cpu_platform.arguments import check_cpu_arguments, set_cpu_defaults
from megatron_burst.plugin.compat import around_parse_args, peak_resident_bytes

CPU = torch.device("cpu")
# 10 or more is above all of Megatron's lower bounds, and it then does not ask for
# CUDA_DEVICE_MAX_CONNECTIONS, which orders the kernels of a GPU and means nothing here.
COMPUTE_CAPABILITY = (10, 0)
# What Megatron asks of a device's properties, answered for this host.
PROPERTIES = SimpleNamespace(
    name="cpu",
    major=COMPUTE_CAPABILITY[0],
    minor=COMPUTE_CAPABILITY[1],
    multi_processor_count=os.cpu_count() or 1,
    total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
)


class AllIsDone:
    """A stream, its context and an event at once: on a CPU everything already ran in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    def elapsed_time(self, _: object) -> float:
        """Say that nothing took time."""
        return 0.0

    def _nothing(self, *_: object, **__: object) -> "AllIsDone":
        return self

    __enter__ = synchronize = record = wait = wait_stream = wait_event = record_event = _nothing


def returns(value: Any) -> Callable[[Any], Any]:
    """Make a function that answers `value` to any call."""
    return lambda original: lambda *args, **kwargs: value


def replaced_by(substitute: Any) -> Callable[[Any], Any]:
    """Put `substitute` itself in the original's place."""
    return lambda original: substitute


def allocated_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with a CUDA `device` read as the CPU and without `pin_memory`: it needs CUDA."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_cpu


def reported_as_cuda(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type` whose answer without arguments names the CUDA tensor of the same dtype."""

    @functools.wraps(tensor_type)
    def type_or_cast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_or_cast


def torch_of_the_cpu(original: Any) -> Any:
    """`torch` as one module sees it, in which `torch.device("cuda:…")` is the CPU.

    For modules that spell out the device; `torch.device` itself is a type and stays.
    """

    def device(*args: Any) -> torch.device:
        return CPU if str(args[0]).startswith("cuda") else torch.device(*args)

    return SimpleNamespace(**{**vars(original), "device": device})


def current_device() -> torch.device:
    """The device Megatron works on. That torch.cuda holds this function says: active."""
    return CPU


# Dropout and initialisation draw from the CPU's generator here, whichever device is asked for.
READS_GENERATOR = replaced_by(lambda *_, **__: torch.get_rng_state())
SETS_GENERATOR = replaced_by(lambda state, *_, **__: torch.set_rng_state(state))


def drawing_apart(build_loader: Callable[..., Any]) -> Callable[..., Any]:
    """`build_pretraining_data_loader` whose loaders draw from a generator of their own.

    They draw once whenever they are iterated. From the one that is CUDA's, too, that would change
    the dropout of a training which goes on from a checkpoint.
    """

    @functools.wraps(build_loader)
    def build(*args: Any, **kwargs: Any) -> Any:
        loader = build_loader(*args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader):
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        return loader

    return build


def with_one_worker(make_group: Callable[..., None]) -> Callable[..., None]:
    """`ProcessGroupGloo.__init__` with one thread for a group's collectives, not two.

    And all groups of a process share a network device. Torch gives each its own, whose thread looks
    for messages 100 times a second: with 60 groups a rank wakes 6000 times a second for nothing.
    """
    group: Any = torch.distributed.ProcessGroupGloo

    @functools.wraps(make_group)
    def made_with_one(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = default_pg_timeout,
        **later: Any,  # of torch 2.15: enable_reconfigure
    ) -> None:
        if any(later.values()):  # torch takes them in the place of options
            return make_group(self, store, rank, size, timeout=timeout, **later)
        options = group._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = list(_gloo_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME")))
        return make_group(self, store, rank, size, options)

    return made_with_one


@functools.cache
def _gloo_devices(process: int, interfaces: str | None) -> tuple[Any, ...]:
    """The devices of a process; a fork has to make its own, because their threads stay behind."""
    group: Any = torch.distributed.ProcessGroupGloo
    if interfaces:
        return tuple(group.create_device(interface=name) for name in interfaces.split(","))
    return (group.create_default_device(),)


def thd_get_partitioned_indices(
    bounds: torch.Tensor, tokens: int, ranks: int, rank: int
) -> torch.Tensor:
    """Which tokens a rank holds, as TransformerEngine says it: each document in its own zigzag.

    Of documents that do not divide over the ranks it says something, too: Megatron asks where it
    skips an iteration (--iterations-to-skip), and our attention refuses them where they are used.
    """
    shares = bounds // ranks
    places = torch.arange(tokens // ranks)
    document = torch.searchsorted(shares, places, right=True).sub(1).clamp(max=len(shares) - 2)
    start, half = shares[document], shares.diff()[document] // 2
    chunks_before = torch.where(places - start < half, rank, 2 * ranks - 2 - rank)
    return places - start + start * ranks + half * chunks_before


def mesh_of_the_cpu(mesh: Any) -> Any:
    """Meshes that FSDP makes of process groups, which it says are CUDA's."""

    def from_group(group: Any, *_: str, **more: Any) -> Any:
        return mesh.from_group(group, **more | {"device_type": "cpu"})

    return SimpleNamespace(from_group=from_group)


def of_local_layers(stack_spec: Any) -> Any:
    """Megatron's stack spec of a hybrid model, which is TransformerEngine's, of local layers."""
    from megatron_burst.plugin.local_layers import local_stack_spec  # imports Megatron

    return local_stack_spec()


# What Megatron finds where it imports these modules of packages for a GPU: names, or no module. Of
# the other modules of mamba_ssm and fla nothing is used in training.
PACKAGES: Mapping[str, Mapping[str, Any] | None] = {
    # Megatron takes their layers, norms and optimizers wherever they can be imported. Without the
    # first the second, which Megatron also imports by itself, fails for its symbols.
    "transformer_engine": None,
    "transformer_engine_torch": None,
    "apex": None,
    # Mamba-2's layers, in the place of Triton's kernels; its convolution has a path in torch.
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": recurrences.mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": recurrences.mamba_split_conv1d_scan_combined,
    },
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": recurrences.RMSNorm},
    "causal_conv1d": None,
    # Gated delta networks.
    "fla.modules.convolution": {"causal_conv1d": recurrences.causal_conv1d},
    "fla.modules.l2norm": {"l2norm": recurrences.l2norm},
    "fla.ops.cp": {"build_cp_context": recurrences.build_cp_context},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": recurrences.chunk_gated_delta_rule},
}

_FSDP = "megatron.core.distributed.fsdp"
_RANDOM = "megatron.core.tensor_parallel.random"

# `make(original)` by the "module:name" in whose place it is put; those of torch come first, because
# to look up the others imports Megatron.
STAND_INS: Mapping[str, Callable[[Any], Any]] = {
    # A CPU run asked for on a machine with a GPU must leave that GPU alone.
    "torch.cuda:is_available": returns(False),
    # Megatron makes its process groups and seeds its generators only where this is not 0.
    "torch.cuda:device_count": returns(1),
    # Megatron allocates on, and moves tensors to, whatever this returns.
    "torch.cuda:current_device": replaced_by(current_device),
    # There is no device to choose, to wait for, or to free memory of.
    "torch.cuda:set_device": returns(None),
    "torch.cuda:synchronize": returns(None),
    "torch.cuda:empty_cache": returns(None),
    # Argument validation asks for the GPU's generation when TP or CP is above 1, and for its
    # capability with --moe-grouped-gemm, which local layers do not need.
    "torch.cuda:get_device_properties": returns(PROPERTIES),
    "torch.cuda:get_device_capability": returns(COMPUTE_CAPABILITY),
    # Gradient buffers and DDP make side streams, enter them and order their communication with the
    # current one; these and MoE dispatch record and wait for events.
    "torch.cuda:Stream": replaced_by(AllIsDone),
    "torch.cuda:stream": replaced_by(AllIsDone),
    "torch.cuda:current_stream": replaced_by(AllIsDone),
    "torch.cuda:Event": replaced_by(AllIsDone),
    # --overlap-moe-expert-parallel-comm tells CUDA's allocator which stream uses a tensor, too.
    "torch:Tensor.record_stream": returns(None),
    # --log-memory-to-tensorboard indexes the statistics, which torch leaves empty here.
    "torch.cuda:memory_stats": returns(defaultdict(int)),
    # --log-device-memory-used asks the GPU's driver; the host's answer is resident memory.
    "torch.cuda:device_memory_used": replaced_by(peak_resident_bytes),
    # Checkpoints and the tensor-parallel generators read, set and seed CUDA's generator.
    "torch.cuda:get_rng_state": READS_GENERATOR,
    "torch.cuda:set_rng_state": SETS_GENERATOR,
    "torch.cuda:manual_seed": replaced_by(torch.manual_seed),
    # Megatron allocates with a literal device='cuda' (losses, counters, flags).
    **dict.fromkeys(
        ("torch:tensor", "torch:zeros", "torch:ones", "torch:empty", "torch:empty_like"),
        allocated_on_cpu,
    ),
    # Batches, model chunks and rotary indices are pinned and moved to the GPU.
    "torch:Tensor.cuda": replaced_by(lambda tensor, *_, **__: tensor),
    "torch:Tensor.pin_memory": replaced_by(lambda tensor, *_, **__: tensor),
    # The optimizers sort parameters by the strings torch.cuda.{Float,Half,BFloat16}Tensor.
    "torch:Tensor.type": reported_as_cuda,
    # The two threads that gloo gives a group both write the name of the collective that ended
    # last, without a lock. Names of coalesced collectives are on the heap; where these overlap,
    # one is freed twice. One thread runs them in the order in which they began.
    "torch.distributed:ProcessGroupGloo.__init__": with_one_worker,
    # Recompute and the tensor-parallel generators fork CUDA's generator.
    f"{_RANDOM}:_get_cuda_rng_state": READS_GENERATOR,
    f"{_RANDOM}:_set_cuda_rng_state": SETS_GENERATOR,
    # Megatron-FSDP makes its device out of the word cuda and the number of the current one. Its
    # meshes are of CUDA's devices, and its DTensors move their parts there.
    f"{_FSDP}.mcore_fsdp_adapter:torch": torch_of_the_cpu,
    f"{_FSDP}.src.megatron_fsdp.megatron_fsdp:torch": torch_of_the_cpu,
    f"{_FSDP}.src.megatron_fsdp.param_and_grad_buffer:torch": torch_of_the_cpu,
    f"{_FSDP}.mcore_fsdp_adapter:DeviceMesh": mesh_of_the_cpu,
    "megatron.core.distributed.torch_fully_sharded_data_parallel:DeviceMesh": mesh_of_the_cpu,
    # Megatron's defaults ask for NCCL and for fused CUDA kernels.
    "megatron.training.arguments:parse_args": lambda parse_args: around_parse_args(
        parse_args, set_cpu_defaults, check_cpu_arguments
    ),
    # It asserts that there is a GPU, and pretrain() has no way to pass its own allow_no_cuda.
    "megatron.training.training:initialize_megatron": lambda initialize: functools.partial(
        initialize, allow_no_cuda=True
    ),
    # On a GPU what draws on the host draws apart from dropout.
    "megatron.training.training:build_pretraining_data_loader": drawing_apart,
    # Nothing is compiled, so there is nothing to warm up; and the warm-up's random tensors would
    # come from the generator that initialises the model, in amounts that depend on the batch and
    # on TP, so that equal seeds gave unequal models.
    "megatron.training.training:set_jit_fusion_options": returns(None),
    # TransformerEngine's extension splits documents over context-parallel ranks (--sft).
    "megatron.core.utils:tex": replaced_by(
        SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)
    ),
    # There is no --transformer-impl for hybrid models.
    "megatron.training.models.hybrid:default_hybrid_stack_spec": of_local_layers,
    # It converts tensors on their way from the GPU alone, and the all-to-all between expert ranks
    # takes no tensor for its sizes.
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu": replaced_by(
        lambda tensor, as_numpy=False, record_stream=False: (
            tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
        )
    ),
}
