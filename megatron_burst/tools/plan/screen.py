"""What `plan` prints, on 100 columns: sizes, limits, rows, what bounds a step, the command."""

import re
import shlex
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron_burst.tools import terminal
from megatron_burst.tools.flags import Flags, arguments
from megatron_burst.tools.options import in_units
from megatron_burst.tools.plan.memory import GIB, usable, usable_host
from megatron_burst.tools.plan.ranking import Candidate, at_its_sizes
from megatron_burst.tools.plan.reading import loss_chunking
from megatron_burst.tools.plan.scans import said_of_scans
from megatron_burst.tools.plan.usual import A2A, ALONE, P2P
from megatron_burst.tools.plan.workload import Workload

_WIDTH = 100
_NAME = 34  # of it, for the names of a row's algorithms
# Of a command: words as they are quoted, a flag with its values.
_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""
_WORDS = re.compile(rf"-{_WORD}(?: (?!-){_WORD})*|{_WORD}")
_COLUMNS: terminal.Columns = {
    "TP": ("tensor", 1, "{}"),
    "CP": ("context", 1, "{}"),
    "DP": ("data", 1, "{}"),
    "PP": ("pipeline", 1, "{}"),
    "EP": ("expert", 1, "{}"),
    "batch": ("global_batch_size", 1, "{}"),
    "saved by": ("savings", 1, "{}"),
    "U": ("head_parallel_size", 1, "{}"),
    "rho": ("recompute_fraction", 1, "{}"),
    "GPU": ("memory_bytes", 1 / GIB, "{:.1f}"),
    "host": ("host_bytes", 1 / GIB, "{:.0f}"),
    "sent": ("sent_bytes_a_layer", 2**-20, "{:.0f}"),
    "NIC": ("sent_between_nodes_bytes_a_layer", 2**-20, "{:.0f}"),
    "exposed": ("exposed_share", 1, "{:.1%}"),
    "copies": ("exposed_copies_share", 1, "{:.1%}"),
    "s/step": ("seconds_a_step", 1, "{:.2f}"),
    "tok/s": ("tokens_per_second_per_gpu", 1, "{:.0f}"),
    "MFU": ("mfu", 1, "{:.1%}"),
}
_SIZES = ("TP", "CP", "DP")
_OF_EVERY_ROW = ("U", "rho", "GPU", "s/step", "tok/s", "MFU")
_NOTHING = ("1", "-", "0", "0.0%")  # in all rows: not worth a word
_FIRST_TO_GO = ("copies", "NIC", "sent", "MFU", "exposed", "host")
_OURS = (*ALONE, "recompute-attention-fraction")  # of attention, beside --burst-...
_MEANINGS = {
    "saved by": "saved by: what saves memory",
    "U": "U: Ulysses degree, ranks that share out the heads",
    "rho": "rho: share of attention that is recomputed",
    "GPU": "GPU: GiB of a GPU",
    "host": "host: GiB of a host",
    "sent": "sent: MiB that a rank sends for attention of a layer",
    "NIC": "NIC: MiB of it to other nodes",
    "exposed": "exposed: share of attention's time that waits for messages",
    "copies": "copies: share of a step that waits for the host",
    "tok/s": "tok/s: tokens a second and GPU",
    "MFU": "MFU: of the bfloat16 peak, {peak:.0f} TFLOP/s",
}


def figures(each: Candidate) -> dict[str, Any]:
    """Return a row of the ranking as it is written to JSON."""
    sizes = "tensor", "context", "pipeline", "expert", "data"
    return {
        "algorithm": each.name,
        "predicted_alike": list(each.twins),
        "cp_comm_type": each.cp_comm_type or None,
        "is_default": each.is_default,
        **{size: getattr(each.load, size) for size in sizes},
        "global_batch_size": each.load.sequences,
        "head_parallel_size": each.load.head_parallel,
        "savings": each.savings,
        "recompute_fraction": each.fraction,
        "memory_bytes": each.memory.total,
        "memory_parts": asdict(each.memory),
        "host_bytes": each.host_bytes,
        "fits": not each.lacks,
        "sent_bytes_a_layer": each.time.attention.sent,
        "sent_between_nodes_bytes_a_layer": each.time.attention.between,
        "exposed_share": each.time.attention.exposed_share,
        "copies_seconds": each.time.copies.seconds,
        "exposed_copies_share": each.time.copies.exposed / each.time.seconds,
        "bounds": each.bounds,
        "seconds_a_step": each.time.seconds,
        "tokens_per_second_per_gpu": each.time.tokens_per_gpu,
        "mfu": each.time.mfu,
        "command": each.command(),
    }


