"""--burst-trace: which training steps Megatron records, and when the record is written."""

import atexit
import logging
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_args

from megatron_burst.transport import chrome_trace
from megatron_burst.transport.trace import Recorder

logger = logging.getLogger(__name__)

STEPS = (2, 3)
"""Of a run: the first step plans and warms up, and two show whether they are alike."""


class TraceSteps:
    """A pre-wrap hook of Megatron's model builders: records the training steps `STEPS`.

    The record is written when the next step begins, or where there is none at the end of the
    process. Evaluation is not recorded.
    """

    def __init__(self, recorder: Recorder, directory: Path) -> None:
        self._recorder, self._directory = recorder, directory
        self._is_written = False

    def __call__(self, models: list[Any]) -> list[Any]:
        """Look at the step whenever one of `models` runs; return the models."""
        for model in models:
            model.register_forward_pre_hook(self._before_forward)
        atexit.register(self._write)
        return models

    def _before_forward(self, model: torch.nn.Module, _: Any) -> None:
        args = get_args()  # iteration: where this run started
        step = getattr(args, "curr_iteration", args.iteration) - args.iteration + 1
        if model.training and step in STEPS:
            self._recorder.start(step)
            return
        self._recorder.stop()
        if model.training and step > STEPS[-1]:
            self._write()

    def _write(self) -> None:
        if self._is_written or not self._recorder.calls:
            return
        self._is_written = True
        args = get_args()
        file = chrome_trace.write(self._recorder, self._directory, args.rank, args.world_size)
        self._recorder.calls.clear()
        logger.info(
            "burst trace: steps %s of this run are in %s; "
            "python -m megatron_burst.tools.trace %s joins the ranks",
            " and ".join(map(str, STEPS)),
            file,
            self._directory,
        )
