"""A process that has imported torch and Megatron once and forks the ranks of one job after another.

Reads one job a line from its standard input, as JSON: the number of ranks, the module that runs,
its command line, the file for the output, and whether Megatron's arguments go to TensorBoard.
Answers each with a line: the first exit status of a rank that is not 0, or 0. Ends when the input
does.
"""

import argparse
import functools
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megatron_burst import launch


def serve() -> None:
    launch.start()
    # What every rank would import.
    import torch.distributed as dist
    from megatron.core.models import mimo  # noqa: F401
    from megatron.core.tokenizers import text  # noqa: F401
    from megatron.training import arguments, training
    from megatron.training.argument_utils import ArgumentGroupFactory as Group

    from megatron_burst import pretrain_gpt  # noqa: F401
    from megatron_burst.plugin import attach, pretraining  # noqa: F401

    # Every rank makes Megatron's parser twice, and parses the sources of its settings for the help.
    Group._get_field_docstrings = once_a_class(Group._get_field_docstrings)
    arguments.add_megatron_arguments = _made_before(arguments.add_megatron_arguments)

    gc.freeze()  # the children shall not copy what the collector would touch
    for line in sys.stdin:
        job = json.loads(line)
        # As torchrun's: where rank 0 has it, whoever comes before it tries again much later.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [_fork(rank, job, store.port, training) for rank in range(job["ranks"])]
        print(_wait(ranks), flush=True)
        del store


@functools.cache
def once_a_class(docstrings: Any) -> Any:
    """What Megatron reads of the sources of its settings for their help, read once."""
    known: dict[type, dict[str, str]] = {}

    def of(self: Any, settings: type) -> dict[str, str]:
        if settings not in known:
            known[settings] = docstrings(self, settings)
        return dict(known[settings])

    return of


def _made_before(add_arguments: Any) -> Any:
    """What adds Megatron's arguments to a new parser; the first two calls of a rank get theirs."""
    parsers = [add_arguments(argparse.ArgumentParser(allow_abbrev=False)) for _ in range(2)]

    def of(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return parsers.pop() if parsers else add_arguments(parser)

    return of


def _fork(rank: int, job: dict, port: int, training: Any) -> int:
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        file = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        world = str(job["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"LOCAL_WORLD_SIZE": world, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        if not job["logs_arguments"]:  # Megatron opens a file for each of 400
            training.write_args_to_tensorboard = lambda: None
        sys.argv = [job["module"], *job["flags"]]
        launch.start()  # the log of this rank
        status = importlib.import_module(job["module"]).main() or 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
        print(leaving.code or "", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(ranks: Sequence[int]) -> int:
    """Wait for all; the first that fails ends the others.

    What a rank has started, like the manager of Megatron's checkpoint writer, ends with the job.
    """
    running, first_failure = set(ranks), 0
    try:
        while running:
            pid, status = os.wait()
            running.discard(pid)
            if status and not first_failure:
                first_failure = os.waitstatus_to_exitcode(status)
                for other in running:
                    os.kill(other, signal.SIGTERM)
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)
    return first_failure


if __name__ == "__main__":
    serve()
