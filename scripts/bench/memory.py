#!/usr/bin/env python
"""Measures the memory that a training on one rank really takes: what a saving saves, and a limit.

    python scripts/bench/memory.py [--steps 20]

Hybrid models without M layers on the CPU platform, a process for each training, float32, attention
under a window, for that of so many tokens would take a CPU hours:

* 65536 tokens with and without --mlp-chunks: the peak of resident memory, beside the peak that
  LiveBytes counts over the tensors of the same training.
* 131072 tokens under a limit: what does not fit ends in torch's allocator, what fits trains for
  --steps steps. The limit is RLIMIT_DATA, on the private memory that a process may write to,
  touched or not: harder than one on resident memory, and any user may set it.

No time is measured, so the machine may be busy; what is finished is kept in --runs, and an
interrupted series of the same sizes and commit goes on. --recompute-offload is left out:
the memory of a CPU is the host's, so that the copy counts as well.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness import MIB, Flags, Row, origin, progress, publish, table

GIB = 2**30
SIZES = {"tokens": 65536, "hidden": 128, "limited_tokens": 131072, "limit": 8192, "steps": 20}
MODULE = ("-m", "megatron_burst.pretrain")
COUNTED = """
from megatron_burst.pretrain import main
from megatron_burst.tools.live_bytes import LiveBytes
with LiveBytes() as live:
    main()
print("counted peak:", live.peak, flush=True)
"""
COMMON = """
    --disable-bias-linear --swiglu --position-embedding-type rope --normalization RMSNorm
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257
    --null-tokenizer-eod-id 256 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3
    --lr-decay-style constant --split 100,0,0 --eval-iters 0 --eval-interval 1000 --log-interval 1
    --context-parallel-algo burst --window-size 127,0
"""
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LOSS, MLP = "--lm-head-loss chunked", "--mlp-chunks auto"
MLPS = {"whole": "", "in chunks": MLP}
SAVINGS = {
    "none": "",
    "recompute": RECOMPUTE,
    "recompute, chunked loss": f"{RECOMPUTE} {LOSS}",
    "recompute, chunked loss, MLPs in chunks": f"{RECOMPUTE} {LOSS} {MLP}",
}
# Where an MLP is widest: 3.5 times as wide as the hidden states, as an 8B model's.
SAVED = f"--hybrid-layer-pattern *-*- --num-attention-heads 4 --train-iters 1 {RECOMPUTE} {LOSS}"
# So wide, with so large a vocabulary, that little work takes much memory.
LIMITED = """
    --hybrid-layer-pattern *- --num-attention-heads 1 --hidden-size 32 --ffn-hidden-size 2048
    --make-vocab-size-divisible-by 4096
"""


class Training(NamedTuple):
    """What a training left behind."""

    failed: bool
    resident: int  # bytes, at most
    losses: list[float]
    text: str


def train(flags: str, tokens: int, how: Sequence[str] = MODULE, limit: int = 0) -> Training:
    """Run a training in a process of its own, under a limit in bytes if it has one."""
    shape = f"--seq-length {tokens} --max-position-embeddings {tokens}"
    own = {"MEGATRON_BURST_CPU": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    own |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # Large blocks go back to the system when they are freed, so that what is resident lives.
    own |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    bound = partial(resource.setrlimit, resource.RLIMIT_DATA, (limit, limit)) if limit else None
    line = [sys.executable, *how, *COMMON.split(), *shape.split(), *flags.split()]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            line, stdout=log, stderr=log, env=os.environ | own, preexec_fn=bound
        )
        _, status, used = os.wait4(process.pid, 0)
        log.seek(0)
        text = log.read()
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]
    if status and not (limit and "can't allocate memory" in text):
        sys.exit(f"a training failed:\n{text[-4000:]}")
    return Training(status != 0, used.ru_maxrss * 1024, losses, text)


def kept(folder: Path, name: str, measure: Callable[[], Row], of: Row) -> Row:
    """Return what was measured before, if it was of the same sizes and commit."""
    file = folder / f"{re.sub(r'[^a-z]+', '-', name.lower())}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    if found.get("of") != of:
        found = {"of": of, "row": measure()}
        progress(f"{name}: {found['row']}")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return dict(found["row"])


def saved(args: argparse.Namespace, data: str, name: str) -> Row:
    """Return the memory of a training with MLPs `name`, resident and counted."""
    width = f"--hidden-size {args.hidden} --ffn-hidden-size {7 * args.hidden // 2}"
    flags = f"{data} {SAVED} {width} {MLPS[name]}"
    counted = train(flags, args.tokens, ("-c", COUNTED)).text
    (peak,) = re.findall(r"counted peak: (\d+)", counted)
    measured = train(flags, args.tokens).resident
    return {"mlp": name, "tokens": args.tokens, "resident": measured, "counted": int(peak)}


def limited(args: argparse.Namespace, data: str, name: str) -> Row:
    """Return how a training with these savings ends under the limit."""
    flags = f"{data} {LIMITED} {SAVINGS[name]} --train-iters {args.steps}"
    ended = train(flags, args.limited_tokens, limit=args.limit * MIB)
    return {
        "savings": name,
        "tokens": args.limited_tokens,
        "limit": args.limit * MIB,
        "fits": not ended.failed,
        "steps": len(ended.losses),
        "resident": ended.resident,
        "first_loss": ended.losses[0] if ended.losses else "",
        "last_loss": ended.losses[-1] if ended.losses else "",
    }


PAGE = """
# Memory that a training on one rank takes

