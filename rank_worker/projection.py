"""One product for rows that several stored matrices hold, some of them low-bit.

Mixers ask for one projection of all that they make out of an input. Neighbours of one kind become
one matrix; what is packed stays packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ops.lowbit.packed import Packed
from rank_worker.parts import Parts
from rank_worker.weights import Weight


class Projection:
    """x [..., K] -> [..., N], the rows of `weights` one below the other, in their order."""

    def __init__(self, parts: Parts, weights: Sequence[Weight]) -> None:
        self.ops, self.int8_activations = parts.ops, parts.int8_activations
        self.weights: list[Weight] = []
        for _, group in groupby(weights, _kind):
            run = list(group)
            if isinstance(run[0], Packed):
                self.weights += _joined([one for one in run if isinstance(one, Packed)])
            else:
                rows = [one for one in run if isinstance(one, Tensor)]
                whole = torch.cat(rows) if len(rows) > 1 else rows[0]
                self.weights.append(parts.device.pack_linear(whole))

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.weights) == 1:
            return self._product(x, self.weights[0])
        return torch.cat([self._product(x, weight) for weight in self.weights], dim=-1)

    def _product(self, x: Tensor, weight: Weight) -> Tensor:
        if isinstance(weight, Packed):
            packed: Tensor = self.ops.packed_linear(x, weight, self.int8_activations)
            return packed
        plain: Tensor = self.ops.linear(x, weight)
        return plain


def _kind(weight: Weight) -> Any:
    """Equal for matrices that can lie above each other in one."""
    if not isinstance(weight, Packed):
        return None
    return (weight.form, weight.scale.dtype, None if weight.zero is None else weight.zero.dtype)


def _joined(run: list[Packed]) -> list[Packed]:
    """One matrix of neighbours whose scales don't reach over several rows."""
    first = run[0]
    if len(run) == 1 or first.form.block_rows != 1 or first.whole is not None:
        return run
    zeros = [one.zero for one in run if one.zero is not None]
    shape = (sum(one.shape[0] for one in run), first.shape[1])
    codes, scale = (torch.cat([getattr(one, n) for one in run]) for n in ("codes", "scale"))
    zero = torch.cat(zeros) if zeros else None
    return [replace(first, shape=shape, codes=codes, scale=scale, zero=zero)]
