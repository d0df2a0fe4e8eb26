"""Top-k with ties to the lowest index, the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_top_k(
    scores: Tensor, k: int, valid: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Indices [..., k] of the largest scores [..., N] fp32 >= 0, and which of them are valid.

    The bits of a non-negative fp32 order as an integer, so bits and inverted index make one key
    without ties. Entries outside `valid` (bool, broadcastable) come last, whatever they hold;
    NaN scores may come anywhere, but never as an index out of range.
    """
    size = scores.shape[-1]
    order = torch.arange(size - 1, -1, -1, dtype=torch.int64, device=scores.device)
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    key = (bits << 32) | order
    if valid is not None:
        key = key.masked_fill(~valid, -1)
    best = torch.topk(key, k, dim=-1)
    return best.indices, None if valid is None else best.values >= 0
