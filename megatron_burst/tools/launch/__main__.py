"""`megatron-burst launch`: starts trainings, on one machine or many, and says which nodes serve."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_burst.tools.flags import adapt_flags, arguments, names
from megatron_burst.tools.launch import check, local, node, site, slurm, ssh
from megatron_burst.tools.launch.processes import say
from megatron_burst.tools.options import split_at_dashes
from megatron_burst.tools.plan.configs import Configs

PLACES = {"local": local, "ssh": ssh, "slurm": slurm, "check": check, "node": node}
EXAMPLES = """
  megatron-burst launch local --run toy --ranks-per-node 4 --train-iters 20
  megatron-burst launch ssh --nodes "node1 node2" --run 14b_1m_32gpu_a800
  megatron-burst launch slurm --nodes 4 --run 14b_1m_32gpu_a800 --save C --load C --save-interval 9

Each place has --help.
"""
REST = """
Everything else, and all that follows --, goes to Megatron. The settings of your site are read from
scripts/env.sh, or from the file that BURST_ENV names; scripts/env.example.sh explains them.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its status."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        site.load_env()
        return PLACES[args.place].run(args)
    except (ValueError, OSError) as error:  # as where there is no ssh, or no sbatch
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; `flags` are Megatron's, `named` those of --run, `command` all words."""
    own, more = split_at_dashes(argv)
    args, flags = (parser := _parser()).parse_known_args(own)
    if args.place == "check":
        return parser.parse_args(argv)
    args.flags, args.command = [*flags, *(more or [])], argv
    if args.script:
        args.script = args.script.absolute()
        args.gpt |= "hybrid" not in args.script.name  # Megatron-LM has one for each of its models
    run = Configs.read().run(args.run).flags if args.run else {}
    args.named = arguments(adapt_flags(run, names(args.flags), gpt=args.gpt)) if args.run else []
    return args


def _parser() -> argparse.ArgumentParser:
    how: dict[str, Any] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,  # of Megatron's flags none is a short form of ours
    }
    parser = argparse.ArgumentParser("megatron-burst launch", epilog=EXAMPLES, **how)
    places = parser.add_subparsers(dest="place", metavar="PLACE", required=True)
    for name, module in PLACES.items():
        usage = "%(prog)s [options]" if module is check else "%(prog)s [options] [Megatron flags]"
        texts = {"help": module.__doc__, "description": module.ABOUT, "usage": usage}
        place = places.add_parser(name, epilog=None if module is check else REST, **texts, **how)
        module.add_options(place)
        text = "print the commands, run nothing"
        place.add_argument("--dry-run", action="store_true", help=text)
        if module is not check:
            _add_common_options(place)
    return parser


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "a named run of configs/; flags that you add win over its own"
    add("--run", metavar="NAME", help=text)
    text = "train the run's model as a GPTModel (default: as a HybridModel)"
    add("--gpt", action="store_true", help=text)
    text = "ranks on a node (default: one a GPU; needed where there is none)"
    add("--ranks-per-node", "--gpus-per-node", metavar="N", help=text)
    text = "log, versions and TensorBoard events go here (default: a new directory in ./runs)"
    add("--output", type=Path, metavar="DIR", help=text)
    text = "run this pretrain_gpt.py or pretrain_hybrid.py of Megatron-LM instead of ours"
    add("--script", type=Path, metavar="PATH", help=text)


if __name__ == "__main__":
    sys.exit(main())