def show(candidates: Sequence[Candidate], most: int) -> None:
    """Print the rows, at most so many and the default, then the command of the first."""
    first, rows = candidates[0], [*candidates[:most]]
    default = at_its_sizes(first, ALONE)
    if not any(each.is_default and _place(each) == _place(default) for each in rows):
        rows.append(default)
    for line in (*about(first.load, rows), *_table(rows), *_notes(first)):
        print(line)
    if not first.lacks:
        added = {n: v for n, v in first.flags.items() if n in _OURS or n.startswith("burst-")}
        say(f"flags of the first row for attention: {shlex.join(arguments(added))}")
        print(f"\nthe first row, on every node:\n{wrapped(first.command())}\n")
    say(f"loss: {describe_loss(first.flags)}")
    if not first.lacks:
        say(against(first, default))


def _place(each: Candidate) -> tuple[object, ...]:
    load = each.load
    return load.tensor, load.context, load.pipeline, load.expert, load.sequences, each.savings


def about(load: Workload, rows: Sequence[Candidate] = ()) -> list[str]:
    """Return the lines of what was asked for, and of what memory may be counted."""
    cluster, batches = load.cluster, {each.load.sequences for each in rows}
    nodes = -(-load.gpus // load.ranks_per_host)
    batch = f"global batch {load.sequences}" if len(batches) < 2 else "batch: global batch size"
    host = usable_host(cluster) / GIB
    of_host = f"{host:.0f} of a host's {cluster.host_memory / GIB:.0f}"
    headline = (
        f"{load.gpus} GPUs of {cluster.name} ({nodes} x {load.ranks_per_host}), "
        f"{in_units(load.tokens)} tokens, {batch}, {load.model.parameters / 1e9:.2f} billion "
        "parameters"
    )
    return [
        *filled(headline),
        f"memory: {usable(cluster) / GIB:.1f} of a GPU's {cluster.memory / GIB:.0f} GiB may be "
        f"counted, {of_host if host < 2**20 else 'any of a host'}",
    ]


def cells(each: Candidate) -> dict[str, str]:
    """Return what a row has in the columns."""
    return dict(zip(_COLUMNS, terminal.cells(figures(each), _COLUMNS), strict=True))


def _table(rows: Sequence[Candidate]) -> Iterator[str]:
    """What all rows have alike, the rows, and what their columns mean."""
    texts = [cells(each) for each in rows]
    varied = [n for n in _COLUMNS if n in _OF_EVERY_ROW or len({row[n] for row in texts}) > 1]
    alike = {n: text for n, text in texts[0].items() if n not in varied and n != "batch"}
    alike = {n: text for n, text in alike.items() if n in _SIZES or text not in _NOTHING}
    if alike:
        yield from filled(f"all rows: {', '.join(f'{n} {text}' for n, text in alike.items())}")
    left_out: list[str] = []
    for name in ("", *_FIRST_TO_GO):
        if name in varied:
            varied.remove(name)
            left_out.append(name)
        lines = [["", "attention", *varied]]
        lines += [
            [_mark(e), shown(e), *map(row.__getitem__, varied)]
            for e, row in zip(rows, texts, strict=True)
        ]
        table = aligned(lines)
        if max(map(len, table)) <= _WIDTH:
            break
    yield from ("", *table, "")
    marks = ["* what --context-parallel-algo burst alone takes"]
    if any(each.lacks for each in rows):
        marks.append("! needs more memory than there is")
    yield from legend(rows, [*alike, *varied], marks, left_out)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of columns, the first two of words."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 or cell[:1].isalpha() else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def legend(
    rows: Sequence[Candidate],
    known: Collection[str],
    marks: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> list[str]:
    """Return what the columns of a table mean."""
    peak = rows[0].load.cluster.peak / 1e12
    meanings = [text.format(peak=peak) for name, text in _MEANINGS.items() if name in known]
    if left_out:
        meanings.append(f"left out, in --json: {', '.join(left_out)}")
    names = "in brackets: Megatron's --cp-comm-type"
    return filled("; ".join([*marks, names, *meanings]))


def _mark(each: Candidate) -> str:
    return ("*" if each.is_default else "") + ("!" if each.lacks else "")


def shown(each: Candidate) -> str:
    """Return the names of a row: ours, those that are predicted alike, and Megatron's."""
    first, *others = (each.name, *each.twins)
    own = first.split()[0] + " "
    text = " = ".join((first, *(name.removeprefix(own) for name in others)))
    text = text.replace(" flat", "")
    if len(text) > _NAME:
        text = text[: _NAME - 2] + " …"
    return f"{text} ({each.cp_comm_type})" if each.cp_comm_type else text


def _notes(first: Candidate) -> Iterator[str]:
    if buffers := first.memory.nccl / GIB:
        yield f"of a GPU, NCCL's buffers for attention's messages: {buffers:.2f} GiB"
    if line := said_of_scans(first.load):
        yield from filled(line)
    parts = sorted(first.bounds.items(), key=lambda part: -part[1])
    (most, share), *others = [(name, part) for name, part in parts if part > 0.0005]
    rest = ", ".join(f"{name} {part:.1%}" for name, part in others)
    yield f"a step of the first row is bound by {most}: {share:.1%}; {rest or 'nothing else'}"


def against(first: Candidate, default: Candidate) -> str:
    """Return how much faster the first row and the default are than Megatron's own ways."""
    if first.load.context == 1:
        return "against p2p and a2a: none, for these sizes have no context parallelism"
    return "; ".join(
        f"against {name}: {_faster(first, default, way)}"
        for name, way in {"p2p": P2P, "a2a": A2A}.items()
    )


def _faster(first: Candidate, default: Candidate, way: Flags) -> str:
    if way is A2A and first.load.heads[1] % first.load.context:
        return f"its KV heads do not divide over {first.load.context} ranks"
    # Settings that Megatron's attention does not have, taken back.
    bare = {name: False for name in first.flags if name.startswith("burst-")}
    try:
        base = at_its_sizes(first, {**bare, **way})
    except ValueError as why:
        return f"not possible, {why}"
    if base.lacks:
        return missing(base)
    text = compared(base, first)
    if first.is_default or default.lacks:
        return text
    return f"first row {text}, * {compared(base, default)}"


def missing(option: Candidate) -> str:
    """Say how much memory lacks."""
    if option.lacks == "GPU":
        more, whose = option.memory.total - usable(option.load.cluster), "a GPU"
    else:
        more, whose = option.host_bytes - usable_host(option.load.cluster), "a host"
    return f"does not fit, {more / GIB:.1f} GiB of {whose} are missing"


def compared(base: Candidate, other: Candidate) -> str:
    """Say how much faster a way is than another."""
    gain = base.time.seconds / other.time.seconds - 1
    if abs(gain) < 0.0005:
        return "as fast"
    text = f"{abs(gain):.1%}" if abs(gain) < 0.1 else f"{abs(gain):.0%}"
    return f"{text} {'faster' if gain > 0 else 'slower'}"


def describe_loss(flags: Flags) -> str:
    """Say how the loss of a run is made, and with how many matrix products."""
    chunking = loss_chunking(flags)
    way, products = (chunking, chunking.products) if chunking else ("from all logits at once", 3)
    return f"{way}; {products} products with the LM head a token"


def wrapped(command: str) -> str:
    """Return a command line as one of several lines, which a shell takes as one."""
    lines = [""]
    for word in _WORDS.findall(command):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def filled(text: str, first: str = "", others: str = "") -> list[str]:
    """Return a text as lines of 100 columns, the first and the others indented so."""
    wrapper = textwrap.TextWrapper(
        *(_WIDTH, first, others), break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


def say(text: str) -> None:
    """Print a text on 100 columns."""
    print(*filled(text), sep="\n")
