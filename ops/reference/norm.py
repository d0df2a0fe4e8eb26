"""RMS normalisation in its three forms; statistics are always taken in fp32.

Knows nothing of layers: a caller passes the scale that its checkpoint implies (see `unit_offset`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def unit_offset(weight: Tensor) -> Tensor:
    """Scale of a norm whose weight is stored centred on zero: 1 + w, in fp32."""
    return 1.0 + weight.float()


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in fp32."""
    values = x.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., d] divided by its RMS and multiplied by scale [d] in fp32; dtype of x."""
    return (_unit_rms(x, eps) * scale).to(x.dtype)


def grouped_rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., S, H] normalised over H within each of S groups, times scale [S, H]; dtype of x."""
    return (_unit_rms(x, eps) * scale).to(x.dtype)


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "sigmoid":
        return torch.sigmoid(gate)
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    raise ValueError(f"gate activation {activation!r} is unknown: use 'sigmoid' or 'silu'")


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    """Norm of x [..., d] times weight [d] (plain, not offset) times act(gate [..., d]).

    The normed value is rounded to the dtype of x before the fp32 weight and gate are applied, as
    the models were trained; "sigmoid" and "silu" are the activations in use.
    """
    normed = _unit_rms(x, eps).to(x.dtype)
    return (normed * weight.float() * _activate(gate.float(), activation)).to(x.dtype)
