"""What Mamba-2 and gated delta nets compute over time, in plain torch.

Sources: the duality of recurrence and attention, arXiv 2405.21060; gated delta nets, 2412.06464.
Clear before fast: a chunk of tokens is a few products of matrices.
"""

import functools

import torch
from torch import Tensor


def decaying_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    memory: Tensor | None = None,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Write to and read from a memory that decays with every token.

    Equals this loop for every batch and head, with the memory S [dk, dv]:

        S = exp(log_decay[t]) * S
        new = v[t] if beta is None else beta[t] * (v[t] - k[t] @ S)
        S = S + outer(k[t], new)
        out[t] = q[t] @ S

    Args:
        q: [B, T, groups, dk], like k; each group serves heads / groups heads beside each other.
        k: what a token writes under.
        v: [B, T, heads, dv].
        log_decay: [B, T, heads], not above 0.
        beta: [B, T, heads], how much of what is there is replaced; None: nothing, it is added to.
        memory: [B, heads, dk, dv] at first; None is zero.
        chunk: tokens that are computed together; the result depends on it by rounding alone.

    Returns:
        The outputs [B, T, heads, dv] and the memory behind the last token, computed in float32, in
        float64 if anything given is.
    """
    q, k = (tensor.repeat_interleave(v.shape[2] // tensor.shape[2], 2) for tensor in (q, k))
    given = [q, k, v, log_decay.unsqueeze(-1)]
    given += [] if beta is None else [beta.unsqueeze(-1)]
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in given), torch.float32)
    if memory is None:
        memory = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    out, memory = [], memory.to(dtype)
    by_head = (tensor.to(dtype).transpose(1, 2) for tensor in given)
    for part in zip(*(tensor.split(chunk, 2) for tensor in by_head), strict=True):
        read, memory = _one_chunk(memory, *part)
        out.append(read)
    return torch.cat(out, 2).transpose(1, 2), memory


def _one_chunk(
    memory: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the tokens of a chunk read, and the memory after them. All are [B, H, T, ...]."""
    decay = log_decay.squeeze(-1).cumsum(-1)
    since_start = decay.exp().unsqueeze(-1)
    tokens = torch.arange(decay.shape[-1], device=decay.device)
    later = tokens > tokens.unsqueeze(-1)
    # What is left at token t (rows) of what token i (columns) wrote. Masked before exp, which would
    # overflow there: infinity times 0 has no gradient.
    left = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    if beta is not None:  # what a token writes depends on what those before it in the chunk wrote
        of_others = beta * left * (k @ k.mT)
        v = beta * (v - since_start * (k @ memory))
        v = torch.linalg.solve_triangular(of_others, v, upper=False, unitriangular=True)
    read = since_start * (q @ memory) + (left * (q @ k.mT)) @ v
    return read, since_start[:, :, -1:] * memory + (left[:, :, -1].unsqueeze(-1) * k).mT @ v
