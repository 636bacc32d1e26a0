"""Prints a named run of configs/: its Megatron flags, or what it is and what is predicted.

python -m megatron_burst.tools.config --list
python -m megatron_burst.tools.config 14b_1m_32gpu_a800 --show
torchrun ... -m megatron_burst.pretrain_gpt $(python -m megatron_burst.tools.config toy --shell)
"""

import argparse
import shlex
import sys
from pathlib import Path

from megatron_burst.tools.plan.configs import FOLDER, Configs
from megatron_burst.tools.plan.show import lines


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        configs = Configs.read(args.configs)
        if args.list:
            print(*configs.names(args.name or "*"), sep="\n")
            return 0
        if args.name is None:
            parser.error("name a run, or pass --list")
        run = configs.run(args.name)
        if args.show:
            print(*lines(configs, run), sep="\n")
        elif args.shell:
            print(shlex.join(run.arguments()))
        else:
            print(*run.arguments(), sep="\n")
    except ValueError as error:
        parser.exit(1, f"config: {error}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_burst.tools.config", description=__doc__.split("\n")[0]
    )
    parser.add_argument("name", nargs="?", help="of a run; with --list a pattern, as 'scaling-*'")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="the names of all runs")
    what.add_argument(
        "--show", action="store_true", help="what the run is, predicted and published"
    )
    what.add_argument("--shell", action="store_true", help="the flags on one line, quoted")
    parser.add_argument("--configs", type=Path, default=FOLDER, metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
