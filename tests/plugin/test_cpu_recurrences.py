"""The CPU platform's Mamba-2 equals its three-line loop in float64. (fast tier)"""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_burst.cpu_platform import recurrences
from megatron_burst.plugin.scans.recurrence import decaying_memory

TOKENS_AND_CHUNK = [(1, 16), (37, 16), (64, 64), (5, 2)]
HEADS = 4


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def check_equal(
    ours: Callable[..., Tensor], loop: Callable[..., Tensor], given: Sequence[Tensor]
) -> None:
    """Output and the gradients of all that is given."""
    found, expected = ours(*given), loop(*given)
    dout = torch.randn_like(expected)
    gradients = zip(
        torch.autograd.grad(found, given, dout),
        torch.autograd.grad(expected, given, dout),
        strict=True,
    )
    for a, b in [(found, expected), *gradients]:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def convolution_loop(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out, width = [], weight.shape[1]
    for t in range(x.shape[1]):
        there = [j for j in range(width) if t + 1 + j - width >= 0]
        out.append(bias + sum(weight[:, j] * x[:, t + 1 + j - width] for j in there))
    return F.silu(torch.stack(out, 1))


def scan_loop(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, dt_bias: Tensor
) -> Tensor:
    """Group by group is written out, so that which heads share a B shows."""
    dt, decay = F.softplus(dt + dt_bias), -a.exp()
    state, out = torch.zeros(*x[:, 0].shape, b.shape[-1], dtype=x.dtype), []  # [b, h, p, n]
    shared = [head * b.shape[2] // x.shape[2] for head in range(x.shape[2])]
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        state = (step * decay[:, None]).exp()[..., None] * state
        state = state + (step * x[:, t])[..., None] * b[:, t, shared][:, :, None]
        y = (state * c[:, t, shared][:, :, None]).sum(-1) + d.reshape(len(decay), -1) * x[:, t]
        out.append(y * F.silu(z[:, t]))
    return torch.stack(out, 1)


@pytest.mark.parametrize(("tokens", "chunk"), TOKENS_AND_CHUNK)
@pytest.mark.parametrize(("groups", "skip"), [(1, (HEADS,)), (2, (HEADS, 3)), (4, (HEADS,))])
def test_the_selective_scan_equals_its_loop(
    tokens: int, chunk: int, groups: int, skip: tuple[int, ...]
) -> None:
    x, z = inputs(*[(2, tokens, HEADS, 3)] * 2)
    given = [x, *inputs((2, tokens, HEADS), (HEADS,), *[(2, tokens, groups, 5)] * 2, skip)]
    given += [z, *inputs((HEADS,))]

    def ours(x, dt, a, b, c, d, z, dt_bias):
        return recurrences.mamba_chunk_scan_combined(
            x, dt, -a.exp(), b, c, chunk, D=d, z=z, dt_bias=dt_bias, dt_softplus=True
        )

    check_equal(ours, scan_loop, given)


def test_a_step_without_softplus_is_taken_as_it_is() -> None:
    x, dt = inputs((1, 9, 2, 3), (1, 9, 2))
    b, heads = x.mean(2, keepdim=True), torch.ones(2)

    def scan(dt: Tensor, softplus: bool) -> Tensor:
        given = {"D": heads, "z": None, "dt_bias": 0 * heads, "dt_softplus": softplus}
        return recurrences.mamba_chunk_scan_combined(x, dt, -heads, b, b, 4, **given)

    torch.testing.assert_close(scan(F.softplus(dt), False), scan(dt, True))


@pytest.mark.parametrize("headdim", [3, None])
def test_what_is_between_mambas_projections_equals_its_parts(headdim: int | None) -> None:
    tokens, groups, n, p = 11, 2, 5, 3
    inner, channels = HEADS * p, HEADS * p + 2 * groups * n
    skip = (HEADS,) if headdim else (HEADS, p)
    given = inputs((2, tokens, inner + channels + HEADS), (channels, 4), (channels,))
    given += inputs((HEADS,), (HEADS,), skip)

    def ours(mixed, weight, bias, dt_bias, a, d):
        return recurrences.mamba_split_conv1d_scan_combined(
            *(mixed, weight, bias, dt_bias, -a.exp(), d),
            chunk_size=4,
            activation="silu",
            headdim=headdim,
            ngroups=groups,
            norm_before_gate=False,
            seq_idx=None,
        )

    def loop(mixed, weight, bias, dt_bias, a, d):
        z, dt = mixed[..., :inner], mixed[..., inner + channels :]
        convolved = convolution_loop(mixed[..., inner : inner + channels], weight, bias)
        x, b, c = (
            convolved[..., start:stop].reshape(2, tokens, heads, -1)
            for start, stop, heads in (
                (0, inner, HEADS),
                (inner, inner + groups * n, groups),
                (inner + groups * n, channels, groups),
            )
        )
        return scan_loop(x, dt, a, b, c, d, z.reshape(x.shape), dt_bias).flatten(2)

    check_equal(ours, loop, given)


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_the_convolution_equals_its_loop(tokens: int) -> None:
    given = inputs((2, tokens, 6), (6, 4), (6,))

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return recurrences.causal_convolution(x, weight, bias, "silu")

    check_equal(ours, convolution_loop, given)


def test_the_length_and_the_norm_equal_their_formulas() -> None:
    x, z, weight = inputs((2, 3, 8), (2, 3, 8), (8,))
    unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    check_equal(recurrences.l2norm, unit, [x])
    norm = recurrences.RMSNorm(
        8, eps=1e-5, group_size=4, norm_before_gate=False, device=None, dtype=torch.float64
    )

    def ours(x, weight, *z):
        return torch.func.functional_call(norm, {"weight": weight}, (x, *z))

    def formula(x, weight, z=None):
        gated = x if z is None else x * z * z.sigmoid()
        groups = gated.reshape(2, 3, 2, 4)
        return (groups / (groups.square().mean(-1, True) + 1e-5).sqrt()).reshape(2, 3, 8) * weight

    check_equal(ours, formula, [x, weight])
    check_equal(ours, formula, [x, weight, z])


def test_a_memory_that_is_lost_at_once_has_gradients() -> None:
    """exp of what lies behind the diagonal would be infinite."""
    q, k, v, g = inputs(*[(1, 64, 1, 4)] * 3, (1, 64, 1))
    out, _ = decaying_memory(q, k, v, -1000 * g.square(), chunk=64)
    gradients = torch.autograd.grad(out.sum(), [q, k, v, g])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_bfloat16_is_computed_in_float32() -> None:
    x, z, dt, b, c = inputs(*[(2, 40, HEADS, 8)] * 2, (2, 40, HEADS), *[(2, 40, 1, 8)] * 2)
    low = [tensor.detach().bfloat16() for tensor in (x, z, dt, b, c)]

    def scan(x, z, dt, b, c, dtype):
        per_head = torch.ones(HEADS, dtype=dtype)
        given = {"D": per_head, "z": z, "dt_bias": per_head, "dt_softplus": True}
        return recurrences.mamba_chunk_scan_combined(x, dt, -per_head, b, c, 16, **given)

    found = scan(*low, torch.float32)
    assert found.dtype == torch.bfloat16
    expected = scan(*(tensor.double() for tensor in low), torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


def refused(function: Callable[..., object], name: str, **arguments: object) -> None:
    with pytest.raises(ValueError, match=rf"{function.__name__} on the CPU.* take {name}"):
        function(**arguments)


def test_what_is_not_honoured_is_refused_by_name() -> None:
    x, heads = torch.zeros(1, 2, 2, 2), torch.zeros(2)
    scan = {"x": x, "dt": x[..., 0], "A": heads, "B": x, "C": x, "chunk_size": 2, "D": heads}
    scan |= {"z": None, "dt_bias": heads, "dt_softplus": True}
    for name, value in (("initial_states", x), ("return_final_states", True)):
        refused(recurrences.mamba_chunk_scan_combined, name, **scan, **{name: value})

    convolution = {"x": x[0], "weight": x[0, 0], "bias": None, "activation": "silu"}
    convolution |= {"initial_state": None, "output_final_state": False, "cu_seqlens": None}
    for name in ("initial_state", "output_final_state", "cu_seqlens"):
        refused(recurrences.causal_conv1d, name, **{**convolution, name: heads})
    with pytest.raises(ValueError, match="has silu, not 'relu'"):
        recurrences.causal_conv1d(**{**convolution, "activation": "relu"})

    split = dict.fromkeys(("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D"), x)
    split |= {"chunk_size": 2, "activation": "silu", "headdim": 2, "ngroups": 1}
    split |= {"norm_before_gate": False, "seq_idx": None}
    for name in ("seq_idx", "norm_before_gate"):
        refused(recurrences.mamba_split_conv1d_scan_combined, name, **{**split, name: heads})
    norm = {"hidden_size": 2, "eps": 1, "group_size": 1, "device": None, "dtype": None}
    refused(recurrences.RMSNorm, "norm_before_gate", **norm, norm_before_gate=True)
