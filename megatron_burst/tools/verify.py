"""`megatron-burst verify`: attention over the ranks of this job beside the reference."""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.attention.autograd import ring_attention
from megatron_burst.attention.context import BurstContext
from megatron_burst.config import Algorithm, Backward, BurstConfig
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.reference.dense import Visibility
from megatron_burst.reference.verify import (
    Finding,
    attend_beside_reference,
    table,
    worst,
)
from megatron_burst.tools.arguments.verify import parse

_ONE_RANK = """the kernel is right, but on one rank nothing was spread and no ring was checked; \
start several: torchrun --nproc-per-node 4 -m megatron_burst verify (on one GPU --backend gloo \
--device cuda)"""


class Case(NamedTuple):
    """One attention call of all ranks; of `args` it takes the shape of what a rank holds."""

    config: BurstConfig
    mask: str
    dtype: str
    args: argparse.Namespace
    is_again: bool = False  # by the plan and in the memory of an earlier call

    def __str__(self) -> str:
        backward = self.config.backward
        ring = "" if backward is Backward.AUTO else f", {backward}"
        again = ", again" if self.is_again else ""
        return f"{self.config.algorithm}{ring}, {self.mask}, {self.dtype}{again}"


def main(argv: list[str]) -> int:
    """Run the command; return its exit status, the same on every rank."""
    args = parse(argv)
    joins = not dist.is_initialized() and "RANK" in os.environ
    device = start(args.backend, args.device)
    args.dtype = args.dtype or usual_dtypes(device)
    _refuse_too_much(args, device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1 and args.tokens_per_rank % 2:
        why = "zigzag gives a rank two chunks"
        raise ValueError(f"--tokens-per-rank {args.tokens_per_rank} is not even: {why}")
    shows = ranks == 1 or dist.get_rank() == 0
    if ranks == 1:
        print("verify: one rank: its kernel is looked at, no ring", file=sys.stderr, flush=True)
    results, problems = _check_all(_cases(args), device, shows=shows and not args.json)
    right = "all is right" if ranks > 1 else _ONE_RANK
    if shows:
        if args.json:
            plain = {case: {n: asdict(f) for n, f in row.items()} for case, row in results.items()}
            print(json.dumps({"ranks": ranks, "results": plain, "problems": problems}, indent=2))
        else:
            print(_headline(args, device, ranks), table("", results), *problems, sep="\n")
            print("verify: something is wrong" if problems else f"verify: {right}")
    if joins:
        dist.destroy_process_group()
    return 1 if problems or ranks == 1 else 0


def usual_dtypes(device: torch.device) -> list[str]:
    """Return what is tried by default; no kernel of a GPU serves float32."""
    return ["bfloat16"] if device.type == "cuda" else ["float32", "bfloat16"]


def _check_all(
    cases: Iterable[Case], device: torch.device, *, shows: bool
) -> tuple[dict[str, dict[str, Finding]], list[str]]:
    """Return the worst findings of every case, and what is wrong; show which one is at work."""
    contexts: dict[BurstConfig, BurstContext] = {}
    results, problems = {}, []
    for case in cases:
        if shows:
            print(f"  ... {case}", file=sys.stderr, flush=True)
        try:
            if case.config not in contexts:
                contexts[case.config] = BurstContext.create(case.config)
            ran, findings = check(case, contexts[case.config], device)
        except ValueError as error:  # on all ranks
            problems.append(f"{case} cannot run: {error}")
            continue
        results[f"{case}{ran}"] = findings
        problems += [f"{case}, {finding}" for finding in findings.values() if finding.where]
    return results, problems


def check(
    case: Case, context: BurstContext, device: torch.device
) -> tuple[str, dict[str, Finding]]:
    """Return schedule and kernel of a new call and, for each tensor, the worst of all ranks."""
    args = case.args
    seed = 1 + context.rank + context.ranks * case.is_again  # other tokens than are in buffers
    generator = torch.Generator().manual_seed(seed)

    def drawn(heads: int, size: int) -> Tensor:
        x = torch.randn(args.batch, args.tokens_per_rank, heads, size, generator=generator)
        return x.to(device, getattr(torch, case.dtype)).requires_grad_()

    q, k = (drawn(heads, args.head_dim) for heads in (args.heads, args.kv_heads))
    v, dout = (drawn(heads, args.value_head_dim) for heads in (args.kv_heads, args.heads))
    sink = None
    if args.sink:  # which all ranks share
        sink = torch.linspace(-2, 4, args.heads, device=device).requires_grad_()
    mask, visibility = masks(case.mask, args.tokens_per_rank * context.ranks)
    scale = args.head_dim**-0.5
    mine: list[Finding] = []
    out = attend_beside_reference(
        *(ring_attention, q, k, v, context, visibility, scale),
        take=lambda _, findings: mine.extend(findings),
        sink=sink,
        mask=mask,
    )
    out.backward(dout.detach())
    findings = worst(itertools.chain.from_iterable(context.gather("collect what was found", mine)))
    call = context.kept.last
    are_rings = all("ring" in name for name in call.schedules.split(" and "))
    ran = f", {context.grid if are_rings else call.schedules}, {call.kernel.name}"
    return "" if case.is_again else ran, findings


def masks(name: str, tokens: int) -> tuple[Mask, Visibility]:
    """Return a mask of a sequence for our attention, and the same for the reference."""
    # Of documents: a token, about a third and the rest, as far as there are tokens.
    bounds = sorted({0, 1, tokens // 3 + 1, tokens})
    # Once wider than a rank's chunks and once, on up to 16 ranks, narrower.
    window = tokens // (40 if "+" in name else 5)
    blocks = next(n for n in (8, 4, 2, 1) if tokens % n == 0)
    table = torch.eye(blocks, dtype=torch.bool)  # each block sees itself and the first
    table[:, 0] = True
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "window": ({"window": window}, {"left": window}),
        "documents": ({"documents": bounds}, {"cu_seqlens": torch.tensor(bounds)}),
        "blocks": ({"block_table": table}, {"blocks": table, "tokens_per_sample": tokens}),
    }
    ours, reference = dict[str, Any](), dict[str, Any]()
    for ours_too, reference_too in (settings.get(each, ({}, {})) for each in name.split("+")):
        ours |= ours_too
        reference |= reference_too
    make = Mask.full if name == "full" else Mask.causal
    return make(**ours), Visibility(causal=name != "full", **reference)


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    first: dict[BurstConfig, Case] = {}
    for case in _each_once(args):
        first.setdefault(case.config, case)
        yield case
    for case in first.values():
        yield case._replace(is_again=True)


def _each_once(args: argparse.Namespace) -> Iterator[Case]:
    names = ("topology", "head_parallel_size", "layout", "kernel", "grad_dtype")
    common = {name: getattr(args, name) for name in names} | {"ranks_per_node": args.gpus_per_node}
    for algorithm, mask, dtype in itertools.product(args.algorithm, args.mask, args.dtype):
        for backward in args.backward if algorithm == Algorithm.BURST else [Backward.AUTO]:
            config = BurstConfig(algorithm=algorithm, backward=backward, **common)
            yield Case(config, mask, dtype, args)


def start(backend: str = "auto", device_type: str = "auto") -> torch.device:
    """Join the other ranks that torchrun has started, if any; return this rank's device.

    Raises:
        ValueError: there is no GPU where one is asked for.
    """
    on_nccl = torch.cuda.is_available() and backend != "gloo" and device_type != "cpu"
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    flag = "--device cuda" if device_type == "cuda" else "--backend nccl"
    why_not = ""
    if (device_type == "cuda" and not gpus) or (backend == "nccl" and not on_nccl):
        why_not = f"{flag}: torch {torch.__version__} finds {gpus} GPUs here, --device "
        why_not += f"{device_type}: drop it, or see megatron-burst doctor"
    elif on_nccl and local >= gpus:
        why_not = f"rank {local} of this node has no GPU, there are {gpus}: start fewer, or share "
        why_not += "them with --backend gloo --device cuda"
    if why_not:
        raise ValueError(why_not)
    device = torch.device("cpu")
    if on_nccl or device_type == "cuda":
        device = torch.device("cuda", local % gpus)  # over gloo ranks may share a GPU
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if on_nccl else "gloo")
    return device


def _refuse_too_much(args: argparse.Namespace, device: torch.device) -> None:
    """Raise a ValueError if not even the tensors of the ranks of this node fit into its memory."""
    tokens = args.batch * args.tokens_per_rank
    numbers = (args.heads + args.kv_heads) * (args.head_dim + args.value_head_dim)
    needed = 2 * 4 * tokens * numbers  # q, k, v and the output in float32, and their gradients
    if device.type == "cuda":
        memory, ranks = torch.cuda.mem_get_info(device)[1], 1
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if needed * ranks > memory:
        raise ValueError(
            f"--batch {args.batch} x --tokens-per-rank {args.tokens_per_rank} with {args.heads} "
            f"heads of {args.head_dim} and {args.kv_heads} kv heads takes {needed / 2**30:.4g} GiB "
            f"a rank, of {ranks} that share {memory / 2**30:.4g} GiB: take less"
        )


def _headline(args: argparse.Namespace, device: torch.device, ranks: int) -> str:
    backend = dist.get_backend() if dist.is_initialized() else "no process group"
    return (
        f"{ranks} rank(s) on {device.type} ({backend}), {args.layout}; a rank has {args.batch} x "
        f"{args.tokens_per_rank} tokens, {args.heads} heads and {args.kv_heads} kv heads of "
        f"{args.head_dim} and {args.value_head_dim} numbers.\n"
        "The largest error of any rank, and what is allowed there:"
    )
