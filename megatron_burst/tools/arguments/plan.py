"""The command line of `megatron-burst plan`."""

from megatron_burst.tools import options

_ABOUT = """Predicts memory, bytes, exposed communication and time of a training step under every
algorithm and puts what fits first, then the fastest. After -- come Megatron's flags, which win over
those of the run or the model; or a whole command, pasted as it is: then the answer is the doctor's
findings, the step as it stands, and the same with our flags."""


def parser() -> options.Parser:
    """Return what reads the words before `--`."""
    made = options.Parser(
        "plan",
        _ABOUT,
        "megatron-burst plan --run 14b_1m_32gpu_a800",
        "megatron-burst plan --model llama3_8b --cluster h100 --gpus 64 --seq-length 1M",
        "megatron-burst plan --cluster h100 -- torchrun --nproc-per-node 8 pretrain_gpt.py FLAGS",
        "megatron-burst plan --model llama3_8b --cluster h100 --gpus 8 --seq-length 64k --search",
        "megatron-burst plan --model llama3_8b --cluster h100 --gpus 8 --ladder",
        "megatron-burst plan --measure here.toml",
    )
    add = made.add_argument
    add("--run", metavar="NAME", help="a named run of configs/runs.toml")
    add("--gpt", action="store_true", help="as a GPTModel (default: as a HybridModel)")
    text = "print the names of models, clusters and runs, or of those that match, as 'llama*'"
    add("--list", nargs="?", const="*", metavar="PATTERN", help=text)
    text = "a model of configs/; or flags, or a whole command, after --"
    add("--model", metavar="NAME", help=text)
    text = "a800, a100, h100, h200, b200, gb200, or a file that --measure wrote"
    add("--cluster", metavar="NAME", help=text)
    text = "of the job (default: what torchrun says after --)"
    add("--gpus", type=options.positive, metavar="N", help=text)
    text = "tokens of a sequence, as 131072, 128k or 1M"
    add("--seq-length", type=options.tokens, metavar="N", help=text)
    text = "of attention that may be recomputed in recomputed layers (default: 0 0.5 1)"
    add("--fractions", type=float, nargs="+", default=[0, 0.5, 1], metavar="RHO", help=text)
    text = "try all sizes that are not given behind --, of pipelines (pp) and experts (ep) if asked"
    add = made.add_mutually_exclusive_group().add_argument
    add("--search", nargs="*", choices=("pp", "ep"), metavar="pp ep", help=text)
    text = "how far sequences go, one saving of memory after the other, at its best sizes"
    add("--ladder", action="store_true", help=text)
    add = made.add_argument
    text = "packed sequences: documents of this mean length, exponentially distributed"
    add("--documents", type=options.tokens, metavar="N", help=text)
    text = "measure the rates of this machine and write a cluster file"
    add("--measure", metavar="FILE", help=text)
    add("--top", type=options.positive, default=20, metavar="N", help="rows (default: 20)")
    return made
