"""Bytes that a rank's part of a tensor takes in a chip's memory: format, tiles, allocation unit.

Knows shapes and a chip profile; no ledger, no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from placement.spec import Axis, Component, DTypeRule, TensorSpec
from placement.topology import ChipProfile

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT32_BYTES = 4
INT64_BYTES = 8
TILE_ROWS = 16
TILE_ROW_BYTES = 32  # 16 values of 16 bits or 32 of 8 bits
# Looked up by row, never an operand of a matrix product.
LOOKUP_ROLES = ("embed", "ngram.table")


@dataclass(frozen=True)
class TensorBytes:
    """Codes or values, and the scales that belong to them."""

    payload: int
    scales: int


def tensor_bytes(
    tensor: TensorSpec, local_shape: tuple[int, ...], item_bytes: int, profile: ChipProfile
) -> TensorBytes:
    """Bytes of a part of `tensor` alone in a chip's tiles; `item_bytes` is the run's weight width.

    A low-bit format keeps its packing; a plain one is held in the run's dtype like a tensor
    without a format.
    """
    if not prod(local_shape):
        return TensorBytes(0, 0)
    if not is_packed(tensor):
        width = value_bytes(tensor, item_bytes)
        return TensorBytes(prod(tiled_shape(tensor, local_shape, width, profile)) * width, 0)
    assert tensor.format is not None
    tiled = tiled_shape(tensor, local_shape, tensor.format.bits / 8, profile)
    return TensorBytes(tensor.payload_bytes(tiled), tensor.scale_bytes(local_shape))


def rounded(nbytes: int, profile: ChipProfile) -> int:
    """Up to whole units of the allocator."""
    return _up(nbytes, profile.allocation_bytes)


def block_bytes(nbytes: int, profile: ChipProfile) -> int:
    """What the allocator takes for a tensor: it adds a few bytes of its own and rounds up."""
    return rounded(nbytes + profile.allocation_extra_bytes, profile) if nbytes else 0


def is_lookup(tensor: TensorSpec) -> bool:
    return tensor.role.endswith(LOOKUP_ROLES)


def is_packed(tensor: TensorSpec) -> bool:
    """True where codes and scales stand for the values."""
    return tensor.format is not None and not tensor.format.is_plain


def value_bytes(tensor: TensorSpec, item_bytes: int) -> int:
    """Width of one value of a tensor that is not packed."""
    if tensor.dtype is DTypeRule.INT64:
        return INT64_BYTES
    return FLOAT32_BYTES if tensor.dtype is DTypeRule.FLOAT32 else item_bytes


def tiled_shape(
    tensor: TensorSpec, shape: tuple[int, ...], width: float, profile: ChipProfile
) -> tuple[int, ...]:
    """The last two sizes at whole tiles (FRACTAL_NZ): 100 x 200 in fp16 takes 112 x 208.

    `shape` may be that of several matrices in one, `tensor` is any of them, and `width` the bytes
    of a value. Only operands of matrix products lie in tiles. Ascend refuses the layout for a size
    of 1, and types of 4 bytes or below 1 byte stay in rows.
    """
    if not (profile.fractal_layout and tensor.dtype is DTypeRule.WEIGHT and width in (1, 2)):
        return shape
    lookup = is_lookup(tensor) or tensor.component is Component.NGRAM_TABLE
    if lookup or len(shape) < 2 or 1 in shape[-2:] or _is_convolution(tensor):
        return shape
    rows, columns = shape[-2:]
    across = TILE_ROW_BYTES // int(width)
    return (*shape[:-2], _up(rows, TILE_ROWS), _up(columns, across))


def _is_convolution(tensor: TensorSpec) -> bool:
    """[channels, 1, kernel]: of the tensors with three sizes only expert banks are matrices."""
    axes = {segment.axis for segment in tensor.split.segments}
    return len(tensor.shape) == 3 and Axis.EXPERTS not in axes


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
