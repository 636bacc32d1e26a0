"""What saves memory beside sizes, as flags: for the search, the ladder and the doctor."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_burst.tools.flags import Flags, kept

CHUNKED_LOSS = {"lm-head-loss": "chunked"}
HEAD_CHUNKS = {"burst-head-chunks": "auto"}
MLP_CHUNKS = {"mlp-chunks": "auto"}
INPUTS = {"recompute-offload": True}
FSDP = {"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}
OPTIMIZER = {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
SHARDED = {"use-distributed-optimizer": True}  # Megatron-FSDP has it

LADDER: Mapping[str, Mapping[str, Any]] = {  # each beside those before, but for the last two
    "the loss in chunks": CHUNKED_LOSS,
    "layers' inputs on the host": INPUTS,
    "MLPs in chunks of tokens": MLP_CHUNKS,
    "attention's heads in chunks": HEAD_CHUNKS,
    "weights sharded (Megatron-FSDP)": FSDP,
    "or the optimizer on the host": OPTIMIZER,
}
_OFF = {
    "lm-head-loss": "megatron",
    "burst-head-chunks": 1,
    "mlp-chunks": 1,
    "recompute-granularity": "full",
    "recompute-method": "uniform",
    "recompute-modules": False,
    "recompute-attention-fraction": False,  # all is recomputed
}
_UNSET = ("None", "False", "1", "megatron")
CHUNK_SIZES = "lm-head-memory-mb", "lm-head-chunk-size"
"""Of the chunked loss, which has defaults of its own."""


def rungs(given: Flags) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the flags of every row of the ladder, the first without any saving."""
    # Training's own choice may hold more, and leaves attention fewer heads to cut.
    flags = kept(
        {
            "burst-head-parallel-size": 1,
            **given,
            **_OFF,
            "recompute-num-layers": 2 if "hybrid-layer-pattern" in given else 1,
            **dict.fromkeys([*INPUTS, *FSDP, "optimizer-cpu-offload"], False),
        }
    )
    yield "Megatron's full recompute", {n: v for n, v in flags.items() if n not in CHUNK_SIZES}
    for name, saving in LADDER.items():
        if saving is OPTIMIZER:  # Megatron's does not take weights that are sharded
            flags = {n: v for n, v in flags.items() if n not in FSDP}
        flags = {**flags, **saving}
        yield name, flags


def lacking(given: Flags) -> Iterator[Mapping[str, Any]]:
    """Yield the savings that flags do not have, what costs least time first."""
    for saving in (SHARDED, *LADDER.values()):
        switch = next(iter(saving))
        if saving is SHARDED and given.get("use-megatron-fsdp"):
            continue
        if saving is INPUTS and given.get("recompute-granularity") != "full":
            continue  # of which it keeps them
        if str(given.get(switch, HEAD_CHUNKS.get(switch))) in _UNSET:
            yield saving
