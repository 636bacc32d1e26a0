#!/usr/bin/env python3
"""Random calls of attention and of the loss on 1 to 8 processes against dense ones in float64.

    python scripts/fuzz.py [--seed S] [--count N] [--seconds T] [--case K]

Output and all gradients of ring_attention, latent_ring_attention and linear_cross_entropy. A
ValueError of the forward on every rank is a refusal, and right. One on some ranks alone, any other
error, a wrong number or no answer is a failure, printed with what repeats it; then the status is 1.
"""

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import megatron_burst as burst  # noqa: E402
from megatron_burst.attention.saved import AttentionMemory  # noqa: E402
from megatron_burst.plans.choice.layouts import make_layout  # noqa: E402
from tests import oracle  # noqa: E402
from tests.loss import oracle as loss_oracle  # noqa: E402
from tests.plans.masks import LAYOUTS, Masking  # noqa: E402
from tests.workers import Team, WorkerError, WorkerPool  # noqa: E402

# Of the norm of what is expected, or of numbers of LEAST where that is more.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 6e-6, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LEAST = 0.5
TIME_LIMIT = 60.0  # seconds of a message; of a case twice as many
KINDS = "attention attention attention latents loss".split()
BEFORE = "no_grad", "inference", "memory"  # a call without gradients, then one with them
MODES = "frozen autocast accumulated retained checkpointed again".split()
SETTINGS: dict[str, Sequence[Any]] = {
    "ranks_per_node": (1, 2, 3, 4, 8),
    "backward": ("kv", "query"),
    "topology": ("flat", "double", "mesh"),
    "memory_mb": (1, 1000),
    "head_parallel_size": (2, 2, 4, 3),
    "head_chunks": (1, 2),
    "grad_dtype": ("float32", "model"),
    "kernel": ("cpu", "reference"),
    "mla": ("latent", "latent", "heads"),
}
type Tensors = dict[str, Tensor]
type Call = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call; its tensors are whole here, and spread over the ranks where it runs."""

    kind: str
    ranks: int
    mode: str
    dtype: torch.dtype
    seed: int
    shapes: dict[str, tuple[int, ...]]  # of what is differentiated, and of the result: "out"
    given: dict[str, Any]  # to the call as it is
    frozen: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    masking: Masking = Masking()
    layout: str = ""  # given with the call

    def tensors(self) -> Tensors:
        """Return what is differentiated, the gradient of the result as "out", and targets."""
        seeded, wide = torch.Generator().manual_seed(self.seed), torch.float32
        made = {n: torch.randn(shape, generator=seeded) for n, shape in self.shapes.items()}
        if "weight" in made:
            made["weight"] *= 2 / made["weight"].shape[1] ** 0.5
        sinks = {n: made[n].to(torch.promote_types(self.dtype, wide)) for n in made if n == "sink"}
        tensors = {n: x.to(self.dtype) for n, x in made.items()} | sinks
        if self.kind == "loss":
            vocabulary, shape = self.shapes["weight"][0], self.shapes["out"]
            tensors["targets"] = torch.randint(0, vocabulary, shape, generator=seeded)
        return tensors

    def place(self, name: str) -> str:
        """Say how a tensor, and its gradient, lies on the ranks."""
        if self.kind == "loss":
            split = ("hidden", "weight") if self.given["sequence_parallel"] else ("weight",)
            return "rows" if name in split else "same"
        return "summed" if name in ("weight", "sink") else "tokens"

    def layout_of(self) -> Any:
        tokens = self.shapes["out"][1]
        own = make_layout(burst.BurstConfig(**self.config), tokens, self.ranks)
        return LAYOUTS[self.layout](tokens, self.ranks) if self.layout else own

    def spread(self, name: str, x: Tensor, rank: int) -> Tensor:
        """Return a rank's part; that of tokens may lie in memory as Megatron's do."""
        if self.place(name) == "tokens":
            x = self.layout_of().shard(x, rank, 1)
            return x.transpose(0, 1).contiguous().transpose(0, 1) if self.seed % 2 else x
        return x.chunk(self.ranks)[rank].clone() if self.place(name) == "rows" else x

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Put the parts of all ranks together; NaN where they should be the same and are not."""
        place, first = self.place(name), parts[0]
        if place == "tokens":
            return self.layout_of().unshard(parts, 1)
        if place == "summed":
            return torch.stack([x.double() for x in parts]).sum(0)
        if place == "rows":
            return torch.cat(list(parts))
        return first if all(torch.equal(x, first) for x in parts) else first * torch.nan

    def expected(self) -> Tensors:
        """Return what dense code makes of the same tensors, and in the order of their names."""
        x = self.tensors()
        if self.reckons_in != self.dtype:
            x |= {n: x[n].to(self.reckons_in) for n in self.shapes if n not in ("sink", "out")}
        dout, *inputs = x["out"], *(x[n] for n in self.shapes if n != "out")
        more = {n: v for n, v in self.given.items() if n not in NOT_THE_ORACLES}
        names = ["out", *(n for n in self.shapes if n != "out")]
        if self.kind == "loss":
            results = loss_oracle.oracle(loss_oracle.Case(*inputs, x["targets"], dout), **more)
            return dict(zip(names, results, strict=True))
        visible, more["scale"] = self.masking.visible(dout.shape[1]), more.pop("softmax_scale")
        if self.kind == "latents":
            made = oracle.latent_attention(*inputs, dout, visible, **more)
            return dict(zip(names, made, strict=True))
        out, lse, *rest = oracle.attention(*inputs[:3], dout, visible, **more, sink=x.get("sink"))
        return {"out": out, "lse": lse.mT, **dict(zip("q k v sink".split(), rest, strict=True))}

    @property
    def reckons_in(self) -> torch.dtype:
        stays = self.mode != "autocast" or self.kind == "loss" or self.dtype == torch.float64
        return self.dtype if stays else torch.bfloat16


