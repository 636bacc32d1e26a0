"""A comparison for any machine: a small GPT on text that every Python brings along."""

import json
import os
import subprocess
import sys
from pathlib import Path

RANKS, RANKS_PER_NODE = 4, 2

_FLAGS = """
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
    --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope
    --untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 2
    --train-iters 20 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.01 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
    --split 100,0,0 --eval-iters 0 --eval-interval 1000 --num-workers 0
""".split()


def make_toy(directory: Path) -> tuple[list[str], float]:
    """Write the corpus unless it is there; return the flags of the toy and the text's entropy.

    Raises:
        ValueError: the corpus cannot be made.
    """
    about = directory / "corpus.json"
    if not about.is_file():
        _make_corpus(directory)
    content = json.loads(about.read_text())
    # Megatron's index cache knows a corpus by its path alone: another text needs another cache.
    cache = directory / f"cache-{content['source'][:12]}"
    paths = ["--data-path", str(directory / "corpus"), "--data-cache-path", str(cache)]
    return [*_FLAGS, *paths, *content["tokenizer_args"]], float(content["unigram_entropy_nats"])


def _make_corpus(directory: Path) -> None:
    """In a process of its own: Megatron, which writes it, warns of much that is not used here."""
    command = [sys.executable, "-m", "megatron_burst.tools.corpus", "--output", str(directory)]
    environment = {"PYTHONWARNINGS": "ignore::UserWarning", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ValueError(f"the toy's corpus could not be made: {done.stderr[-2000:]}")
