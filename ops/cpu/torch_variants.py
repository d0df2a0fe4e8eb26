"""Operators of a decode step for CPU in fp32: the reference's results in fewer, cheaper calls.

At a handful of tokens a step the cost is the number of calls, not arithmetic (a small call takes
1-5 microseconds, advanced indexing of weights 60 and more). Same meaning as `ops/reference`, in
another order of floating-point sums; larger inputs go to the reference.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu, softplus

from ops.reference import conv, moe, rope, sampling

_L2_EPS = 1e-6
_GROUPED_MULTIPLE = 4  # grouped_mm wants rows of whole 16 bytes
_ONE_TOKEN_ROUTES = 32  # gathering the weights of so many routes beats sorting them


@functools.cache
def _constant(value: float) -> Tensor:
    """A 0-dim tensor: a Python number would be converted in every call."""
    return torch.tensor(value)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean square + eps) over the last dimension, kept."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


@functools.cache
def inverse_frequency(rotary_dim: int, theta: float) -> Tensor:
    """As in the reference, and only once: [rotary_dim / 2] fp32."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32)
    return 1.0 / (theta ** (exponent / rotary_dim))


def rope_tables(
    positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    angles = positions.float().unsqueeze(-1) * inverse_frequency(rotary_dim, theta)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def index_keys(
    raw: Tensor, scale: Tensor, eps: float, first_positions: Tensor, rotary_dim: int, theta: float
) -> Tensor:
    normed = rms_norm(raw.mean(dim=1), scale, eps)
    tables = rope_tables(first_positions, rotary_dim, theta, raw.dtype)
    return rope.apply_rope(normed.unsqueeze(1), *tables).squeeze(1)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return torch.mul(x, _inverse_rms(x, eps)).mul_(scale)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    act = torch.sigmoid(gate) if activation == "sigmoid" else silu(gate)
    return torch.mul(x, _inverse_rms(x, eps)).mul_(weight).mul_(act)


def hyper_mix(
    streams: Tensor, scale: Tensor, down_inject: Tensor, up: Tensor, eps: float, rank: int
) -> tuple[Tensor, Tensor | None]:
    tokens, num_streams, hidden = streams.shape
    normed = torch.mul(streams, _inverse_rms(streams, eps)).mul_(scale)
    projected = linear(normed.flatten(1), down_inject)
    mix = linear(silu(projected[:, :rank]), up).sigmoid_()
    mixed = (
        mix.view(tokens, num_streams, hidden)
        .mul_(normed)
        .sum(dim=1)
        .mul_(_constant(1.0 / num_streams))
    )
    if projected.shape[1] == rank:
        return mixed, None
    return mixed, projected[:, rank:].sigmoid().mul_(_constant(2.0))


def hyper_inject_(streams: Tensor, inject: Tensor, y: Tensor) -> Tensor:
    return streams.addcmul_(inject.unsqueeze(-1), y.unsqueeze(1))


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return softplus(a + dt_bias).mul_(a_log.exp().neg_()), torch.sigmoid(b)


def causal_conv_step(
    x: Tensor, weight: Tensor, windows: Tensor, slots: Tensor, dilation: int = 1
) -> Tensor:
    inputs = torch.cat((windows.index_select(0, slots), x.unsqueeze(1)), dim=1)  # [B, W + 1, C]
    windows.index_copy_(0, slots, inputs[:, 1:])
    taps = inputs if dilation == 1 else inputs[:, ::dilation]
    return silu(torch.mul(taps, weight.t()).sum(dim=1))


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    key_head: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    batch, heads, width = v.shape
    key_dim = q.shape[-1]
    both = torch.stack((k, q))  # [2, B, Hk, dk]
    norm = torch.linalg.vector_norm(both, dim=-1, keepdim=True)
    both.mul_(torch.addcmul(_constant(_L2_EPS), norm, norm).rsqrt_())
    both = both.index_select(2, key_head)
    key, query = both.view(2, batch * heads, 1, key_dim).unbind(0)
    state = states.index_select(0, slots).mul_(g.exp()[..., None, None])
    state = state.view(batch * heads, key_dim, width)
    read = torch.bmm(key, state)
    delta = torch.sub(v.reshape(batch * heads, 1, width), read).mul_(beta.view(-1, 1, 1))
    state.baddbmm_(key.transpose(1, 2), delta)
    states.index_copy_(0, slots, state.view(batch, heads, key_dim, width))
    out = torch.bmm(query, state).mul_(_constant(key_dim**-0.5))
    return out.view(batch, heads, width)


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    ordered, ids = torch.sort(logits.softmax(dim=-1), dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids[:, :top_k].contiguous()


def moe_experts(x: Tensor, weights: Tensor, local: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    owned = gate_up.shape[0]
    if owned == 0 or x.shape[0] == 0:
        return torch.zeros_like(x)
    if x.shape[1] % _GROUPED_MULTIPLE or down.shape[2] % _GROUPED_MULTIPLE:
        return moe.moe_experts(x, weights, local, gate_up, down)
    if local.numel() <= _ONE_TOKEN_ROUTES and x.shape[0] == 1:
        return _one_token(x, weights, local.flatten(), gate_up, down)
    weights = weights.masked_fill(local < 0, 0)
    return _grouped(x, weights, local.flatten(), gate_up, down)


def _one_token(x: Tensor, weights: Tensor, local: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One token: its experts one by one, in place of a copy of their weights."""
    row = x[0]
    out = torch.zeros_like(row)
    for expert, weight in zip(local.tolist(), weights[0].unbind(), strict=True):
        if expert >= 0:
            gate, up = torch.mv(gate_up[expert], row).chunk(2)
            out.addmv_(down[expert], silu(gate).mul_(up).mul_(weight))
    return out.unsqueeze(0)


def _grouped(x: Tensor, weights: Tensor, local: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Routes sorted by expert, one product a segment inside `grouped_mm`; peers' routes last."""
    tokens, top_k, owned = x.shape[0], weights.shape[1], gate_up.shape[0]
    key = torch.where(local < 0, owned, local)
    order = key.argsort(stable=True)
    ends = torch.bincount(key, minlength=owned + 1).cumsum(0)[:owned].to(torch.int32)
    rows = x.index_select(0, order // top_k)
    gate, up = grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    hidden = silu(gate) * up
    out = grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    routed = out.index_select(0, back).view(tokens, top_k, -1)
    # Rows past the last segment were never written: masked, not multiplied by zero.
    routed = routed.masked_fill((local.view(tokens, top_k, 1) < 0), 0)
    return torch.bmm(weights.unsqueeze(1), routed).squeeze(1)


def nonfinite_rows(logits: Tensor) -> Tensor:
    if logits.shape[1] == 0:
        return sampling.nonfinite_rows(logits)
    low, high = torch.aminmax(logits, dim=-1)  # a NaN anywhere is both
    return ~(torch.isfinite(low) & torch.isfinite(high))


def causal_conv_chunk(
    x: Tensor, weight: Tensor, window: Tensor, dilation: int = 1
) -> tuple[Tensor, Tensor]:
    if x.shape[0] < 8:
        return conv.causal_conv_chunk(x, weight, window, dilation)
    inputs = torch.cat((window, x), dim=0)
    y = torch.mul(inputs[: x.shape[0]], weight[:, 0])
    for tap in range(1, weight.shape[1]):
        start = tap * dilation
        y.addcmul_(inputs[start : start + x.shape[0]], weight[:, tap])
    return silu(y), inputs[x.shape[0] :]


OPERATORS = (
    rope_tables,
    index_keys,
    rms_norm,
    gated_rms_norm,
    hyper_mix,
    hyper_inject_,
    delta_gates,
    causal_conv_step,
    causal_conv_chunk,
    gated_delta_step,
    route,
    moe_experts,
    nonfinite_rows,
)
