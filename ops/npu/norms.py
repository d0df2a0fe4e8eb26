"""RMS norms on npu_rms_norm, and what is built of them: index keys and the stream mix.

Statistics are taken in fp32 inside the operator. The scale is rounded to the type of x, as the
operator wants both alike; a relative 2^-11 in fp16, the size of the result's own rounding.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ops.npu import library
from ops.npu.rope import apply_rope
from ops.reference.rope import rope_tables


@functools.cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scale of a plain norm; made once, so that no step and no capture allocates it."""
    return torch.ones(size, dtype=dtype, device=device)


def _plain(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in the type of x."""
    ones = _ones(x.shape[-1], x.dtype, x.device)
    normed: Tensor = library.library().npu_rms_norm(x, ones, eps)[0]
    return normed


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    normed: Tensor = library.library().npu_rms_norm(x, scale.to(x.dtype), eps)[0]
    return normed


def grouped_rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return _plain(x, eps).mul_(scale)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    act = torch.sigmoid(gate.float()) if activation == "sigmoid" else silu(gate.float())
    return (_plain(x, eps) * weight * act).to(x.dtype)


def index_keys(
    raw: Tensor, scale: Tensor, eps: float, first_positions: Tensor, rotary_dim: int, theta: float
) -> Tensor:
    pooled = raw.float().mean(dim=1).to(raw.dtype)
    tables = rope_tables(first_positions, rotary_dim, theta, raw.dtype)
    return apply_rope(rms_norm(pooled, scale, eps)[:, None, :], *tables)[:, 0]


def hyper_mix(
    streams: Tensor, scale: Tensor, down_inject: Tensor, up: Tensor, eps: float, rank: int
) -> tuple[Tensor, Tensor | None]:
    tokens, count, hidden = streams.shape
    normed = grouped_rms_norm(streams, scale, eps)
    projected = linear(normed.view(tokens, count * hidden), down_inject)
    weight = torch.sigmoid(linear(silu(projected[:, :rank]), up)).view(tokens, count, hidden)
    mixed = weight.mul_(normed).sum(dim=1, dtype=torch.float32).mul_(1.0 / count)
    inject = None
    if down_inject.shape[0] > rank:
        inject = torch.sigmoid(projected[:, rank:]).mul_(2)
    return mixed.to(streams.dtype), inject


OPERATORS = (rms_norm, grouped_rms_norm, gated_rms_norm, index_keys, hyper_mix)
