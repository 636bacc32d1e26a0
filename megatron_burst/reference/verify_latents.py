"""Compares gradients where latents travel: there no rank has the whole ones of K and V."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_burst.attention.kv import Latents
from megatron_burst.reference.dense import Expected


class LatentGradients:
    """Makes of gradients of k and v those of the latent and the rotary key, [batch, rows, 1, size].

    What is expected of k and v is whole. What is found is of the rank's own tiles; the rest came
    home as `dlatent`, and in the rotary part of the first head.
    """

    def __init__(self, latents: Latents, k: Tensor, v: Tensor) -> None:
        self._weight = latents.weight.detach().double().unflatten(0, (k.shape[2], -1))  # [h, d, r]
        self._content = self._weight.shape[1] - v.shape[3]

    def actual(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is found, dk and dv replaced."""
        rest = dict(gradients)
        dk, dv, home = (rest.pop(name).double() for name in ("dk", "dv", "dlatent"))
        dkv = torch.cat([dk[..., : self._content], dv], -1)
        whole = home + torch.einsum("bshd,hdr->bsr", dkv, self._weight)
        drotary = dk[..., self._content :].sum(2, keepdim=True)
        return {**rest, "dlatent": whole[:, :, None], "drotary": drotary}

    def expected(self, of_heads: Iterable[Expected]) -> Iterator[Expected]:
        """Replace dk and dv of all heads by their sums; errors add up like noise."""
        dlatent = drotary = squares = rotary_squares = torch.zeros(())
        for each in of_heads:
            if each.tensor not in ("dk", "dv"):
                yield each
                continue
            weight, value, size = self._weight[each.heads.start], each.value, each.value.shape[-1]
            share = each.allowed.square() / size
            if each.tensor == "dk":
                weight = weight[: self._content]
                drotary = drotary + value[..., self._content :]
                rotary_squares = rotary_squares + share * (size - self._content)
                value = value[..., : self._content]
            else:
                weight = weight[self._content :]
            dlatent, squares = dlatent + value @ weight, squares + share * weight.square().sum()
        yield Expected("dlatent", slice(0, 1), dlatent, squares.sqrt())
        yield Expected("drotary", slice(0, 1), drotary, rotary_squares.sqrt())
