"""Runs Megatron's parser and all validation on a training program's flags, and nothing after it.

No process group, no model and no file is made.
"""

import contextlib
import copy
import io
import logging
import math
import os
import re
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import unwrap
from pathlib import Path
from unittest.mock import patch

from megatron_burst.config import BurstConfig, Refused
from megatron_burst.cpu_platform import platform as cpu_platform
from megatron_burst.plugin import attachment_points, compat
from megatron_burst.plugin.arguments import check_ranks, parallel_sizes
from megatron_burst.plugin.settings import burst_config_from_args
from megatron_burst.tools.doctor.launch_line import OUR_ENTRIES, LaunchLine, Target


@dataclass(slots=True)
class Parsed:
    """How far a program comes with its flags."""

    args: Namespace | None = None  # as they were given; None where the parser refuses them
    config: BurstConfig | None = None  # of our attention; None under Megatron's own
    stops: list[str] = field(default_factory=list)  # why it ends before it trains, if it does
    unknown: str = ""  # why what depends on the model was not looked at
    absent: str = ""  # what a cluster has and this machine lacks, and was taken for there

    def stop(self, *reasons: str) -> None:
        """Note why it ends, but nothing twice: a headline with other lines is none by itself."""
        for reason in reasons:
            headline, *details = map(str.strip, reason.split("\n"))
            said = {line.strip() for stop in self.stops for line in stop.split("\n")}
            if not said.issuperset(details or [headline]):
                self.stops.append(reason)


def see_beside(line: LaunchLine) -> None:
    """Import what is beside a script first, as it would: a checkout before the wheel."""
    if line.program.endswith(".py"):
        sys.path.insert(0, str(Path(line.program).resolve().parent))


def parse(line: LaunchLine, target: Target) -> Parsed:
    """Parse and validate as the program would on the first rank of the job."""
    parsed = Parsed()
    with _as_first_rank(line, target) as said:
        try:
            _parse(line, target, parsed)
        except SystemExit as leaving:
            parsed.stop(_last_words(leaving, said, line.program))
        except Exception as error:  # whatever ends the program is what is asked for
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {last.filename}:{last.lineno}: {last.line}"
            parsed.stop(*(_reasons(str(error)) or [where]))
    return parsed


@contextlib.contextmanager
def _as_first_rank(line: LaunchLine, target: Target) -> Iterator[io.StringIO]:
    """Be the first rank of the job; yield what Megatron prints, which the report leaves out."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(target.ranks_per_node)}
    ranks["WORLD_SIZE"] = str(target.nodes * target.ranks_per_node)
    flags = list(line.flags)
    if target.is_cluster and line.is_attached:
        flags += ["--burst-check-files", "off"]  # the data of a cluster need not be here
    said = io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with (
            patch.dict(os.environ, {**line.environment, **ranks}),
            patch.object(sys, "argv", [line.program, *flags]),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            warnings.catch_warnings(action="ignore"),
        ):
            yield said
    finally:
        logging.disable(logging.NOTSET)


def _parse(line: LaunchLine, target: Target, parsed: Parsed) -> None:
    """Do what the program does, and note how far it comes; raises what ends it."""
    if any(word.partition("=")[0] == "--yaml-cfg" for word in line.flags):
        raise ValueError("the doctor does not read --yaml-cfg: pass what the file says as flags")
    if not target.is_cluster and cpu_platform.cpu_platform_wanted():
        compat.check_megatron_version()  # before it is imported
        cpu_platform.activate()
    attachment_points.check()
    from megatron.training import arguments

    from megatron_burst.data_checks.look import look_at_files
    from megatron_burst.plugin import attach

    if line.starts_us and cpu_platform.cpu_platform_active():
        cpu_platform.check_job()
    if line.is_attached:
        attach.attach(look_at_files, own_entry=line.program in OUR_ENTRIES)
    parser = arguments.parse_args if line.starts_us else unwrap(arguments.parse_args)
    args = _unended(parser, parsed)
    if args.use_checkpoint_args and not (args.num_layers or args.hybrid_layer_pattern):
        parsed.unknown = (
            "--use-checkpoint-args: no checkpoint is read here, so what depends on the model was "
            "not checked"
        )
    if line.is_attached:
        parsed.config = Refused().by(burst_config_from_args, args)  # what it refuses was said
    if not parsed.unknown:
        arguments.validate_args(args, {})
    if not parsed.unknown:
        _build_configs(line, args, target, parsed)


def _unended(parser: Callable[[], Namespace], parsed: Parsed) -> Namespace:
    """Parse; what our parts refuse is noted and ends nothing, for Megatron may refuse more."""
    with patch.object(compat, "stop", lambda why: parsed.stop(*_reasons(str(why)))):
        args = parser()
    parsed.args = copy.copy(args)
    try:
        check_ranks(args)
    except ValueError as why:
        parsed.stop(str(why))  # and Megatron's own check would hide what comes behind it
        args.world_size = math.prod(parallel_sizes(args))
    return args


def _reasons(text: str) -> list[str]:
    return re.split(r"\n(?! )", text) if text else []  # a line at the margin is another reason


def _build_configs(line: LaunchLine, args: Namespace, target: Target, parsed: Parsed) -> None:
    """Make the model's configuration, which checks what the parser does not."""
    from megatron.core.transformer.transformer_block import HAVE_TE

    from megatron_burst.plugin import pretraining
    from megatron_burst.plugin.refusals import refusals

    if line.program in OUR_ENTRIES and (reason := pretraining.refusal(args)):
        parsed.stop(reason)
    reads_vocabulary = not str(args.tokenizer_type).startswith("Null")
    if args.vocab_size is None and args.padded_vocab_size is None and reads_vocabulary:
        # A training builds the tokenizer first; any size will do here.
        args.padded_vocab_size = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    if target.is_cluster and not HAVE_TE:
        fusions = ["apply_rope_fusion"] * (not args.multi_latent_attention)  # its own is Triton's
        fusions += ["moe_permute_fusion"]
        absent = [name for name in fusions if getattr(args, name)]
        vars(args).update(dict.fromkeys(absent, False))
        if absent:
            parsed.absent = f"TransformerEngine does not load here: {' and '.join(absent)} "
            parsed.absent += "not checked"
    model_config = pretraining.model_config(args)
    if parsed.config is not None:
        parsed.stop(*refusals(model_config.transformer))


def _last_words(leaving: SystemExit, said: io.StringIO, program: str) -> str:
    """What the program said: argparse prints pages of usage before its one line."""
    if isinstance(leaving.code, str):
        return leaving.code.removeprefix("megatron_burst: ")
    _, separator, error = said.getvalue().rpartition("error: ")
    if error.startswith("unrecognized arguments") and program.endswith(".py"):
        error = f"{error.strip()}; if {program} adds them to Megatron's parser, leave them out here"
    return error.strip() if separator else f"it ends with status {leaving.code}"
