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
    """Physical bytes of a part of `tensor`; `item_bytes` is the width of the run's weight dtype.

    A low-bit format keeps its packing. A plain one is held in the run's dtype like a tensor
    without a format.
    """
    if not prod(local_shape):
        return TensorBytes(0, 0)
    form = tensor.format
    if form is None or form.is_plain:
        width = _item_bytes(tensor.dtype, item_bytes)
        padded = _padded(tensor, local_shape, width, profile)
        return TensorBytes(rounded(prod(padded) * width, profile), 0)
    padded = _padded(tensor, local_shape, form.bits / 8, profile)
    scales = tensor.scale_bytes(local_shape)
    payload = rounded(tensor.payload_bytes(padded), profile)
    return TensorBytes(payload, rounded(scales, profile))


def rounded(nbytes: int, profile: ChipProfile) -> int:
    """Up to whole units of the allocator."""
    unit = profile.allocation_bytes
    return -(-nbytes // unit) * unit


def is_lookup(tensor: TensorSpec) -> bool:
    return tensor.role.endswith(LOOKUP_ROLES)


def _item_bytes(rule: DTypeRule, item_bytes: int) -> int:
    if rule is DTypeRule.INT64:
        return INT64_BYTES
    return FLOAT32_BYTES if rule is DTypeRule.FLOAT32 else item_bytes


def _padded(
    tensor: TensorSpec, shape: tuple[int, ...], width: float, profile: ChipProfile
) -> tuple[int, ...]:
    """The last two sizes at whole tiles (FRACTAL_NZ): 100 x 200 in fp16 takes 112 x 208.

    Only operands of matrix products lie in tiles. Ascend refuses the layout for a size of 1, and
    types of 4 bytes or below 1 byte stay in rows.
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
