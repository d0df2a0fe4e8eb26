"""What the kernels demand of a tensor's layout, asked in one look at its strides."""

from __future__ import annotations

from torch import Tensor

FEW_ROWS = 32  # of a decode step; above it, matrix products of all rows at once are faster


def row_stride(x: Tensor) -> int:
    """Elements between rows of x [N, ...] whose rows are contiguous; 0 when they are not."""
    first, *inner = x.stride()
    if inner == [1] or (len(inner) == 2 and inner == [x.shape[2], 1]):
        return first
    return first if x.shape[0] and x[0].is_contiguous() else 0


def token_stride(x: Tensor) -> int:
    """Elements between tokens of x [B, Q, ...], each contiguous, all evenly apart; else 0."""
    rows, tokens, *inner = x.stride()
    if rows != tokens * x.shape[1] and x.shape[0] > 1:
        return 0
    is_tight = inner == [1] or (len(inner) == 2 and inner == [x.shape[3], 1])
    return tokens if is_tight else 0


def is_packed(weight: Tensor) -> bool:
    """A column-major weight [out, in], or a bank [experts, out, in] of them, without gaps."""
    strides = weight.stride()
    if len(strides) == 2:
        return strides == (1, weight.shape[0])
    _, rows, columns = weight.shape
    return strides == (rows * columns, 1, rows)
