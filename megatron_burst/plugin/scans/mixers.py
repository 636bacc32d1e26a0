"""Megatron's Mamba-2 and gated-delta-net layers, whose ranks pass states on contiguous shards."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, chunk_gated_delta_rule, l2norm
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.scans.layer import OverRanks
from megatron_burst.plugin.scans.packages import fla_rule, mamba_scan
from megatron_burst.plugin.scans.rank_scan import (
    Scanned,
    causal_convolution,
    plain_delta_rule,
    scan_by_decay,
    scan_by_delta_rule,
    with_state_before,
)
from megatron_burst.plugin.scans.shards import Shard

_TORCH = "plain torch"


def with_states_passed(value: Any, shared: SharedState) -> Any:
    """Return a ModuleSpec of one of Megatron's layers as that of ours, any other value as it is."""
    if not isinstance(value, ModuleSpec) or value.module not in _OURS:
        return value
    params = {**value.params, "shared": shared}
    return dataclasses.replace(value, module=_OURS[value.module], params=params)


class MambaOverRanks(OverRanks, MambaMixer):
    """Mamba-2."""

    symbol = "M"

    def over_ranks(self, hidden_states: Tensor, shard: Shard) -> tuple[Tensor, Tensor | None]:
        """Return the output and its bias."""
        mixed = self.in_proj(hidden_states)[0].transpose(0, 1)  # [B, T, z x B C dt]
        inner, states = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
        z, convolved, dt = mixed.split([inner, inner + 2 * states, self.nheads_local_tp], -1)
        weight, group = self.conv1d_weight.squeeze(1), self.pg_collection.cp
        convolved = causal_convolution(convolved, weight, self.conv1d_bias, shard, group)
        x, b, c = self.act(convolved).split([inner, states, states], -1)
        x = x.unflatten(-1, (self.nheads_local_tp, -1))
        b, c = (each.unflatten(-1, (self.ngroups_local_tp, -1)) for each in (b, c))
        y = with_state_before(self._scan(x, dt, b, c, shard), group)
        y = (y + self.D.view(self.nheads_local_tp, -1) * x).to(x.dtype).flatten(2)
        y = self.norm(y, z) if self.rmsnorm else y * self.act(z)
        return self.out_proj(y.transpose(0, 1).contiguous())

    def _scan(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, shard: Shard) -> Scanned:
        wide = accumulation_dtype(x.dtype)
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))  # [B, T, heads]
        decay = -self.A_log.to(wide).exp()
        self.log_bytes("mamba_ssm" if x.is_cuda else _TORCH, x.shape[1], x.element_size())
        if x.is_cuda:
            kernel = mamba_mixer.mamba_chunk_scan_combined
            options = {}
            if mamba_mixer.MAMBA_HAS_STATE_DTYPE:
                options["state_dtype"] = self.mamba_training_ssm_states_dtype
            return mamba_scan(kernel, self.chunk_size, [x, dt, decay, b, c], shard, **options)
        return scan_by_decay(c, b, dt.unsqueeze(-1) * x, dt * decay, shard)


class DeltaNetOverRanks(OverRanks, GatedDeltaNet):
    """The gated delta net."""

    symbol = "G"

    def over_ranks(self, hidden_states: Tensor, shard: Shard) -> tuple[Tensor, Tensor | None]:
        """Return the output and its bias."""
        mixed = self.in_proj(hidden_states)[0].transpose(0, 1)  # [B, T, q k v gate beta alpha]
        convolved, gate, beta, alpha = self._parts(mixed)
        weight, group = self.conv1d.weight.squeeze(1), self.pg_collection.cp
        convolved = causal_convolution(convolved, weight, self.conv1d.bias, shard, group)
        convolved = self.act_fn(convolved)
        given = self._prepare(convolved, beta, alpha)
        in_torch = self.config.deterministic_mode or not mixed.is_cuda
        self.log_bytes(_TORCH if in_torch else "fla", mixed.shape[1], mixed.element_size())
        rule = plain_delta_rule if in_torch else fla_rule(chunk_gated_delta_rule)
        read = with_state_before(scan_by_delta_rule(rule, given, shard), group)
        return self._project(read.to(mixed.dtype), gate)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Cut what the projection makes: Megatron's sizes for it have other names by version."""
        keys, values, heads = self.qk_dim_local_tp, self.v_dim_local_tp, self.num_v_heads_local_tp
        return mixed.split([2 * keys + values, values, heads, heads], -1)

    def _prepare(self, convolved: Tensor, beta: Tensor, alpha: Tensor) -> list[Tensor]:
        """Return q, k, v [B, T, heads, ...], the decay and beta, of the dtypes of Megatron's."""
        qk_dim, heads = self.qk_dim_local_tp, self.num_v_heads_local_tp
        q, k, v = convolved.split([qk_dim, qk_dim, self.v_dim_local_tp], -1)
        q, k = (each.unflatten(-1, (-1, self.key_head_dim)).contiguous() for each in (q, k))
        if self.use_qk_l2norm:
            q, k = l2norm(q), l2norm(k)
        q, k = (each.repeat_interleave(heads // each.shape[2], 2) for each in (q, k))
        alpha = alpha.to(accumulation_dtype(alpha.dtype))
        decay = -self.A_log.exp() * F.softplus(alpha + self.dt_bias)
        return [q, k, v.unflatten(-1, (heads, -1)), decay, beta.sigmoid()]

    def _project(self, read: Tensor, gate: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what is behind the norm and the projection, the norm computed again if asked."""

        def normed(read: Tensor, gate: Tensor) -> Tensor:
            gates = gate.contiguous().view(read.shape)
            states = self._apply_gated_norm(read, gates).view(*read.shape[:2], -1)
            return states.transpose(0, 1).contiguous()

        if not self.recompute_norm_out:
            return self.out_proj(normed(read, gate))
        self.norm_out_checkpoint = CheckpointWithoutOutput()
        out, bias = self.out_proj(self.norm_out_checkpoint.checkpoint(normed, read, gate))
        self.norm_out_checkpoint.discard_output_and_register_recompute(out)
        return out, bias


_OURS: Mapping[Any, type] = {MambaMixer: MambaOverRanks, GatedDeltaNet: DeltaNetOverRanks}
