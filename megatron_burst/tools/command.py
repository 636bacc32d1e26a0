"""The one command `megatron-burst VERB`; under torchrun `-m megatron_burst VERB`."""

import importlib
import os
import sys
from typing import NamedTuple

from megatron_burst.tools import terminal

NAME = "megatron-burst"
_DISTRIBUTIONS = {"megatron": "'megatron-core==0.19.*'"}  # where it is not named like the package


class Verb(NamedTuple):
    """A module with `main(argv) -> status`, imported when it is asked for, and what it does."""

    module: str
    about: str


VERBS = {
    "doctor": Verb("doctor.command", "what is installed, and whether a training command will run"),
    "plan": Verb("plan.command", "bytes, memory and time of a run under every algorithm"),
    "verify": Verb("verify", "check attention over the ranks of a torchrun job"),
    "gpu-check": Verb("gpu_check.command", "check on one GPU all that needs one, stage by stage"),
    "compare": Verb("compare.command", "train one model through several algorithms, one report"),
    "launch": Verb("launch.__main__", "start a training on this machine, over ssh or by Slurm"),
    "corpus": Verb("corpus", "make a corpus for a first training, of text as bytes"),
    "trace": Verb("trace", "how much communication a traced run hides behind computation"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the verb that the first word names; return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    verb = words[0]
    if verb not in VERBS:
        terminal.complain(NAME, [f"there is no verb {verb!r}; the verbs are {', '.join(VERBS)}"])
        return 2
    try:
        module = importlib.import_module(f"megatron_burst.tools.{VERBS[verb].module}")
        return module.main(words[1:])
    except ModuleNotFoundError as error:
        if (package := str(error.name).partition(".")[0]) == "megatron_burst":
            raise
        terminal.complain(f"{NAME} {verb}", [_what_to_install(package)])
    except BrokenPipeError:  # whoever read has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        terminal.complain(f"{NAME} {verb}", [str(error)])
    except KeyboardInterrupt:
        return 130
    return 1


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.about}" for name, verb in VERBS.items())
    return f"""examples:
  {NAME} doctor -- torchrun --nproc-per-node 8 -m megatron_burst.pretrain FLAGS
  torchrun --nproc-per-node 8 -m megatron_burst verify

usage: {NAME} VERB ...   or: python -m megatron_burst VERB ...

{verbs}

{NAME} VERB --help says more."""


def _what_to_install(package: str) -> str:
    return (
        f"{package} is not installed: pip install {_DISTRIBUTIONS.get(package, package)}, "
        "or all that this needs: megatron-burst[train]"
    )
