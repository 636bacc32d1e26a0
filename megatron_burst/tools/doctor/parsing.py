"""Runs Megatron's parser and all validation on a training program's flags, and nothing after it.

No process group, no model and no file is made.
"""

import argparse
import contextlib
import copy
import io
import logging
import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator
from inspect import unwrap
from pathlib import Path
from unittest.mock import patch

from megatron_burst.plugin import compat
from megatron_burst.plugin.cpu import arguments as cpu_arguments
from megatron_burst.plugin.cpu import platform as cpu_platform
from megatron_burst.tools.doctor.launch_line import OUR_ENTRIES, LaunchLine
from megatron_burst.tools.doctor.situation import Finding, Level, Target, names_our_spec


@contextlib.contextmanager
def as_first_rank(line: LaunchLine, target: Target) -> Iterator[io.StringIO]:
    """Be the first rank of the job; yield what Megatron prints, which the report leaves out."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(target.ranks)}
    ranks["LOCAL_WORLD_SIZE"] = str(target.ranks_per_node)
    said = io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with (
            patch.dict(os.environ, {**line.environment, **ranks}),
            patch.object(sys, "argv", [line.program, *line.flags]),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            target.pretended(),
        ):
            yield said
    finally:
        logging.disable(logging.NOTSET)


def parse(
    line: LaunchLine, target: Target, said: io.StringIO
) -> tuple[Namespace | None, list[Finding]]:
    """Parse and validate as the program would on the first rank of the job.

    Returns:
        The arguments as they were given, before anything was derived, None where a flag is unknown
        or has a wrong value; and why the program would stop, with what Megatron warns of.
    """
    try:
        compat.check_megatron_version()
    except ValueError as error:
        return None, [Finding("megatron", Level.ERROR, str(error))]
    if not target.is_cluster and cpu_platform.cpu_platform_wanted():
        cpu_platform.activate()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        import megatron.training  # noqa: F401

        warnings.simplefilter("always")
        given = _given(line)
        findings = [] if given is None else _missing_checkpoint(given, target)
        if stopped := validate(line, target, said, None if findings else given):
            findings.insert(0, Finding("validation", Level.ERROR, stopped))
    texts = [str(w.message).strip() for w in warned if issubclass(w.category, UserWarning)]
    findings += [Finding("megatron-warns", Level.NOTE, text) for text in dict.fromkeys(texts)]
    return given, findings


def _given(line: LaunchLine) -> Namespace | None:
    """Parse with the program's defaults, and do nothing else."""
    from megatron.training import arguments

    from megatron_burst.plugin.arguments import add_burst_arguments, set_dropouts

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if line.starts_us and cpu_platform.cpu_platform_active():
        cpu_arguments.set_cpu_defaults(parser)
    elif line.is_attached:
        compat.set_defaults_without_transformer_engine(parser)
    try:
        args = add_burst_arguments(parser).parse_known_args(list(line.flags))[0]
    except SystemExit:
        return None
    set_dropouts(args)
    return args


def _missing_checkpoint(given: Namespace, target: Target) -> list[Finding]:
    """What is to be said of a model that a checkpoint on the cluster alone describes."""
    folders = [folder for folder in (given.load, given.pretrained_checkpoint) if folder]
    here = any(Path(folder, "latest_checkpointed_iteration.txt").is_file() for folder in folders)
    described = given.num_layers and given.hidden_size and given.num_attention_heads
    if not (given.use_checkpoint_args and target.is_cluster and folders) or here or described:
        return []
    text = (
        f"--use-checkpoint-args: there is no checkpoint in {' or '.join(folders)} here, so what "
        "depends on the model was not checked"
    )
    return [Finding("checkpoint-args", Level.NOTE, text, "also pass the model's flags")]


def validate(line: LaunchLine, target: Target, said: io.StringIO, given: Namespace | None) -> str:
    """Return why the program would stop before it trains; "" where it would not.

    What a checkpoint says of the model is added to `given`. Without it the parser alone runs.
    """
    from megatron.training import arguments

    from megatron_burst.plugin import attach

    if line.is_attached:
        attach.attach(own_entry=line.program in OUR_ENTRIES)
    # The data of a cluster need not be here; a check of its own says so.
    elsewhere = (
        patch.object(attach, "check_data_files") if target.is_cluster else contextlib.nullcontext()
    )
    try:
        if line.starts_us and cpu_platform.cpu_platform_active():
            cpu_platform.check_job()
        parse_args = arguments.parse_args if line.starts_us else unwrap(arguments.parse_args)
        with elsewhere:
            args = parse_args()
        if given is None:
            return ""
        for each in (args, given):
            _add_from_checkpoint(each)
        arguments.validate_args(args, {})
        _build_configs(line, args)
    except SystemExit as leaving:
        return _last_words(leaving, said)
    except Exception as error:  # whatever ends the program is what is asked for
        last = traceback.extract_tb(error.__traceback__)[-1]
        return str(error) or f"{type(error).__name__} at {last.filename}:{last.lineno}: {last.line}"
    return ""


def _add_from_checkpoint(args: Namespace) -> None:
    """Take the model's arguments from its checkpoint, as Megatron does before it validates."""
    from megatron.training.checkpointing import load_args_from_checkpoint

    from megatron_burst.plugin.arguments import settle_dropouts

    if args.use_checkpoint_args:
        if args.load is None and args.pretrained_checkpoint is None:
            raise ValueError("--use-checkpoint-args needs --load or --pretrained-checkpoint")
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
        settle_dropouts(args)


def _build_configs(line: LaunchLine, args: Namespace) -> None:
    """Make the model's configuration, which checks what the parser does not."""
    from megatron_burst.plugin import pretraining, spec
    from megatron_burst.plugin.arguments import MEGATRON
    from megatron_burst.plugin.limits import refusals

    if line.program in OUR_ENTRIES and (missing := pretraining.unsupported(args)):
        raise ValueError(missing)
    if not line.is_attached and names_our_spec(args):
        spec.config_from_args(args)
    model_config = pretraining.model_config(copy.copy(args))
    algorithm = getattr(args, "context_parallel_algo", MEGATRON)
    if algorithm != MEGATRON and (reasons := refusals(model_config.transformer)):
        raise ValueError("\n".join(reasons))


def _last_words(leaving: SystemExit, said: io.StringIO) -> str:
    """What the program said: argparse prints pages of usage before its one line."""
    if isinstance(leaving.code, str):
        return leaving.code.removeprefix("megatron_burst: ")
    _, found, error = said.getvalue().rpartition("error: ")
    return error.strip() if found else f"it ends with status {leaving.code}"
