#!/usr/bin/env python
"""Counts the bytes that live in a training step, from the embedding to the loss and back.

    python scripts/bench/step_memory.py --layers 3 --save offload mlp head_chunks

Of a model on fake tensors; see fake_step.py. Weights, main gradients and optimizer are not counted;
an attention kernel's workspace is, as an H200 showed it.
"""

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from fake_step import HOST, SAVINGS, Settings, as_on_a_gpu, model_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from megatron_burst.plugin.row_chunks import is_in_backward
from megatron_burst.tools.live_bytes import LiveBytes

# The last two are of a layer's backward: its replay with the MLP's backward, and then attention's.
PHASES = "forward", "loss", "mlp", "attention"


@dataclass
class StepMemory:
    """Bytes beyond the states, at the peak of each phase, and who made them."""

    settings: Settings
    peaks: dict[str, int]
    makers: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def in_x(self, phase: str) -> float:
        return self.peaks[phase] / self.settings.x


def measure(settings: Settings) -> StepMemory:
    """Count a step; the loss is with its backward."""
    with as_on_a_gpu(settings), FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of(settings)
        tokens = torch.zeros(1, settings.tokens, dtype=torch.long)
        kept = [tokens, *model.parameters(), *(p.main_grad for p in model.parameters())]
        kept += model.buffers()
        with _Phases(kept) as live:
            _watch(model, live)
            losses = model(tokens, tokens, None, labels=tokens)
            losses.sum().backward()
    return StepMemory(settings, live.peaks, live.makers)


def shares(settings: Settings) -> tuple[StepMemory, dict[str, float]]:
    """Return the step, and how many bytes each layer more adds to the peak of every phase."""
    step = measure(settings)
    fewer = measure(replace(settings, layers=settings.layers - 1))
    return step, {phase: step.peaks[phase] - fewer.peaks[phase] for phase in PHASES}


class _Phases(LiveBytes):
    """The peak of each phase."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__(existing)
        self.phase = PHASES[0]
        self.peaks = dict.fromkeys(PHASES, 0)
        self.makers: dict[str, Counter[str]] = {}
        self._made: dict[int, tuple[str, int]] = {}
        self._function = ""

    def begin(self, phase: str) -> None:
        """From now on what lives is counted for this phase."""
        if phase != self.phase:
            self.phase = phase
            self._see()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._function = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type != HOST:
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage._cdata in self._seen:
            return
        self._made[storage._cdata] = f"{self._function} in {_caller()}", storage.nbytes()
        super()._count(storage)
        self._see()

    def _see(self) -> None:
        if self.now > self.peaks[self.phase]:
            self.peaks[self.phase] = self.now
            self.makers[self.phase] = Counter()
            for made_by, size in self._made.values():
                self.makers[self.phase][made_by] += size

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._made.pop(key, None)


_OURS = re.compile("/megatron(_burst)?/")


def _caller() -> str:
    """Return the file and function of Megatron, or of the package, whose line made a tensor."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _OURS.search(code.co_filename):
            return f"{Path(code.co_filename).stem}.{code.co_name}"
        frame = frame.f_back
    return "autograd"


def _watch(model: Any, live: _Phases) -> None:
    """Say when phases begin: the loss behind the decoder, the others where a layer is replayed."""

    def replayed(*_: Any) -> None:
        if is_in_backward():
            live.begin("mlp")

    def attended(_: Any, __: Any, output: Tensor) -> None:
        if is_in_backward():
            output.register_hook(lambda _: live.begin("attention"))

    model.decoder.register_forward_hook(lambda *_: live.begin("loss"))
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(replayed)
        layer.self_attention.core_attention.register_forward_hook(attended)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = ("layers", "tokens", "ranks", "tensor", "hidden", "ffn", "heads", "kv_heads")
    for name in (*sizes, "vocabulary", "mlp_chunks_for_training"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(Settings, name))
    parser.add_argument("--save", nargs="*", choices=[*SAVINGS, "all"], help="none: every rung")
    parser.add_argument("--head-chunks", type=int, help="with that saving; default: auto's")
    parser.add_argument("--fused", action="store_true", help="as TransformerEngine's layers save")
    parser.add_argument("--makers", type=int, default=0, help="how many lines of what lives then")
    args = vars(parser.parse_args())
    chosen, most = args.pop("save"), args.pop("makers")
    if chosen is None:
        rungs = [frozenset(SAVINGS[:n]) for n in range(len(SAVINGS) + 1)]
    else:
        rungs = [frozenset(SAVINGS if "all" in chosen else chosen)]
    for savings in rungs:
        _report(Settings(**args, savings=savings), most)


def _report(settings: Settings, makers: int) -> None:
    step, more = shares(settings)
    print(
        f"with {', '.join(sorted(settings.savings)) or 'nothing'}; x = {settings.x / 2**30:g} GiB"
    )
    for phase in PHASES:
        share = f"{more[phase] / settings.x:.2f} x a layer more"
        print(f"  {phase:10}{step.in_x(phase):7.2f} x, {share}")
        for name, size in step.makers[phase].most_common(makers):
            print(f"    {size / settings.x:9.2f} x  {name}")


if __name__ == "__main__":
    main()
