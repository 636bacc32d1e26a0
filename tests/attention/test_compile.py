"""torch.compile leaves attention and loss as they are, and traces no planner. (slow tier)"""

import json
from typing import Any

import pytest

from tests.processes import python

TRACES = """
import json, sys, torch
import megatron_burst
loaded = "torch._dynamo" in sys.modules
from megatron_burst import BurstConfig, BurstContext, Mask, linear_cross_entropy, ring_attention

context, seen = BurstContext.create(BurstConfig()), []

def layer(x):
    x = x * 2
    out = ring_attention(x, x, x, context, mask=Mask.causal()).relu() + 1
    targets = torch.zeros(out.shape[:-1], dtype=torch.long)
    return linear_cross_entropy(out, torch.ones(5, 8), targets, reduction="mean") * out

def backend(graph, _):
    seen.append(graph)
    return graph

leaf = [torch.randn(1, n, 2, 8, requires_grad=True) for n in (8, 16)]
expected = [layer(x) for x in leaf]
gradients = torch.autograd.grad(sum(x.sum() for x in expected), leaf)
loaded_by_running = "torch._dynamo" in sys.modules
compiled = torch.compile(layer, backend=backend)
found = [compiled(x) for x in leaf]
again = torch.autograd.grad(sum(x.sum() for x in found), leaf)
torch._dynamo.config.compiled_autograd = True
backward = torch.compile(lambda loss: loss.backward(retain_graph=True), backend=backend)
backward(ring_attention(leaf[0], leaf[0], leaf[0], context, mask=Mask.causal()).sum())
hidden = torch.ones(2, 8, requires_grad=True)
loss = linear_cross_entropy(hidden, torch.eye(5, 8), torch.zeros(2).long(), reduction="sum")
for factor in 1, 2, 4:
    backward(factor * loss)
from torch._dynamo.utils import compilation_time_metrics, get_compilation_metrics
files = {m.co_filename for m in get_compilation_metrics() if m.co_filename}
print(json.dumps({
    "loaded": [loaded, loaded_by_running],
    "equal": all(map(torch.equal, found, expected)) and all(map(torch.equal, again, gradients)),
    "thrice": hidden.grad[0].tolist(),
    "graphs": len(seen),
    "ours": sorted(f.partition("megatron_burst/")[2] for f in files if "megatron_burst/" in f),
}))
"""


def traced() -> dict[str, Any]:
    run = python("-c", TRACES)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_compiled_layer_is_right_and_nothing_of_the_planner_is_traced() -> None:
    found = traced()
    assert found["loaded"] == [False, False], "who compiles nothing does not load the compiler"
    assert found["equal"] and found["graphs"] >= 3, "what is around it is compiled"
    # What the forward kept serves the first of three.
    assert found["thrice"] == pytest.approx([7 / 5 - 7, *[7 / 5] * 4, 0, 0, 0])
    assert set(found["ours"]) <= {"kernels/uncompiled.py"}
