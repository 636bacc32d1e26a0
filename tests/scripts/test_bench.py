"""The benchmarks of accuracy and of tiles, on sizes that say nothing but run. (fast tier)"""

import itertools
import sys
from pathlib import Path

import pytest
import torch

from megatron_burst import Mask
from megatron_burst.config import GradDtype, GradientReturn
from megatron_burst.kernels import KERNELS
from megatron_burst.plans.cost import visible_pairs
from megatron_burst.plans.plan import Kind
from megatron_burst.plans.topology import Grid

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
sys.path.append(str(BENCH))

import accuracy  # noqa: E402
import tiles  # noqa: E402

RETURNS = (GradientReturn.CHAIN, GradientReturn.HOME)
GRIDS = (Grid(((0, 1, 2, 3),)), Grid(((0, 1), (2, 3))))


def numbers(page: str, first_cell: str) -> list[list[str]]:
    """The cells of those rows of the page's tables that begin with this cell."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] == first_cell]


@pytest.mark.parametrize(
    ("kind", "back", "grid"), [*itertools.product((Kind.KV, Kind.QUERY), RETURNS, GRIDS)]
)
def test_threads_compute_what_the_oracle_does(kind: Kind, back: GradientReturn, grid: Grid) -> None:
    args = accuracy.flags(["--tokens", "16", "--head-dim", "6"])
    inputs = tuple(x.double() for x in accuracy.make_inputs(args, accuracy.Heads(4, 2), seed=0))
    way = accuracy.Way(kind, GradDtype.FLOAT32, back)
    found = accuracy.ring(inputs, grid, way, KERNELS["reference"])
    assert max(accuracy.errors(found, accuracy.oracle(inputs)).values()) < 1e-14


def test_accuracy_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "page.md"
    command = "accuracy --tokens 64 --heads 4:2 --ranks 8 --nodes 1 2 --seeds 1 --ring kv query"
    ways = "--return chain home --grad-dtype float32 model"
    monkeypatch.setattr(sys, "argv", [*f"{command} {ways} --output".split(), str(output)])
    accuracy.main()
    rows = numbers(output.read_text(), "4:2")
    errors = {tuple(row[1:4]): [float(cell.split()[0]) for cell in row[5:]] for row in rows[:-8]}
    assert len(errors) == 10 + 7 and {len(row) for row in errors.values()} == {2}
    for ring, result in (("kv", "dk"), ("kv", "dv"), ("query", "dq")):
        exact, home, chain = (
            errors[ring, result, way][0]
            for way in ("float32, chain", "model, home", "model, chain")
        )
        assert exact == home < 0.95 * chain  # one rounding a hop shows, and only there
    # Through a card: 7 blocks of K, V, dK and dV from node to node, or 4 partials; at 65536 tokens
    # a rank, 2 heads of 64 and 2 bytes an element a block or a gradient of K and V has 32 MiB.
    (flat,) = [row[4:] for row in rows if row[1:4] == ["flat ring", "kv", "model"]]
    assert [cell.split(" / ")[0] for cell in flat] == [str(32 * (7 + 7)), str(32 * (7 + 4))]


@pytest.mark.parametrize("back", RETURNS)
def test_the_tiles_of_all_ranks_are_the_whole_sequence(back: GradientReturn) -> None:
    case = tiles.Case("cpu", "float32", back, 4, 2, 8, tokens=16, ranks=4, device="cpu")
    times = tiles.measure(case, repetitions=2)
    pairs = {name: samples[0].pairs for name, samples in times.items()}
    whole, own = visible_pairs(Mask.causal(), 64), visible_pairs(Mask.causal(), 16)
    assert {pairs[phase, what] for phase, what in pairs if "own" not in what} == {whole}
    assert {pairs[phase, what] for phase, what in pairs if "own" in what} == {own}
    assert times["backward", "own tile in parts"][0].calls == 3
    assert all(len(samples) == 2 for samples in times.values())
    assert all(0 < s.in_kernels <= s.seconds for samples in times.values() for s in samples)


def test_a_gpu_runs_the_middle_rank_against_a_call_that_fits() -> None:
    sizes = {"kernel": "cudnn", "dtype": "bfloat16", "back": RETURNS[0], "device": "cuda"}
    case = tiles.Case(**sizes, heads=32, kv_heads=8, head_dim=128, tokens=131072, ranks=8)
    assert list(case.ranks_run) == [4] and case.tokens_of_one_call == 131072
    pairs = visible_pairs(Mask.causal(), 131072)
    assert case.flops("forward", pairs) == pytest.approx(4 * 32 * 128 * 131072**2 / 2, rel=1e-4)


def test_tiles_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "page.md"
    command = "tiles --tokens-per-rank 16 --heads 2 --kv-heads 2 --repetitions 1 --kernel cpu cudnn"
    monkeypatch.setattr(sys, "argv", [*f"{command} --output".split(), str(output)])
    tiles.main()
    page = output.read_text()
    assert len(numbers(page, "cpu")) == 2 * len(tiles.COMPARISONS)  # of two dtypes
    assert not numbers(page, "cudnn") and "the tensors are on cpu" in page
    assert torch.get_num_threads() == 1
