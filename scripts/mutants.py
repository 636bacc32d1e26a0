#!/usr/bin/env python3
"""Plants one error at a time in a copy of the package and sees whether the fast tests notice it.

    python scripts/mutants.py [--check] [WORD ...]

WORD chooses errors whose file or texts hold it; --check only looks whether all can be planted.
Ends with 0 if all are noticed, 1 if one is not, 2 if one cannot be planted or tests fail without.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 900  # seconds of tests; an error after which they hang is noticed
NOTICED, MISSED = "noticed", "NOT NOTICED"

# A file of the package, the tests that notice as pytest takes them in tests/, and below these what
# becomes what; the file has the text once.
ERRORS = """
plans/mask.py: plans/test_mask.py plans/test_tiles.py kernels/test_flash_packages.py
    seen &= distance <= self.right => seen &= distance < self.right
    _triangle(above) - _triangle(above - queries) => _triangle(above)
    max(keys.start, queries.start - self.left) => keys.start
    shift = keys - queries => shift = queries - keys
plans/layout.py: plans/test_layout.py
    (rank, chunks - 1 - rank) => (rank, rank + ranks)
    (range(r, tokens, ranks),) => (range(ranks - 1 - r, tokens, ranks),)
plans/tiles.py: plans/test_tiles.py plans/test_mask.py plans/test_plan.py
    all(cell.band == Band.FULL for cell in (*above, *below)) => True
    (low, low), (high, high) => (low, low), (low, low)
plans/topology.py: plans/test_plan.py plans/test_simulator.py
    self.at(node - p, local - s) => self.at(node - p, local + s)
plans/rings.py: plans/test_plan.py plans/test_simulator.py
    for s in range(length - 1): => for s in range(length - 2):
    (p - 1) * length, p * length - 1) => (p - 1) * length, p * length)
    self.grid.ranks - 1 if self.gather else 0 => 0
    tail = 1 if length > 1 else 0 => tail = 0
    {0: half, end: first + second} => {0: half + first + second}
plans/rings.py: attention/test_masks_on_rings.py -k plans_of_any_mask
    needed.add(hop.source) => pass
    holding.add(hop.target) => pass
plans/direct.py: attention/test_masks_on_rings.py -k plans_of_any_mask
    distance + 1, self._end) => distance, self._end)
    interval.start <= union[-1].stop => interval.start < union[-1].stop
plans/cost.py: plans/test_cost.py tools/test_traffic.py
    nodes[hop.source] != nodes[hop.target] => True
    dims = self.head_dim + self.value_head_dim => dims = 2 * self.head_dim
plans/planning.py: attention/test_masks_on_rings.py -k bytes_that_leave
    costs[usual].bottleneck / 2 => costs[usual].bottleneck * 2
