"""Collects runs of launchers into one CSV and one JSON: `megatron-burst compare --collect DIR`.

A run is a directory that a launcher made: its command.txt, log.txt, status, the node-N.json of its
nodes and, there or in a directory above, the links.json of --measure-links. A row has what Megatron
logged: losses, the median time of a step without the first ones after each start, throughput and
memory; and what it ran on: versions, devices, links and the command.
"""

import csv
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

STEP = re.compile(r" iteration +(\d+)/ *(\d+) \|(.*)")
FIELD = re.compile(r" ([a-zA-Z][^:|]*): +([-+.\w]+) \|")
ARGUMENT = re.compile(r"^ {1,}(\w+) \.{3,} (.*)$")
MEMORY = re.compile(r" max allocated: ([\d.]+) \| .*max reserved: ([\d.]+)")
WARM_UP = 2
"""How many steps after each start of the training count for no time, where more follow."""
ARGUMENTS = """
    world_size seq_length micro_batch_size global_batch_size num_layers hidden_size
    num_attention_heads num_query_groups tensor_model_parallel_size pipeline_model_parallel_size
    context_parallel_size context_parallel_algo burst_backward burst_topology burst_layout
    burst_head_parallel_size burst_kernel burst_grad_dtype lm_head_loss recompute_granularity
    recompute_attention_fraction bf16 seed
""".split()


def row(directory: Path, root: Path) -> dict[str, Any]:
    """All that is known of one run, for the CSV."""
    text = _read(directory / "log.txt")
    nodes = [json.loads(path.read_text()) for path in _node_files(directory)]
    return {
        "name": str(directory.relative_to(root)) if directory != root else directory.name,
        "status": _read(directory / "status").strip() or "unfinished",
        **figures(text),
        **arguments(text),
        **machine(nodes),
        **links(directory, root),
        "command": _read(directory / "command.txt").strip(),
    }


def figures(log: str) -> dict[str, Any]:
    """Steps, losses, times, throughput and memory that Megatron logged."""
    steps: dict[int, dict[str, str]] = {}
    seconds: list[float] = []
    since_start, before, planned = 0, 0, 0
    for number, total, rest in STEP.findall(log):
        fields = dict(FIELD.findall(f" {rest.strip()}"))
        step, planned = int(number), int(total)
        since_start = since_start + 1 if step == before + 1 else 1
        before, steps[step] = step, fields
        if since_start > WARM_UP and (time := fields.get("elapsed time per iteration (ms)")):
            seconds.append(float(time) / 1e3)
    if not steps:
        return {"steps": 0}
    arguments_ = arguments(log)
    losses = {step: float(f["lm loss"]) for step, f in sorted(steps.items()) if "lm loss" in f}
    found: dict[str, Any] = {
        "steps": max(steps),
        "planned_steps": planned,
        "first_loss": next(iter(losses.values()), None),
        "last_loss": losses[max(losses)] if losses else None,
        "seconds_per_step": median(seconds) if seconds else None,
    }
    if seconds and {"seq_length", "global_batch_size", "world_size"} <= arguments_.keys():
        tokens = int(arguments_["seq_length"]) * int(arguments_["global_batch_size"])
        rate = tokens / median(seconds)
        found["tokens_per_second"] = rate
        found["tokens_per_second_per_rank"] = rate / int(arguments_["world_size"])
    if rates := [float(f[THROUGHPUT]) for f in steps.values() if THROUGHPUT in f]:
        found["megatron_tflops_per_gpu"] = median(rates)
    allocated, reserved = (
        max(map(float, each)) for each in zip(*MEMORY.findall(log), ("0", "0"), strict=True)
    )
    if reserved:  # on the CPU Megatron logs zeros
        found |= {"max_allocated_mib": allocated, "max_reserved_mib": reserved}
    return found


THROUGHPUT = "throughput per GPU (TFLOP/s/GPU)"


def arguments(log: str) -> dict[str, str]:
    """What Megatron's list of arguments says; of several starts the last one's."""
    found = {}
    for line in log.splitlines():
        if (match := ARGUMENT.match(line)) and match[1] in ARGUMENTS:
            found[match[1]] = match[2].strip()
    return found


def machine(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Devices and versions; where nodes differ, each of what they say."""
    if not nodes:
        return {}
    versions: dict[str, set[str]] = {}
    for node in nodes:
        for name, version in {"python": node["python"], **node["versions"]}.items():
            versions.setdefault(name, set()).add(version)
    return {
        "started": nodes[0]["time"],
        "nodes": len(nodes),
        "hosts": joined(node["host"] for node in nodes),
        "device": joined(device(node) for node in nodes),
        "driver": joined(gpu["driver_version"] for node in nodes for gpu in node["gpus"]),
        "network": joined(
            f"{link['name']} {link['rate']}" for node in nodes for link in node["links"]
        ),
        "commit": joined(node["commit"] for node in nodes),
        "run": joined(node["run"] for node in nodes),
        **{name: joined(found) for name, found in sorted(versions.items())},
    }


def device(node: dict[str, Any]) -> str:
    """Such as "8 x NVIDIA H200" or "2 x <the CPU's name>"."""
    if gpus := node["gpus"]:
        return f"{len(gpus)} x {joined(gpu['name'] for gpu in gpus)}"
    return f"{node['cpu']['count']} x {node['cpu']['model']}"


def links(directory: Path, root: Path) -> dict[str, Any]:
    """The nearest links.json, from the run up to the directory that is collected."""
    for place in (directory, *directory.parents):
        if (path := place / "links.json").exists():
            return {f"link_{k}": v for k, v in json.loads(path.read_text()).items()}
        if place == root:
            break
    return {}


def joined(values: Iterable[str]) -> str:
    """Return what is there, each once."""
    return ", ".join(sorted({value for value in values if value}))


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
        return 0
    for each in found:
        seconds = each.get("seconds_per_step")
        seconds = "-" if seconds is None else f"{seconds:.3f} s a step"
        print(f"{each['name']}: status {each['status']}, {each['steps']} steps, {seconds}")
    print(f"{len(found)} run(s) in {output}.csv and {output}.json")
    return 0


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _node_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("node-*.json"), key=lambda path: int(path.stem.split("-")[1]))