Trainings on the CPU platform, float32, of hybrid models without M layers, attention under a window
of 128 tokens. Resident is the largest resident memory of the process, with Python, its libraries
and the optimizer.

## MLPs in chunks

{tokens} tokens, pattern `*-*-`, hidden size {hidden}, MLPs gated and 3.5 times as wide, full
recompute and the chunked loss in both. Counted is the largest sum of the bytes of living tensors.

{chunks}

## A limit

{limited_tokens} tokens, pattern `*-`, hidden size 32, MLP gated and 2048 wide, 4096 rows of
vocabulary, {steps} steps within {limit} MiB of RLIMIT_DATA: private memory that the process may
write to, touched or not. What does not fit ends with torch's "can't allocate memory".

{limits}

`--recompute-offload` is not among the savings: a CPU's memory is the host's, so that copies there
count as well.
"""


def flags(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = Flags(__doc__)
    for name, number in SIZES.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=number)
    made.add_argument("--runs", type=Path, default=Path("runs/memory"))
    return made.read(given)


def main() -> None:
    args = flags()
    here = origin()
    of = {"commit": here["commit"], **{name: getattr(args, name) for name in SIZES}}
    with tempfile.TemporaryDirectory() as folder:
        corpus = [sys.executable, "-m", "megatron_burst", "corpus", "--output", folder]
        subprocess.run(corpus, check=True, stdout=subprocess.DEVNULL)
        data = f"--data-path {folder}/corpus --data-cache-path {folder}"
        measures = {f"MLPs {name}": partial(saved, args, data, name) for name in MLPS}
        measures |= {f"limit, {name}": partial(limited, args, data, name) for name in SAVINGS}
        rows = [kept(args.runs, name, measure, of) for name, measure in measures.items()]
    tables = {"chunks": _chunks(rows[: len(MLPS)]), "limits": _limits(rows[len(MLPS) :])}
    publish(args, "memory", PAGE, rows, here, **tables)


def _chunks(rows: Sequence[Row]) -> str:
    whole, cut = rows
    lines = [
        [row["mlp"], *(f"{row[n] / MIB:.1f}" for n in ("resident", "counted"))] for row in rows
    ]
    resident, counted = (whole[name] - cut[name] for name in ("resident", "counted"))
    lines.append(["saved", f"{resident / MIB:.1f}", f"{counted / MIB:.1f}"])
    made = table(["MLPs", "MiB resident", "MiB counted"], lines)
    return f"{made}\n\nMeasured against counted: {resident / counted - 1:+.1%} apart."


def _limits(rows: Sequence[Row]) -> str:
    def cells(row: Row) -> Iterator[str]:
        yield row["savings"]
        yield "fits" if row["fits"] else "does not fit"
        yield str(row["steps"])
        yield f"{row['resident'] / GIB:.1f}"
        yield f"{row['first_loss']:.3f} to {row['last_loss']:.3f}" if row["steps"] else ""

    head = ["savings", "within the limit", "steps", "GiB resident", "loss"]
    return table(head, map(cells, rows), words=2)


if __name__ == "__main__":
    main()
