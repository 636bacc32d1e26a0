"""`megatron-burst plan`: what a run takes under every algorithm; named runs."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_burst.tools import options
from megatron_burst.tools.arguments.plan import parser
from megatron_burst.tools.flags import adapt_flags, parsed, whole
from megatron_burst.tools.plan import answer, ladder, measure, pasted, screen
from megatron_burst.tools.plan.advice import nothing_fits
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.own_flags import asked, checked
from megatron_burst.tools.plan.pasted import is_command
from megatron_burst.tools.plan.ranking import rank
from megatron_burst.tools.plan.search import SEARCHED, Wish, search
from megatron_burst.tools.terminal import complain

_USUAL = "_long"  # the base of runs whose flags a model without a run gets


def main(argv: list[str] | None = None) -> int:
    """Run the verb; return its exit status."""
    own, rest = options.split_at_dashes(sys.argv[1:] if argv is None else argv)
    given = parser().parse_args(own)
    configs = Configs.read()
    if given.measure:
        measure.write(given.measure)
    elif given.list is not None:
        _list(configs.listed(given.list), as_json=given.json)
    else:
        _answer(configs, given, rest or [])
    return 0


def _list(found: Mapping[str, Sequence[str]], *, as_json: bool) -> None:
    if as_json:
        return print(json.dumps(found, indent=2))
    for kind, names in found.items():
        print(f"{kind}:", *names, sep="\n  ")


def _answer(configs: Configs, given: argparse.Namespace, words: Sequence[str]) -> None:
    if not is_command(words):
        return _predict(given, *_job(configs, given, parsed(words)))
    command = pasted.read(words, given, configs)
    if given.search is None and not given.ladder:
        return answer.show(command, as_json=given.json)
    if command.assumed:
        complain("megatron-burst plan", [command.assumed])
    _predict(given, pasted.without_theirs(command.flags), command.cluster, command.gpus)


def _predict(
    given: argparse.Namespace, wanted: dict[str, Any], cluster: Cluster, gpus: int
) -> None:
    if given.ladder:
        return ladder.show(ladder.climb(wanted, cluster, gpus), as_json=given.json)
    if given.search is None:
        ranked = rank(wanted, cluster, gpus, given.fractions)
    else:
        ranked = search(wanted, cluster, gpus, Wish(given.fractions, given.search), given.top)
    if given.json:
        print(json.dumps([*map(screen.figures, ranked)], indent=2))
    else:
        screen.show(ranked, given.top)
    if ranked[0].lacks:
        raise ValueError(nothing_fits(ranked))


def _job(
    configs: Configs, given: argparse.Namespace, own: dict[str, Any]
) -> tuple[dict[str, Any], Cluster, int]:
    """The flags, the machines and the number of GPUs that the command line asks for."""
    run = configs.run(given.run) if given.run else None
    name, gpus = given.cluster or (run and run.cluster), given.gpus or (run and run.gpus)
    if not (name and gpus):
        raise ValueError("say --cluster and --gpus, or --run")
    flags = dict(run.flags) if run else configs.flags_of(_USUAL)
    if given.model:  # in the place of the run's model, of which nothing may stay
        flags = configs.flags_of(given.run or _USUAL) | configs.model(given.model)
    own = checked(configs, own)
    flags = adapt_flags(flags, own, gpt=given.gpt) | own
    flags |= asked(given, own)
    if given.ladder:
        flags.setdefault("seq-length", 2**20)
    positions = "max-position-embeddings", "seq-length"
    flags[positions[0]] = max(whole(flags, name, 0) for name in positions)
    cluster = configs.cluster(name)
    if given.search is not None or given.ladder:  # sizes stay if they are given behind the dashes
        kept = {name: flags[name] for name in flags if name not in SEARCHED or name in own}
        return kept, cluster, gpus
    # All GPUs take part, with a sequence for each data-parallel rank.
    ranks = whole(flags, "tensor-model-parallel-size")
    ranks *= whole(flags, "pipeline-model-parallel-size")
    if "context-parallel-size" not in own and (given.gpus or not run):
        flags["context-parallel-size"] = max(1, gpus // ranks)
    if "global-batch-size" not in own:
        data = max(1, gpus // (ranks * whole(flags, "context-parallel-size")))
        data *= whole(flags, "micro-batch-size")
        flags["global-batch-size"] = data * -(-whole(flags, "global-batch-size") // data)
    return flags, cluster, gpus
