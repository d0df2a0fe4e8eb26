"""Rotary position embedding over the first dimensions of a head (rotate-half layout).

For text the three position rows of multimodal RoPE are equal and it reduces to this form.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(
    positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [..., rotary_dim] of positions [...] int64: angles in fp32, then cast to dtype.

    Frequency i is theta ** (-2i / rotary_dim); both halves of the last dimension are equal.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device)
    inverse_frequency = 1.0 / (theta ** (exponent / rotary_dim))
    angles = positions[..., None].float() * inverse_frequency
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, d] by cos, sin [..., rotary_dim]; dimensions past it stay."""
    rotary_dim = cos.shape[-1]
    turned, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    turned = turned * cos.unsqueeze(-2) + swapped * sin.unsqueeze(-2)
    return torch.cat((turned, kept), dim=-1)