NOT_THE_ORACLES = "sequence_parallel", "chunk_size", "memory_mb"


def draw(seed: int, number: int) -> Case:
    """Return a case that depends on nothing else."""
    r = random.Random(f"{seed} {number}")
    kind, ranks = r.choice(KINDS), r.choice([1, 2, 2, 3, 4, 4, 5, 6, 8])
    modes = ["plain"] * 6 + MODES + [x for x in BEFORE if (kind, x) != ("loss", "memory")]
    mode, dtype = r.choice(modes), r.choice([torch.float64, torch.float32, *TOLERANCES])
    shapes, given = {"attention": _attention, "latents": _latents, "loss": _loss}[kind](r, ranks)
    trained = [name for name in shapes if name != "out"]
    case: dict[str, Any] = {"kind": kind, "ranks": ranks, "mode": mode, "dtype": dtype}
    case |= {"seed": r.randrange(2**31), "shapes": shapes, "given": given}
    case["frozen"] = r.sample(trained, r.randrange(1, len(trained))) if mode == "frozen" else []
    if kind != "loss":
        case |= {"config": _config(r), "masking": _masking(r, shapes["out"][1])}
    if kind == "attention":
        case["layout"] = r.choice(["", "", "", *LAYOUTS])
    if given.get("soft_cap"):
        case["config"]["kernel"] = "reference"  # the only one for CPUs that has them
    return Case(**case)


