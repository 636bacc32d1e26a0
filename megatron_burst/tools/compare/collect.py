"""Collects runs of launchers into one CSV and one JSON: `megatron-burst compare --collect DIR`.

A run is a directory that a launcher made: its command.txt, status, TensorBoard's events and the
node-N.json of its nodes. A row has the figures of compare, and what it ran on: versions, devices
and the command.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_burst.tools.compare.results import measure
from megatron_burst.tools.flops import peak_tflops
from megatron_burst.tools.runlog import read_arguments

_FIGURES = """
    steps seconds_per_step tokens_per_second_per_gpu mfu peak_memory_bytes
    bytes_sent_per_rank_per_step
""".split()
_ARGUMENTS = """
    world_size train_iters seq_length micro_batch_size global_batch_size num_layers hidden_size
    num_attention_heads num_query_groups tensor_model_parallel_size pipeline_model_parallel_size
    context_parallel_size context_parallel_algo burst_backward burst_topology burst_layout
    burst_head_parallel_size burst_kernel burst_grad_dtype lm_head_loss recompute_granularity
    recompute_attention_fraction bf16 seed
""".split()


def row(directory: Path, root: Path) -> dict[str, Any]:
    """Return all that is known of one run, for the CSV."""
    nodes = [json.loads(path.read_text()) for path in sorted(directory.glob("node-*.json"))]
    return {
        "name": str(directory.relative_to(root)) if directory != root else directory.name,
        "status": _read(directory / "status") or "unfinished",
        **_figures(directory, nodes),
        **(_machine(nodes) if nodes else {}),
        "command": _read(directory / "command.txt"),
    }


def _figures(directory: Path, nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What compare reads of a run, and Megatron's arguments; no steps where it logged none."""
    devices = [gpu["name"] for node in nodes for gpu in node["gpus"]]
    try:
        result = measure(directory.name, directory, peak_tflops(devices[0]) if devices else None)
    except ValueError:  # it logged no loss, or its profile is cut off
        return {"steps": 0}
    arguments = read_arguments(directory / "tensorboard")
    return {
        **{name: getattr(result, name) for name in _FIGURES},
        "first_loss": result.losses[0][1],
        "last_loss": result.losses[-1][1],
        **{name: arguments[name] for name in _ARGUMENTS if name in arguments},
    }


def _machine(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Devices and versions; where nodes differ, each of what they say."""
    said = [
        {"hosts": node["host"], "device": device(node), **node["versions"]}
        | {name: node[name] for name in ("python", "commit", "run")}
        for node in nodes
    ]
    names = dict.fromkeys(name for each in said for name in each)
    return {"nodes": len(nodes)} | {
        name: ", ".join(sorted({each[name] for each in said if each.get(name)})) for name in names
    }


def device(node: dict[str, Any]) -> str:
    """Such as "8 x NVIDIA H200" or "2 x <the CPU's name>"."""
    if gpus := node["gpus"]:
        return f"{len(gpus)} x {', '.join(sorted({gpu['name'] for gpu in gpus}))}"
    return f"{node['cpu']['count']} x {node['cpu']['model']}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


def write(roots: Sequence[Path], output: Path | None, *, as_json: bool = False) -> int:
    """Write OUTPUT.csv and OUTPUT.json, `results` in the first root where none is given.

    Args:
        roots: below which the runs are.
        output: a path without suffix.
        as_json: print the rows instead of a line for each.

    Raises:
        ValueError: there is no run.
    """
    found = [row(file.parent, root) for root in roots for file in sorted(root.rglob("command.txt"))]
    if not found:
        raise ValueError(f"no run (a command.txt) below {', '.join(map(str, roots))}")
    output = output or roots[0] / "results"
    columns = list(dict.fromkeys(column for each in found for column in each))
    columns.sort(key=lambda column: column == "command")  # the longest goes last
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_name(f"{output.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(found)
    text = json.dumps(found, indent=2)
    output.with_name(f"{output.name}.json").write_text(text + "\n")
    if as_json:
        print(text)
    else:
        lines = (
            f"{each['name']}: status {each['status']}, {each['steps']} steps" for each in found
        )
        print(*lines, f"{len(found)} run(s) in {output}.csv and {output}.json", sep="\n")
    return 0
