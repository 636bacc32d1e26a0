"""Runs that stop after the model is built, or start something else than meant, each a check."""

import importlib.util
import math
from pathlib import Path

from megatron_burst.plugin.arguments import MEGATRON
from megatron_burst.tools.doctor.check import Answer, Check, Level, Situation, check

_BURST = "--context-parallel-algo burst"
_TE_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@check("te-spelling", "a --cp-comm-type that only TransformerEngine reads", "MC")
def _te_spelling(s: Situation) -> Answer:
    unknown = sorted(s.comm_types - set(_TE_TYPES))
    if not s.on_megatrons_ring or not unknown:
        return None
    text = (
        f"--cp-comm-type {' '.join(unknown)}: TransformerEngine knows {', '.join(_TE_TYPES)}, and "
        "says so only when the first layer runs"
    )
    right = "--cp-comm-type all_gather" if "allgather" in unknown else _BURST
    return Level.ERROR, text, right


@check("te-window", "windows on Megatron's ring", "MC#5593, MC#2222")
def _te_window(s: Situation) -> Answer:
    rings = s.comm_types & {"p2p", "a2a+p2p"}
    if not s.on_megatrons_ring or s.args.window_size is None or not rings:
        return None
    text = (
        f"TransformerEngine has no windows with --cp-comm-type {' '.join(sorted(rings))}; other "
        "frameworks have trained such layers without their window"
    )
    return Level.ERROR, text, f"{_BURST}, or --cp-comm-type a2a"


@check("te-sinks", "sinks on Megatron's ring", "TE#2541, TE#3551")
def _te_sinks(s: Situation) -> Answer:
    others = s.comm_types - {"a2a"}
    if not s.on_megatrons_ring or s.args.softmax_type == "vanilla" or not others:
        return None
    text = (
        f"TransformerEngine has no sinks with --cp-comm-type {' '.join(sorted(others))}: 2.17 "
        "stops in the first layer, older ones leave the sinks out"
    )
    return Level.ERROR, text, f"{_BURST}, or --cp-comm-type a2a"


@check("te-documents", "documents on Megatron's all-gather", "TE#2829, TE#3290")
def _te_documents(s: Situation) -> Answer:
    lacking = s.comm_types & {"all_gather", "a2a+p2p"}
    packed = s.args.dataloader_inter_document_masking
    if not s.on_megatrons_ring or not packed or not lacking:
        return None
    text = f"TransformerEngine 2.17 has no documents with --cp-comm-type {' '.join(lacking)}"
    return Level.ERROR, text, f"{_BURST}, or --cp-comm-type p2p"


@check("te-heads", "heads that an all-to-all cannot share out", "transformers#33467")
def _te_heads(s: Situation) -> Answer:
    args = s.args
    if not s.on_megatrons_ring or "a2a" not in s.comm_types or not args.num_attention_heads:
        return None
    kv = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    heads = math.gcd(args.num_attention_heads // tensor, max(kv // tensor, 1))
    if heads % context == 0:
        return None
    text = (
        f"--cp-comm-type a2a: {args.num_attention_heads // tensor} query and "
        f"{max(kv // tensor, 1)} kv heads of a rank do not divide by {context} ranks"
    )
    return Level.ERROR, text, _BURST


@check("te-hang", "Megatron's ring that hangs", "MC#1151")
def _te_hang(s: Situation) -> Answer:
    batched = s.environment.get("NVTE_BATCH_MHA_P2P_COMM") == "1"
    if not s.on_megatrons_ring or "p2p" not in s.comm_types or batched:
        return None
    text = "TransformerEngine's ring has ended in NCCL errors or hangs on some machines"
    return Level.NOTE, text, "if so, NVTE_BATCH_MHA_P2P_COMM=1"


@check("not-attached", "a script that knows nothing of the plug-in", "Automodel#2918")
def _not_attached(s: Situation) -> Answer:
    by_flag = str(s.args.context_parallel_algo) != MEGATRON
    by_name = "burst" in s.comm_types and not s.has_our_spec
    if s.line.is_attached or not (by_flag or by_name):
        return None
    text = f"{s.line.program} does not start megatron_burst, so its flags are unknown there"
    return Level.ERROR, text, f"-m megatron_burst.run {s.line.program}"


@check("lost-spec", "a --spec that is dropped without a word", "MC")
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


@check("no-length", "lengths without which Megatron stops late", "MC")
def _no_length(s: Situation) -> Answer:
    args = s.args
    if args.train_iters is None and args.train_samples is None:
        text = "nothing says how long to train: Megatron ends with a TypeError after the model"
        return Level.ERROR, text, "--train-iters N"
    if args.eval_interval is None and not (args.full_validation or args.skip_train):
        text = "Megatron divides by --eval-interval after the model is built, at --eval-iters 0 too"
        return Level.ERROR, text, "--eval-interval N"
    return None


@check("lost-data", "data that is not there", "MC")
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


@check("lost-checkpoint", "a checkpoint that is not there", "MC")
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
    _te_spelling,
    _te_window,
    _te_sinks,
    _te_documents,
    _te_heads,
    _te_hang,
    _not_attached,
    _lost_spec,
    _no_length,
    _lost_data,
    _lost_checkpoint,
)
