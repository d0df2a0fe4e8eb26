"""The dense projection: a weight that every token goes through."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times the transpose of weight [N, K] -> [..., N], in the dtype of both."""
    return torch.nn.functional.linear(x, weight)