def _attention(r: random.Random, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    lead = r.randint(1, 2), _tokens(r, ranks)
    kv, dim = r.choice([1, 2, 3, 4, 8]), r.randint(1, 20)
    heads, value = kv * r.choice([1, 1, 2, 3, 4]), r.choice([dim, r.randint(1, 20)])
    shapes: dict[str, Any] = {"q": (*lead, heads, dim), "k": (*lead, kv, dim)}
    shapes |= {"v": (*lead, kv, value), "out": (*lead, heads, value)}
    shapes |= r.choice([{}, {}, {"sink": (heads,)}])
    scale, cap = r.choice([None, None, 0.3, -0.5, 0.0]), r.choice([None, None, None, 1.5])
    return shapes, {"softmax_scale": scale, "soft_cap": cap}


def _latents(r: random.Random, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    lead, heads = (r.randint(1, 2), _tokens(r, ranks)), r.choice([1, 2, 3, 4, 8])
    content, rotary, value, rank = (r.randint(1, 9) for _ in range(4))
    shapes: dict[str, Any] = {"q": (*lead, heads, content + rotary), "latent": (*lead, rank)}
    shapes |= {"rotary": (*lead, rotary), "weight": (heads * (content + value), rank)}
    return shapes | {"out": (*lead, heads, value)}, {"softmax_scale": r.choice([None, 0.3, -0.5])}


def _loss(r: random.Random, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    size, is_parallel = r.randint(1, 40), r.random() < 0.4
    lead = (r.randint(1, 30) * (ranks if is_parallel else 1), *r.choice([(), (r.randint(1, 5),)]))
    limit = r.choice([{}, {"chunk_size": r.randint(1, 80)}, {"memory_mb": r.choice([0.05, 1])}])
    given = r.choice([*loss_oracle.OBJECTIVES.values()]) | limit
    shapes = {"hidden": (*lead, size), "weight": (ranks * r.randint(1, 30), size), "out": lead}
    return shapes, {"sequence_parallel": is_parallel, **given}


def _tokens(r: random.Random, ranks: int) -> int:
    return ranks * r.choice([1, 2, 4, 6, 8, 10, 12, r.randint(1, 24), 24])


def _config(r: random.Random) -> dict[str, Any]:
    """Draw settings until they go together, but not for ever: refusals are tried, too."""
    config: dict[str, Any] = {}
    for _ in range(4):
        likely = r.choice([0.0, 0.15, 0.4])
        config = {name: r.choice(of) for name, of in SETTINGS.items() if r.random() < likely}
        config["algorithm"] = r.choice(["burst"] * 3 + ["ring", "allgather", "ulysses"])
        config["layout"] = r.choice(["zigzag"] * 2 + ["segmented-zigzag", "contiguous", "striped"])
        try:
            burst.BurstConfig(**config)
        except ValueError:
            continue
        break
    return config


def _masking(r: random.Random, tokens: int) -> Masking:
    documents = lengths = table = None
    if r.random() < 0.4:
        cuts = r.sample(range(1, tokens), min(tokens - 1, r.randint(0, 9)))
        documents = (0, *sorted(cuts), tokens)
        whole = zip(documents, documents[1:], strict=False)
        lengths = r.choice([None, tuple(r.randint(0, stop - start) for start, stop in whole)])
    if r.random() < 0.2:
        side = r.choice([n for n in range(1, 9) if tokens % n == 0])
        table = tuple(tuple(r.random() < 0.6 for _ in range(side)) for _ in range(side))
    window = r.choice([None, None, r.randint(0, tokens + 2)])
    return Masking(r.random() < 0.7, window, documents, table, lengths)


def attempt(team: Team, case: Case) -> Tensors | str:
    """Run this rank's part; return its part of the results, or why it is refused."""
    logging.getLogger("megatron_burst").setLevel(logging.WARNING)
    results: Tensors = {}
    try:
        local = {n: case.spread(n, x, team.rank) for n, x in case.tensors().items()}
        dout, targets = local.pop("out"), local.pop("targets", None)
        leaves = {n: x.detach().requires_grad_(n not in case.frozen) for n, x in local.items()}
        call = partial(_call(case, team, targets, results), *leaves.values())
        if case.mode in BEFORE:
            with torch.inference_mode() if case.mode == "inference" else torch.no_grad():
                results["out before"] = call().clone()
        with _autocast(case):
            again = checkpoint(call, use_reentrant=False) if case.mode == "checkpointed" else call()
    except ValueError as error:
        return str(error)
    with _autocast(case, case.seed % 3 > 0):
        _backward(case, call, leaves, *loss_oracle.in_one(again, dout))
    results["out"] = again.detach()
    return results | {n: x.grad for n, x in leaves.items() if x.grad is not None}


def _call(case: Case, team: Team, targets: Tensor | None, results: Tensors) -> Call:
    if case.kind == "loss":
        group = team.group if case.ranks > 1 else None

        def losses(hidden: Tensor, weight: Tensor) -> Tensor:
            given = {"group": group, **case.given}
            made = burst.linear_cross_entropy(hidden, weight, targets, **given)
            return made if isinstance(made, Tensor) else torch.stack(made)

        return losses
    context = team.context(burst.BurstConfig(timeout_seconds=TIME_LIMIT, **case.config))
    given = {"mask": case.masking.mask, **case.given}
    if case.kind == "latents":
        return partial(burst.latent_ring_attention, context=context, **given)
    given["layout"] = case.layout_of() if case.layout else None
    given["memory"] = AttentionMemory(case.seed % 5 / 4) if case.mode == "memory" else None

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        out, lse = burst.ring_attention(q, k, v, context, sink=sink, return_lse=True, **given)
        results["lse"] = lse.mT
        return out

    return attend


def _autocast(case: Case, also: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=also and case.mode == "autocast")


def _backward(case: Case, call: Call, leaves: Tensors, out: Tensor, dout: Tensor) -> None:
    """Leave the gradients at the leaves; of two backwards the mean."""
    out.backward(dout, retain_graph=case.mode == "retained")
    if case.mode == "again":
        try:
            out.backward(dout)
        except RuntimeError:  # torch's, before any message: the gradients stay, and a call is right
            call().backward(dout)
    if case.mode in ("accumulated", "retained"):
        (out if case.mode == "retained" else call()).backward(dout)
    for leaf in leaves.values():
        if leaf.grad is not None and case.mode in ("again", "accumulated", "retained"):
            leaf.grad /= 2


def judge(workers: WorkerPool, case: Case) -> str:
    """Run a case; return "equal", "refused", or what is wrong."""
    try:
        replies = workers.run(case.ranks, attempt, case, timeout=2 * TIME_LIMIT)
    except WorkerError as error:
        return str(error)
    refusals = {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, str)}
    if refusals:
        return "refused" if len(refusals) == len(replies) else f"refused on some ranks: {refusals}"
    wanted = {name for name in case.shapes if name not in case.frozen}.union(*replies)
    wanted |= {"lse"} if case.kind == "attention" else set()
    if missing := sorted({name for reply in replies for name in wanted - reply.keys()}):
        return f"missing {', '.join(missing)}"
    expected, wrong = case.expected(), []
    for name in sorted(wanted):
        right = expected[name.removesuffix(" before")]
        whole = case.join(name, [reply[name] for reply in replies])
        off = oracle.relative_error(whole, right, LEAST * whole.numel() ** 0.5)
        if not off <= TOLERANCES[case.reckons_in]:
            wrong.append(f"{name} is off by {off:.1e}")
    return "; ".join(wrong) or "equal"


def fuzz(workers: WorkerPool, seed: int, numbers: Iterable[int], seconds: float) -> Counter[str]:
    """Run cases for so long, print each failure, and count how they ended."""
    ends, stop = Counter[str](), time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() > stop:
            break
        outcome = judge(workers, case := draw(seed, number))
        if outcome not in ("equal", "refused"):
            print(f"FAILED --seed {seed} --case {number}: {outcome}\n  {case}", flush=True)
            outcome = "failed"
        ends[outcome] += 1
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: 0)")
    parser.add_argument("--count", type=int, help="how many cases (default: all there is time for)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--case", type=int, help="run this one alone, and print what it is")
    args = parser.parse_args()
    numbers: Iterable[int] = count() if args.count is None else range(args.count)
    if args.case is not None:
        numbers = [args.case]
        print(draw(args.seed, args.case))
    workers, begun = WorkerPool(), time.monotonic()
    try:
        ends = fuzz(workers, args.seed, numbers, args.seconds)
    finally:
        workers.close()
    said = ", ".join(f"{ends[end]} {end}" for end in ("equal", "refused", "failed"))
    print(f"seed {args.seed}: {said} in {time.monotonic() - begun:.0f} s")
    return int(ends["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
