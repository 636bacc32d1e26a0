"""128k tokens on a CPU: the dense mask, 16 GiB of booleans, is never built. (slow tier)"""

import resource
from pathlib import Path

import pytest

from tests.training.launcher import BURST, train

TOKENS = 128 * 1024


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_step_of_128k_tokens(tmp_path: Path, corpus_of_long_documents: tuple[str, ...]) -> None:
    train(
        tmp_path,
        2,
        *corpus_of_long_documents,
        *BURST,
        *("--context-parallel-size", "2", "--calculate-per-token-loss"),
        *("--seq-length", str(TOKENS), "--max-position-embeddings", str(TOKENS)),
        *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "1"),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1"),
        timeout=1400,
    )
    # The largest of all finished child processes; the mask alone would be four times this.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert peak < TOKENS * TOKENS // 4
