"""What layers with a state send: states, or channels by Megatron's all-to-all over heads."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_burst.plugin.hooks.layer_layouts import moves, sides


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """What a layer sends by; heads and channels are those of one tensor-parallel rank."""

    heads: int  # that an all-to-all shares out
    groups: int  # of heads that share channels, which go to every rank that has one of them
    shared: int  # those channels
    state: int  # numbers of the states of all heads
    transition: int  # numbers by which a rank's tokens change them
    width: int  # tokens under the convolution
    convolved: int  # channels of it
    projected: int  # channels that the projection before the scan makes
    out: int  # channels behind the scan

    def by_states(self, ranks: int, number_bytes: int) -> int:
        """Return the bytes a sequence that a rank sends at the most forward; backward no T.

        A number of an activation has so many bytes, one of a state four.
        """
        halo = (self.width - 1) * self.convolved * number_bytes
        return (ranks - 1) * 4 * (self.state + self.transition) + halo

    def by_heads(self, tokens: int, ranks: int, number_bytes: int) -> int:
        """Return those of the all-to-all with `tokens` a rank, forward as backward."""
        repeated = (max(1, ranks // self.groups) - 1) * self.shared
        channels = self.projected + repeated + self.out
        return tokens * channels * number_bytes * (ranks - 1) // ranks

    def divides(self, ranks: int) -> bool:
        """Whether Megatron can share out heads and groups; groups may serve several ranks."""
        by_groups = self.groups % ranks == 0 or ranks % self.groups == 0
        return self.heads % ranks == 0 and by_groups

    def fewer_from(self, ranks: int, number_bytes: int) -> int:
        """Return from how many tokens a rank on passing states sends no more."""
        a_token = self.by_heads(ranks, ranks, number_bytes) / ranks
        return math.ceil(self.by_states(ranks, number_bytes) / a_token)


def shapes_of(number: Callable[[str, int], int], tensor: int = 1) -> dict[str, ScanShape]:
    """Return those of a model's layers, by their symbols.

    Args:
        number: gives the value of one of Megatron's arguments, or what it is if it is not given.
        tensor: tensor-parallel ranks.
    """
    return {"M": _of_mamba(number, tensor), "G": _of_delta_net(number, tensor)}


def shapes_in(settings: Any, tensor: int) -> dict[str, ScanShape]:
    """Return those of Megatron's parsed arguments, or of a TransformerConfig."""
    return shapes_of(lambda name, default: getattr(settings, name, None) or default, tensor)


def _of_mamba(number: Callable[[str, int], int], tensor: int) -> ScanShape:
    head_dim = number("mamba_head_dim", 64)
    heads = number("mamba_num_heads", 2 * number("hidden_size", 0) // head_dim) // tensor
    groups = max(1, number("mamba_num_groups", 8) // tensor)
    states = number("mamba_state_dim", 128)
    inner, both = heads * head_dim, 2 * groups * states
    return ScanShape(
        heads=heads,
        groups=groups,
        shared=both,
        state=inner * states,
        transition=heads,
        width=4,
        convolved=inner + both,
        projected=2 * inner + both + heads,
        out=inner,
    )


def _of_delta_net(number: Callable[[str, int], int], tensor: int) -> ScanShape:
    key_heads = number("linear_num_key_heads", 16) // tensor
    heads = number("linear_num_value_heads", 32) // tensor
    key_dim = number("linear_key_head_dim", 128)
    qk, values = 2 * key_heads * key_dim, heads * number("linear_value_head_dim", 128)
    return ScanShape(
        heads=key_heads,
        groups=key_heads,
        shared=0,
        state=key_dim * values,
        transition=heads * key_dim**2,
        width=number("linear_conv_kernel_dim", 4),
        convolved=qk + values,
        projected=qk + 2 * values + 2 * heads,
        out=values,
    )


class Sent(NamedTuple):
    """Bytes a sequence that a rank sends for all layers with a state of a model, forward."""

    states: int  # the rows that move to contiguous shards and back among them
    heads: float  # infinite where heads or groups do not divide over the ranks


def sent_by_model(
    kinds: str, shapes: dict[str, ScanShape], moved: int, tokens: int, ranks: int, number_bytes: int
) -> Sent:
    """Return what a model sends in either way.

    Args:
        kinds: the symbols of its layers; `/` between those of the decoder and MTP's depths.
        shapes: of those with a state.
        moved: bytes of a rank's hidden states, all of which move at a border: no rank far from both
            ends of the sequence has in zigzag what it has of contiguous shards.
        tokens: of a rank.
        ranks: context-parallel ones.
        number_bytes: of a number of an activation.
    """
    layers = [shapes[kind] for kind in kinds if kind in shapes]
    states = sum(each.by_states(ranks, number_bytes) for each in layers)
    heads: float = sum(each.by_heads(tokens, ranks, number_bytes) for each in layers)
    if not all(each.divides(ranks) for each in layers):
        heads = math.inf
    return Sent(states + moves(sides(kinds)) * moved, heads)
