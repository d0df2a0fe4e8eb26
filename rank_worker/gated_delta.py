"""Gated delta rule mixer: this rank's value heads, their state slots, and the partial output."""

from __future__ import annotations

import torch
from torch import Tensor

from placement.spec import Axis, GatedDeltaSpec
from rank_worker.batch import DecodeGroup, StepBatch, Uncommitted
from rank_worker.parts import Parts
from rank_worker.projection import Projection


class GatedDeltaState:
    """Recurrent and convolution state of every slot, one layer. Recurrent state is fp32."""

    def __init__(
        self, spec: GatedDeltaSpec, heads: int, channels: int, slots: int, dtype: torch.dtype
    ) -> None:
        self.recurrent = torch.zeros(slots, heads, spec.key_dim, spec.value_dim)
        self.conv = torch.zeros(slots, spec.conv_kernel - 1, channels, dtype=dtype)

    def reset(self, slot: int) -> None:
        self.recurrent[slot].zero_()
        self.conv[slot].zero_()

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"recurrent_slots": [self.recurrent], "conv_state": [self.conv]}


class GatedDeltaMixer:
    """x [T, H] -> partial sum [T, H] over this rank's value heads."""

    def __init__(
        self, parts: Parts, spec: GatedDeltaSpec, weights: dict[str, Tensor], prefix: str
    ) -> None:
        share = parts.share
        self.ops, self.spec, self.eps = parts.ops, spec, parts.spec.norm_eps
        first_key, last_key = share.ranges[Axis.KEY_HEADS]
        first_value, last_value = share.ranges[Axis.VALUE_HEADS]
        self.key_heads, self.value_heads = last_key - first_key, last_value - first_value
        group = spec.num_value_heads // spec.num_key_heads
        # Key head of each local value head, as a local index: groups are consecutive.
        self.key_head = torch.arange(first_value, last_value) // group - first_key
        names = ("qkv", "z", "b", "a")
        self.in_proj = Projection(parts, [weights.pop(f"{prefix}.{name}") for name in names])
        conv = weights.pop(f"{prefix}.conv")
        self.conv_weight = parts.device.pack_taps(conv.reshape(conv.shape[0], conv.shape[-1]))
        self.a_log = weights.pop(f"{prefix}.a_log")
        self.dt_bias = weights.pop(f"{prefix}.dt_bias")
        self.norm = weights.pop(f"{prefix}.norm")
        self.out = Projection(parts, [weights.pop(f"{prefix}.out")])
        self.widths = [self.conv_weight.shape[0], self.value_heads * spec.value_dim]
        self.widths += [self.value_heads, self.value_heads]
        keys = self.key_heads * spec.key_dim
        self.qkv_widths = [keys, keys, self.value_heads * spec.value_dim]
        self.state = GatedDeltaState(
            spec, self.value_heads, self.widths[0], parts.num_slots, parts.ops.dtype
        )
        self.uncommitted: Uncommitted | None = None

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        if not self.value_heads:
            return torch.zeros_like(x)
        projected = self.in_proj(x)
        channels, z, b, a = torch.split_with_sizes(projected, self.widths, dim=-1)
        g, beta = self.ops.delta_gates(a, b, self.a_log, self.dt_bias)
        parts = []
        for group in batch.groups:
            inputs = group.of(channels), group.of(g), group.of(beta)
            step = self._verify if group.is_draft else self._decode
            parts.append(step(*inputs, group))
        for row in batch.prefill:
            s = slice(row.begin, row.end)
            parts.append(self._prefill(channels[s], g[s], beta[s], row.slot))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        gate = z.reshape(out.shape)
        normed = self.ops.gated_rms_norm(out, self.norm, gate, self.eps, self.spec.gate_activation)
        return self.out(normed.flatten(1))

    def _heads(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [..., key heads, dim] and v [..., value heads, dim] of channels [..., C]."""
        q, k, v = torch.split_with_sizes(channels, self.qkv_widths, dim=-1)
        key_shape = (*channels.shape[:-1], self.key_heads, self.spec.key_dim)
        value_shape = (*channels.shape[:-1], self.value_heads, self.spec.value_dim)
        return q.view(key_shape), k.view(key_shape), v.view(value_shape)

    def _decode(self, channels: Tensor, g: Tensor, beta: Tensor, group: DecodeGroup) -> Tensor:
        """One token a row ([B, 1, ...]), into the state at once."""
        mixed = self.ops.causal_conv_step(
            channels[:, 0], self.conv_weight, self.state.conv, group.slots
        )
        q, k, v = self._heads(mixed)
        return self.ops.gated_delta_step(
            q, k, v, g[:, 0], beta[:, 0], self.key_head, self.state.recurrent, group.slots
        )

    def _verify(self, channels: Tensor, g: Tensor, beta: Tensor, group: DecodeGroup) -> Tensor:
        """Q tokens a row; the state stays, `commit` puts the accepted ones into it."""
        mixed = self.ops.causal_conv_verify(
            channels, self.conv_weight, self.state.conv, group.slots
        )
        q, k, v = self._heads(mixed)
        self.uncommitted = Uncommitted(group, (channels, k, v, g, beta))
        out: Tensor = self.ops.gated_delta_verify(
            q, k, v, g, beta, self.key_head, self.state.recurrent, group.slots
        )
        return out.flatten(0, 1)

    def commit(self, counts: Tensor) -> None:
        """The first counts[b] tokens of row b of the step's draft group enter the state."""
        held, self.uncommitted = self.uncommitted, None
        if held is None:  # a rank without heads
            return
        slots, (channels, *inputs) = held.group.slots, held.inputs
        self.ops.window_commit_(channels, self.state.conv, slots, counts)
        self.ops.gated_delta_commit_(*inputs, self.key_head, self.state.recurrent, slots, counts)

    def _prefill(self, channels: Tensor, g: Tensor, beta: Tensor, slot: int) -> Tensor:
        window = self.state.conv[slot]
        mixed, new_window = self.ops.causal_conv_chunk(channels, self.conv_weight, window)
        window.copy_(new_window)
        q, k, v = self._heads(mixed)
        out, new_state = self.ops.gated_delta_chunk(
            q, k, v, g, beta, self.key_head, self.state.recurrent[slot]
        )
        self.state.recurrent[slot].copy_(new_state)
        return out