plans/planning.py: attention/test_ring_attention.py -k 'auto or go_home'
    is not Algorithm.BURST or leaves_the_node => is not Algorithm.BURST
    min(allowed, key= => max(allowed, key=
plans/head_parallel.py: plans/test_head_parallel.py
    return size // kv_heads => return 1
    key=lambda positions: positions.start => key=lambda positions: -positions.start
plans/recompute.py: attention/test_recompute.py
    min(r.stop, stop) => r.stop
kernels/cpu.py: kernels/test_kernels.py
    dk[:, keys] += part_k => dk[:, keys] = part_k
    if band != Band.FULL: => if band == Band.CAUSAL:
kernels/reference.py: kernels/test_kernels.py attention/test_scores.py
    dscores_BHQK *= 1 - => dscores_BHQK *= 1 +
attention/merge.py: attention/test_ring_attention.py -k dense_oracle
    torch.logaddexp( => torch.maximum(
    total_out.mul_(_per_row((total_lse - merged).exp())) => pass
attention/forward.py: attention/test_scores.py
    results.finish(sink) => results.finish()
attention/backward.py: attention/test_ring_attention.py -k dense_oracle
    tile.key_slice, (dk, dv) => tile.key_slice, (dv, dk)
attention/surrogate.py: attention/test_surrogate.py
    clamp_min(1.0) => clamp_min(2.0)
attention/sink.py: attention/test_scores.py
    return -(weights_BHS => return (weights_BHS
attention/gradient_accumulation.py: attention/test_gradient_accumulation.py
    mine is not None and mine.arrived => mine is not None
    [:, rows.rows] += part => [:, rows.rows] = part
attention/head_exchange.py: attention/test_head_exchange.py
    exchange(gradients, not to_heads) => exchange(gradients, to_heads)
attention/saved.py: attention/test_recompute.py plugin/test_recompute.py
    saved, self.saved = self.saved, None => saved = self.saved
loss/call.py: loss/test_one_rank.py
    return 4 if => return 3 if
loss/chunk.py: loss/test_one_rank.py
    .neg_().add_(1.0) => .neg_().add_(2.0)
    1.0 + 2.0 * z_loss * lse => 1.0 + z_loss * lse
loss/loops.py: loss/test_one_rank.py
    .masked_fill(~where.counted, 0.0) => .clone()
loss/vocabulary.py: loss/test_one_rank.py
    statistics[3] / vocabulary => statistics[3]
loss/vocabulary.py: loss/test_vocab_parallel.py
    (of_ranks[:, 0] - highest).exp_() => 1
    self.group.rank() * self.shard => 0
transport/comm.py: transport/test_comm_faults.py -k 'disagree or never_calls'
    len(set(values)) > 1 => len(set(values)) > 2
    missing.append(str(rank)) => pass
transport/watchdog.py: transport/test_watchdog.py
    max(progress, oldest.since) => oldest.since
transport/comm.py: attention/test_ring_attention.py -k counted_bytes
    [message.transfer.channel] += message => [message.transfer.channel] = message
transport/groups.py: transport/test_groups.py
    rank // config.ranks_per_node => rank % config.ranks_per_node
    elif head_parallel_size > 1: => elif False:
plugin/hooks/sequence_hooks.py: plugin/test_sequence_hooks.py
    arrived.shape[1] > 1 => arrived.shape[1] > 9
    exchange.move(grad, not to_ours) => exchange.move(grad, to_ours)
plugin/hooks/lm_head.py: loss/test_megatron_hook.py
    wait_for_weights(output_layer, hidden_states) => pass
plugin/attention/documents.py: plugin/test_masks.py
    padded is packed.cu_seqlens_q and => padded is not None and
plugin/attention/nan_check.py: plugin/test_nan_check.py
    torch.isfinite(tensor) => ~torch.isnan(tensor)
plugin/attention/recompute.py: plugin/test_recompute.py
    elif self._left() is not storage: => elif False:
"""


def mutants() -> Iterator[tuple[str, str, str, str]]:
    """Read the table: file, text, what that becomes, tests."""
    file = tests = ""
    for line in ERRORS.strip().splitlines():
        if line.startswith("    "):
            old, new = line.strip().split(" => ")
            yield file, old, new, tests
        else:
            file, tests = line.split(": ", 1)


def copy_to(target: Path) -> None:
    """Copy what git knows of the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def ending(root: Path, tests: str) -> str:
    """Run tests in the copy and say how they end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *shlex.split(tests)]
    place = {"cwd": root / "tests", "env": {**os.environ, "PYTHONPATH": str(root)}}
    try:
        done = subprocess.run(command, **place, capture_output=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return f"{NOTICED}, they hang"
    return {0: MISSED, 1: NOTICED}.get(done.returncode, f"PYTEST ENDED {done.returncode}")


ending_without = cache(ending)  # an error: tests that fail anyway notice nothing


def outcome(root: Path, mutant: tuple[str, ...], *, check: bool) -> str:
    """Try one error and leave the copy as it was."""
    file, old, new, tests = mutant
    path = root / "megatron_burst" / file
    original = path.read_text() if path.exists() else ""
    if original.count(old) != 1:
        return f"DID NOT APPLY, found {original.count(old)} times"
    if check:
        return "applies"
    if ending_without(root, tests) != MISSED:
        return "ITS TESTS FAIL ANYWAY"
    path.write_text(original.replace(old, new))
    try:
        return ending(root, tests)
    finally:
        path.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--check", action="store_true", help="only look whether all can be planted")
    options = parser.parse_args()
    chosen = [m for m in mutants() if all(word in " ".join(m[:3]) for word in options.words)]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for mutant in chosen:
            outcomes.append(outcome(Path(folder), mutant, check=options.check))
            print(f"{outcomes[-1]:<12} {mutant[0]:<34} {mutant[1]} => {mutant[2]}", flush=True)
    for text, number in Counter(outcomes).items():
        print(f"{number} of {len(outcomes)}: {text}")
    if any(not o.startswith((NOTICED, MISSED, "applies")) for o in outcomes):
        return 2
    return int(MISSED in outcomes)


if __name__ == "__main__":
    sys.exit(main())
