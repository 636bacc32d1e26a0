"""The command line of `megatron-burst doctor`."""

from argparse import ArgumentTypeError

from megatron_burst.tools import options

_DTYPES = "bfloat16", "float16", "float32"
_ABOUT = """What is installed, what serves, and whether a training command will run. It starts none.

The command may begin with variables, torchrun or python, or be flags alone. Megatron's parser and
all validation run on it, then the checks on known silent errors. It is judged for this machine, or
with --nodes, --gpus-per-node, --cluster or --compute-capability for a cluster, on the packages of
this machine. The exit status is 0 if the command line will run, else 1."""


def parser() -> options.Parser:
    """Return what reads the words before `--`."""
    made = options.Parser(
        "doctor",
        _ABOUT,
        "megatron-burst doctor",
        "megatron-burst doctor --shape 32,8,128",
        "megatron-burst doctor --gpus-per-node 8 --nodes 4 -- torchrun ... -m "
        "megatron_burst.pretrain FLAGS",
    )
    add, number = made.add_argument, options.positive
    add("--nodes", type=number, metavar="M", help="nodes of the cluster")
    add("--gpus-per-node", type=number, metavar="L", help="GPUs, and ranks, of a node")
    text = "a table of the planner's, against whose memory it is held (default: of the GPUs here)"
    add("--cluster", metavar="NAME", help=text)
    text = "of its GPUs (default: by --cluster, else 9.0, Hopper; 8.0 is Ampere)"
    add("--compute-capability", type=capability, metavar="X.Y", help=text)
    text = "of one rank's attention, to ask the kernels about (default: the command's)"
    add("--shape", type=sizes, metavar="HEADS,KV_HEADS,SIZE[,VALUE_SIZE]", help=text)
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of --shape (default: %(default)s)")
    add("--strict", action="store_true", help="exit status 1 for what runs but is wrong, too")
    return made


def capability(text: str) -> tuple[int, int]:
    """Read 9.0: the `type` of a flag."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def sizes(text: str) -> tuple[int, int, int, int]:
    """Read the sizes of a shape: the `type` of a flag."""
    heads, kv_heads, size, *more = map(options.positive, text.split(","))
    if heads % kv_heads:
        raise ArgumentTypeError(f"{heads} heads are no multiple of {kv_heads} kv heads")
    (value_size,) = more or [size]
    return heads, kv_heads, size, value_size
