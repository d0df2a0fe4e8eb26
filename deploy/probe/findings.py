"""What the probe flags, and from which size on.

Bounds are on |got - expected| / |expected| of one block, whose input is the gang's own, so errors
don't add up over layers. Worst error of a part where nothing was wrong, 1 to 3 ranks, embedded
model and random ones of 12 and of 48 value heads, 63 tokens (embedded at 1 and 2 ranks also 600):
float32 1.4e-6, float16 0.0017, bfloat16 0.015. Loudest expert over the median: embedded 1.43,
random 1.97. Growth of the residual in a layer behind the first: embedded 1.4, random 1.7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """Of one dtype. `error` of a block, `routes` of tokens that choose other experts."""

    error: float
    routes: float


BOUNDS = {
    "float32": Bounds(1e-4, 0.01),
    "float16": Bounds(0.02, 0.1),
    "bfloat16": Bounds(0.1, 0.25),
}
EXPERT_GAIN = 4.0
GROWTH = 4.0
FLOAT16_MAX = 65504.0
EXPLAINED = 0.9  # of an error's energy that one cause has to explain to be named


@dataclass(frozen=True)
class Finding:
    """Something wrong. `layer` -1: behind the layers; `rank` -1: of no rank in particular."""

    kind: str
    layer: int
    rank: int
    text: str

    def line(self) -> str:
        layer = f"layer {self.layer}" if self.layer >= 0 else "head"
        return f"{layer}{f', rank {self.rank}' if self.rank >= 0 else ''}: {self.text}"


@dataclass(frozen=True)
class Deviation:
    """How far a tensor is from what it should be."""

    error: float  # |got - expected| / |expected|
    cosine: float

    @classmethod
    def of(cls, got: Tensor, expected: Tensor) -> Deviation:
        """Of tensors of one shape; not finite where either isn't."""
        a, b = got.double().flatten(), expected.double().flatten()
        norm, product = b.norm().item(), (a.norm() * b.norm()).item()
        distance = (a - b).norm().item()
        if norm == 0:
            return cls(0.0 if distance == 0 else float("inf"), 1.0 if distance == 0 else 0.0)
        return cls(distance / norm, torch.dot(a, b).item() / product if product else 0.0)

    def exceeds(self, bound: float) -> bool:
        """Also where it can't be told (not a number)."""
        return not self.error <= bound

    def __str__(self) -> str:
        return f"error {self.error:.2g}, cosine {self.cosine:.4f}"
