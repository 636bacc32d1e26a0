"""Runs that stop after the model is built, or start something else than meant, each a check."""

import importlib.util
from pathlib import Path

from megatron_burst.plugin.arguments import MEGATRON
from megatron_burst.tools.doctor.check import Answer, Check, Level, Situation


def _not_attached(s: Situation) -> Answer:
    by_flag = str(s.args.context_parallel_algo) != MEGATRON
    by_name = "burst" in s.comm_types and not s.has_our_spec
    if s.line.is_attached or not (by_flag or by_name):
        return None
    text = f"{s.line.program} does not start megatron_burst, so its flags are unknown there"
    return Level.ERROR, text, f"-m megatron_burst.run {s.line.program}"


def _lost_spec(s: Situation) -> Answer:
    if not s.args.spec or s.line.is_attached or s.args.spec[0] == "local":
        return None  # attached, it is an error
    try:
        if importlib.util.find_spec(s.args.spec[0]) is not None:
            return None
    except ModuleNotFoundError:
        pass
    text = (
        f"--spec {' '.join(s.args.spec)} cannot be imported here: Megatron 0.19 then takes its "
        "default layers without a word, and no ring runs"
    )
    return Level.WRONG, text, "put its folder on PYTHONPATH"


def _no_length(s: Situation) -> Answer:
    args = s.args
    if args.train_iters is None and args.train_samples is None:
        text = "nothing says how long to train: Megatron ends with a TypeError after the model"
        return Level.ERROR, text, "--train-iters N"
    if args.eval_interval is None and not (args.full_validation or args.skip_train):
        text = "Megatron divides by --eval-interval after the model is built, at --eval-iters 0 too"
        return Level.ERROR, text, "--eval-interval N"
    return None


def _lost_data(s: Situation) -> Answer:
    words = s.args.data_path or ()
    prefixes = [word for word in words if not _is_weight(word) and "://" not in word]
    missing = [p for p in prefixes for end in (".bin", ".idx") if not Path(p + end).is_file()]
    if not missing:
        return None
    text = f"there is no {missing[0]}.bin and .idx here"
    return Level.NOTE if s.target.is_cluster else Level.ERROR, text, "--data-path"


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _lost_checkpoint(s: Situation) -> Answer:
    args = s.args
    if not args.load or args.exit_on_missing_checkpoint:
        return None
    if Path(args.load, "latest_checkpointed_iteration.txt").is_file():
        return None
    text = f"where --load {args.load} has no checkpoint, training starts from random weights"
    first_start = args.load == args.save or s.target.is_cluster
    return Level.NOTE if first_start else Level.WARNING, text, "--exit-on-missing-checkpoint"


CHECKS: tuple[Check, ...] = (
    Check(
        "not-attached",
        "a script that knows nothing of the plug-in",
        "Automodel#2918",
        _not_attached,
    ),
    Check("lost-spec", "a --spec that is dropped without a word", "MC", _lost_spec),
    Check("no-length", "lengths without which Megatron stops late", "MC", _no_length),
    Check("lost-data", "data that is not there", "MC", _lost_data),
    Check("lost-checkpoint", "a checkpoint that is not there", "MC", _lost_checkpoint),
)
