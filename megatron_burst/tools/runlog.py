"""Reads the scalars of one training run from the TensorBoard directory Megatron wrote."""

import logging
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LOSS = "lm loss"

Series = list[tuple[int, float]]


def read_scalars(path: Path) -> dict[str, Series]:
    """All scalars under their tags, each as (step, value) by rising step.

    A step written twice, as after a restart, has the value written last. Raises ValueError for a
    directory without TensorBoard events.
    """
    if not any(path.glob("*tfevents*")):
        raise ValueError(f"{path}: no TensorBoard events here (--tensorboard-dir of the training)")
    events, scalars = _read(path, "scalars", 0), {}
    for tag in events.Tags()["scalars"]:
        written = sorted(events.Scalars(tag), key=lambda event: event.wall_time)
        scalars[tag] = sorted({event.step: event.value for event in written}.items())
    return scalars


def read_arguments(path: Path) -> dict[str, str]:
    """All arguments of Megatron that the run wrote at its start, as text, by name."""
    events = _read(path, "tensors", 1)
    suffix = "/text_summary"
    return {
        tag.removesuffix(suffix): events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
        if tag.endswith(suffix)
    }


def _read(path: Path, kind: str, most: int) -> EventAccumulator:
    """Load the files, without a word of it where Megatron, imported, has all packages log."""
    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = EventAccumulator(str(path), size_guidance={kind: most})
    events.Reload()
    return events
