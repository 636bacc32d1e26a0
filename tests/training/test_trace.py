"""--burst-trace in a training: which steps it holds, evaluation left out. (fast tier)"""

from pathlib import Path

from megatron_burst.tools.exposure import calls_of, load
from tests.training.launcher import BURST, train


def test_two_training_steps_are_recorded_and_no_evaluation(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    log = train(
        tmp_path,
        2,
        *data,
        *BURST,
        *("--context-parallel-size", "2", "--calculate-per-token-loss", "--num-layers", "2"),
        *("--train-iters", "4", "--split", "90,10,0", "--eval-iters", "1", "--eval-interval", "2"),
        *("--burst-trace", str(tmp_path / "trace")),
    )
    assert "burst trace: steps 2 and 3 of this run" in log.text
    for trace in load(tmp_path / "trace"):
        calls = calls_of([trace])
        steps = [call.call.arguments["training_step"] for call in calls]
        # 2 layers, 2 micro-batches of 2 samples.
        assert sorted(steps) == 8 * [2] + 8 * [3]
        assert [call.name for call in calls].count("forward") == 8
        assert not [text for call in calls for text in call.miscounts]
