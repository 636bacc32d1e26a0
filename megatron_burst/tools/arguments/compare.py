"""Train one model on the same data through several algorithms and write one report of all.

Runs megatron_burst.pretrain once for each variant: the same seed, data and model, another
--context-parallel-algo. --dry-run lists the variants, and why some cannot run here. What is
finished is kept: the same command goes on where it was interrupted. The report is DIR/compare.md
and DIR/compare.json; tensorboard --logdir DIR/runs shows the losses over each other.

Ends with status 1 if a variant failed, if in the first --judged-steps the losses of one differ from
those of the reference, one context-parallel rank, by more than --tolerance, or if in 20 steps or
more of --toy the loss of one does not fall by half a nat.
"""

from pathlib import Path

from megatron_burst.tools import options
from megatron_burst.tools.flags import DOCUMENTS

_EXAMPLES = (
    "megatron-burst compare --toy",
    f"megatron-burst compare --toy -- {DOCUMENTS}",
    "megatron-burst compare --ranks 8 --output DIR -- MEGATRON-FLAGS",
    "megatron-burst compare --run 14b_1m_32gpu_a800 --variants 'burst,ring *' --dry-run",
)


def parser() -> options.Parser:
    """Return what reads the words."""
    made = options.Parser("compare", __doc__, *_EXAMPLES)
    add, number = made.add_argument, options.positive
    text = "a small model on Python's standard library; needs no GPU and no more flags"
    add("--toy", action="store_true", help=text)
    text = "with --toy, train on this text, directory or JSONL file; may be given again"
    add("--input", type=Path, action="append", default=[], metavar="PATH", help=text)
    text = "a named run of configs/ on its ranks; flags that you add win over its own"
    add("--run", metavar="NAME", help=text)
    text = "train the model of --toy or --run as a GPTModel (default: as a HybridModel)"
    add("--gpt", action="store_true", help=text)
    text = "a directory (default: runs/compare, -toy or -NAME behind it)"
    add("--output", type=Path, metavar="PATH", help=text)
    add("--ranks", type=number, metavar="N", help="default: as many as GPUs; with --toy up to 4")
    text = "take the ranks as nodes of L, as --burst-ranks-per-node does (default: one node; with "
    text += "--run those of its cluster)"
    add("--gpus-per-node", type=number, metavar="L", help=text)
    add("--variants", default="", metavar="NAMES", help="only these, as 'CP=1*,burst*,ring flat'")
    text = "starts the ranks in place of torchrun on this machine, as 'srun torchrun --nnodes 2 "
    text += "...'; what a variant runs is put behind it"
    add("--launcher", default="", metavar="COMMAND", help=text)
    add("--peak-tflops", type=float, help="of one device, for the MFU (default: by its name)")
    add("--judged-steps", type=number, default=20, metavar="N", help="default: 20")
    add("--tolerance", type=float, help="default: 1e-4, under --bf16 and --fp16 1e-2")
    text = "do not profile steps 2 and 3; a training of fewer than 4 needs it"
    add("--no-trace", action="store_true", help=text)
    add("--dry-run", action="store_true", help="show the commands and run none")
    add("flags", nargs="*", metavar="MEGATRON-FLAGS", help="after --")
    return made
