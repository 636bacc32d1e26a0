"""A comparison for any machine: a small model on text that every Python brings along."""

from collections.abc import Sequence
from pathlib import Path

from megatron_burst.tools.compare.results import gpus
from megatron_burst.tools.corpus import gather

_FLAGS = """
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
    --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope
    --untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 2
    --train-iters 20 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.07
    --weight-decay 0.01 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
    --split 100,0,0 --eval-iters 0 --eval-interval 1000 --num-workers 0
""".split()


def make_toy(
    directory: Path, inputs: Sequence[Path], *, paragraphs: bool = False, is_dry: bool = False
) -> list[str]:
    """Write the corpus, of short documents if asked, unless it is dry; return the toy's flags.

    Raises:
        ValueError: the corpus cannot be made.
    """
    corpus = gather(inputs, paragraphs=paragraphs)
    # Each text in a folder of its own: a comparison that is under way on another one keeps it, and
    # Megatron's cache of an index knows a corpus by its path alone.
    directory /= corpus.facts(directory)["source"][:12]
    if not is_dry:
        corpus.write(directory)
    content = corpus.facts(directory)
    paths = ["--data-path", content["prefix"], "--data-cache-path", str(directory / "cache")]
    precision = ["--bf16"] if gpus() else []
    return [*_FLAGS, *precision, *paths, *content["tokenizer_args"]]
