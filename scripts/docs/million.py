"""Writes the command, the memory to expect and the ladders of docs/million.md.

python scripts/docs/million.py --write docs/million.md
"""

from pathlib import Path

from pages import fill, parser, table

from megatron_burst.tools.flags import adapt_flags
from megatron_burst.tools.plan import ladder, memory
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.ranking import Candidate
from megatron_burst.tools.plan.reading import workload_of

JOBS = {"llama3_8b": 8, "qwen3_32b": 8, "70b": 16}
_OTHERS = {"qwen3_32b": "1.55", "70b": "1.2"}  # millions of tokens that ALST publishes
_TOKENS = 2**20
_LACKING = ("lm-head-loss", "recompute-offload", "mlp-chunks", "use-megatron-fsdp")
_PUBLISHED = {  # of Llama-8B on 8 H100: where, and millions of tokens
    "the loss in chunks": "ALST, weights sharded, optimizer on the host: 1.1",
    "layers' inputs on the host": "ALST: 2.4",
    "MLPs in chunks of tokens": "ALST: 1.2 without the inputs, 3.8 with them",
    "weights sharded (Megatron-FSDP)": "UPipe: 5",
}


def parts() -> dict[str, str]:
    """Return what is written into the page."""
    climbs = {name: _climb(name, gpus) for name, gpus in JOBS.items()}
    rungs = climbs["llama3_8b"]
    best = max(rungs, key=lambda rung: rung.longest)
    texts = {"command": f"```bash\n{wrapped(best.way.command())}\n```", "memory": _memory(best.way)}
    texts["wrong"] = _wrong(best)
    texts["llama3_8b"] = _ladder(rungs)
    texts["others"] = _others(climbs)
    return texts


def wrapped(command: str) -> str:
    """Return a command on lines of at most 100 columns; flags stay with their values."""
    lines = [""]
    for word in command.replace(" --", "\n--").split("\n"):
        if lines[-1] and len(lines[-1]) + len(word) > 96:
            lines.append("    " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _climb(model: str, gpus: int) -> list[ladder.Rung]:
    configs = Configs.read()
    flags = configs.flags_of("_long") | configs.model(model)
    del flags["lm-head-memory-mb"]  # the loss's chunks have their default, as in a search
    flags = adapt_flags(flags, {}, gpt=False)
    return ladder.climb(ladder.sized(flags, _TOKENS), configs.cluster("h100"), gpus)


def _memory(way: Candidate) -> str:
    of = way.memory
    rows = {
        "weights, a shard": of.weights,
        "gradients, a shard": of.gradients,
        "optimizer, a shard": of.optimizer,
        "embedding, head, and weights and gradients of layers while they are whole": of.gathered,
        "the input of a layer": of.inputs,
        "a layer in its backward": of.layer,
        "or, when none is at work, the loss": of.loss,
        "NCCL's buffers for attention's messages": of.nccl,
        "**in all**": of.total,
        "in the host's memory, of 8 ranks": way.host_bytes,
    }
    return table(("of a GPU", "GiB"), [(name, f"{n / memory.GIB:.1f}") for name, n in rows.items()])


def _wrong(best: ladder.Rung) -> str:
    flags, load = best.way.flags, best.load
    rows = []
    for name in _LACKING:
        less = {flag: value for flag, value in flags.items() if flag != name}
        total = memory.predict(workload_of(less, load.cluster, load.gpus)).total
        rows.append((f"`--{name}`", f"{total / memory.GIB:.0f}"))
    return table(("without", "GiB of a GPU"), rows)


def _ladder(rungs: list[ladder.Rung]) -> str:
    head = ["", "TP", "states", "inputs", "layer", "loss", "NCCL", "GPU", "host", "longest"]
    rows = [[r.name, *ladder.cells(r), _PUBLISHED.get(r.name, "")] for r in rungs]
    return table([*head, "published, millions"], rows)


def _others(climbs: dict[str, list[ladder.Rung]]) -> str:
    rows = []
    for name, published in _OTHERS.items():
        best = max(climbs[name], key=lambda rung: rung.longest)
        cells = ladder.cells(best)
        rows.append((name, f"{JOBS[name]}", best.name, cells[0], *cells[-3:], published))
    head = ("model", "H100", "row", "TP", "GPU", "host", "longest")
    return table((*head, "ALST, millions"), rows)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--write", type=Path, metavar="PAGE", required=True)
    fill(arguments.parse_args().write, parts())


if __name__ == "__main__":
    main()
