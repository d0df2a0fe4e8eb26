"""Gated residual streams: read S streams into one block input, write a block output back.

Per token and without state. The two down projections share the normed streams, so they are one
matrix; the division by the number of streams is already inside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ops.reference.norm import grouped_rms_norm


def hyper_mix(
    streams: Tensor,  # [T, S, H]
    scale: Tensor,  # [S, H] fp32
    down_inject: Tensor,  # [rank + S, S * H], or [rank, S * H] where nothing is written back
    up: Tensor,  # [S * H, rank]
    eps: float,
    rank: int,
) -> tuple[Tensor, Tensor | None]:
    """Block input [T, H] and the weights [T, S] that `hyper_inject_` writes its output with."""
    tokens, count, hidden = streams.shape
    normed = grouped_rms_norm(streams, scale, eps)
    projected = linear(normed.reshape(tokens, count * hidden), down_inject)
    weight = torch.sigmoid(linear(silu(projected[:, :rank]), up)).view(tokens, count, hidden)
    mixed = (weight * normed).sum(dim=1, dtype=torch.float32) / count
    inject = None
    if down_inject.shape[0] > rank:
        inject = 2 * torch.sigmoid(projected[:, rank:])
    return mixed.to(streams.dtype), inject


def hyper_inject_(streams: Tensor, inject: Tensor, y: Tensor) -> Tensor:
    """streams [T, S, H] += inject [T, S] times y [T, H], in place; returns streams."""
    return streams.addcmul_(inject[:, :, None], y[:, None, :])
