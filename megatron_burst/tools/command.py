"""The one command `megatron-burst VERB`; under torchrun `-m megatron_burst VERB`."""

import importlib
import os
import sys

from megatron_burst.tools import options

NAME = "megatron-burst"
_DISTRIBUTIONS = {"megatron": "'megatron-core==0.19.*'"}  # where it is not named like the package


# A module with `main(argv) -> status`, imported when it is asked for, and what it does.
VERBS = {
    "doctor": ("doctor.command", "what is installed, and whether a training command will run"),
    "plan": ("plan.command", "bytes, memory and time of a run under every algorithm"),
    "verify": ("verify", "check attention over the ranks of a torchrun job"),
    "gpu-check": ("gpu_check.command", "check on one GPU all that needs one, stage by stage"),
    "compare": ("compare.command", "train one model through several algorithms, one report"),
    "launch": ("launch.__main__", "start a training on this machine, over ssh or by Slurm"),
    "corpus": ("corpus", "make a corpus for a first training, of text as bytes"),
    "trace": ("trace", "how much communication a traced run hides behind computation"),
}
# Verbs whose words a module of `arguments` reads before theirs is imported.
_LOAD_TORCH = ("doctor", "plan", "verify", "gpu-check", "compare")


def main(argv: list[str] | None = None) -> int:
    """Run the verb that the first word names; return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:  # it was closed, as by >&-
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    verb = words[0] if words else ""
    if verb not in ("", "-h", "--help", *VERBS):
        _complain(NAME, [f"there is no verb {verb!r}; the verbs are {', '.join(VERBS)}"])
        return 2
    if wrong := [word for word in words if word != word.encode(errors="ignore").decode()]:
        _complain(NAME, [f"{wrong[0]!a} is not UTF-8: it could not be written to a report"])
        return 2
    try:
        return _run(verb, words[1:])
    except ModuleNotFoundError as error:
        if (package := str(error.name).partition(".")[0]) == "megatron_burst":
            raise
        text = f"{package} is not installed: pip install {_DISTRIBUTIONS.get(package, package)}, "
        text += "or all that this needs: megatron-burst[train]"
        _complain(f"{NAME} {verb}", [text])
    except BrokenPipeError:  # whoever read has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        _complain(f"{NAME} {verb}", [str(error)])
    except KeyboardInterrupt:
        return 130
    return 1


def _run(verb: str, words: list[str]) -> int:
    try:
        if verb not in VERBS:
            print(_help())
            return 0 if verb else 2
        if verb in _LOAD_TORCH:
            _parse_before(verb, words)
        return importlib.import_module(f"megatron_burst.tools.{VERBS[verb][0]}").main(words)
    finally:
        sys.stdout.flush()  # here and not at the exit a pipe that nobody reads is an error of ours


def _complain(command: str, problems: list[str]) -> None:
    try:
        from megatron_burst.tools.terminal import complain
    except ModuleNotFoundError:  # rich is what is missing
        print(*(f"{command}: {problem}" for problem in problems), sep="\n", file=sys.stderr)
    else:
        complain(command, problems)


def _parse_before(verb: str, words: list[str]) -> None:
    """Exit where help is asked for or a word is wrong: to load torch takes a second or two."""
    module = importlib.import_module(f"megatron_burst.tools.arguments.{verb.replace('-', '_')}")
    module.parser().parse_args(options.split_at_dashes(words)[0])


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in VERBS.items())
    return f"""examples:
  {NAME} doctor -- torchrun --nproc-per-node 8 -m megatron_burst.pretrain FLAGS
  torchrun --nproc-per-node 8 -m megatron_burst verify

usage: {NAME} VERB ...   or: python -m megatron_burst VERB ...

{verbs}

{NAME} VERB --help says more."""
