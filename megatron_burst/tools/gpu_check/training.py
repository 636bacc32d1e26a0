"""A small model, trained by Megatron with its own attention and loss, and with ours.

The only stage that needs megatron-core, and what `megatron-burst[train]` brings.
"""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from megatron_burst.tools.gpu_check.stage import Check, Device, at_most

REMEDY = "leave away what the lines name; report the log.txt of training/runs beside the page, too"
_ITERATIONS = {"cuda": 20, "cpu": 5}
_ALLOWED = {"cuda": 2e-2, "cpu": 1e-4}  # of the loss, in bfloat16 and in float32
_VARIANTS = {
    "CP=1 megatron": "megatron",  # the losses of the others are held against
    "attention": "burst",
    "attention, half of it recomputed, and chunked loss": "burst --lm-head-loss chunked "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--recompute-attention-fraction 0.5",
}


def check(device: Device) -> Iterator[Check]:
    """Train a toy each way and compare the losses."""
    missing = [name for name in ("megatron", "tensorboard") if find_spec(name) is None]
    if missing:
        yield Check("left out", f"{' and '.join(missing)}: pip install 'megatron-burst[train]'")
        return
    # They need those packages.
    from megatron_burst.tools.compare.results import RAN, differences
    from megatron_burst.tools.compare.running import Series
    from megatron_burst.tools.compare.toy import make_toy
    from megatron_burst.tools.compare.variants import Variant
    from megatron_burst.tools.launch.processes import Signals

    folder = device.folder.resolve() / "training"
    shutil.rmtree(folder / "runs", ignore_errors=True)  # else what ran before would count
    toy = make_toy(folder / "corpus", ())
    more = "--calculate-per-token-loss --attention-dropout 0 --hidden-dropout 0".split()
    iterations = _ITERATIONS[device.device.type]
    steps = ["--train-iters", str(iterations), "--context-parallel-size", "1"]
    series = Series(directory=folder, flags=[*toy, *more, *steps], ranks=1, traced=False)
    signals, results, allowed = Signals(), [], _ALLOWED[device.device.type]
    variants = [*_VARIANTS.items()]
    for name, words in variants if device.is_gpu else (variants[0], variants[-1]):
        device.say(name)
        flags = ("--context-parallel-algo", *words.split())
        results.append(series.run(Variant(name=name, flags=flags, ranks=1), signals))
        if results[-1].status != RAN:
            yield Check(name, f"{results[-1].status}: {results[-1].reason}", passed=False)
            continue
        last, seconds = results[-1].losses[-1][1], results[-1].seconds_per_step or 0.0
        memory = (results[-1].peak_memory_bytes or 0.0) / 2**20
        yield Check(name, f"loss {last:.4f}, {seconds * 1e3:.0f} ms a step, {memory:.0f} MiB")
    ran = [result.name for result in results if result.status == RAN]
    for name, apart in differences(results, ran[0], iterations).items() if ran else ():
        yield at_most(f"losses of {name} beside {ran[0]}", apart.relative, allowed)
