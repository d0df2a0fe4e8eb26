"""A low-bit matrix, or a bank of them, as it lies in memory, and the values that it stands for.

One form for all writers: codes along the columns, the first value of a byte in its lowest bits,
integers in two's complement. Owns the meaning of codes, scales and zero points; knows no file and
no tensor name. Sources: the compressed-tensors, ModelOpt and OCP MX format descriptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from placement.formats import Code, WeightFormat

E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Packed:
    """Matrices [..., N, K] of `form`: value = (code - zero) * scale * whole.

    `stacked` matrices that were stored apart (gate, up) lie above each other in the N rows, each
    with its own blocks of scales. A scale stands for `form.block_rows` rows (0: all) and
    `form.group` columns (0: all). `views` is what a backend made of it.
    """

    form: WeightFormat
    shape: tuple[int, ...]
    codes: Tensor  # [..., N, K * bits / 8]: uint8, int8 (8-bit integers) or float8_e4m3fn
    scale: Tensor  # [..., R, G] in any float type, float8_e4m3fn and float8_e8m0fnu included
    zero: Tensor | None = None  # [..., R, G], int8 or float
    whole: Tensor | None = None  # [..., stacked] fp32
    stacked: int = 1
    views: dict[str, Any] = field(default_factory=dict, compare=False, repr=False, init=False)

    def __getitem__(self, index: int) -> Packed:
        """One matrix of a bank; shares its memory."""
        return replace(
            self, shape=self.shape[1:], codes=self.codes[index], scale=self.scale[index],
            zero=None if self.zero is None else self.zero[index],
            whole=None if self.whole is None else self.whole[index],
        )  # fmt: skip

    def select(self, index: Tensor) -> Packed:
        """The matrix of a bank at `index` [1], copied; the index isn't read on the host."""
        return replace(
            self, shape=self.shape[1:], codes=_selected(self.codes, index),
            scale=_selected(self.scale, index),
            zero=None if self.zero is None else self.zero.index_select(0, index)[0],
            whole=None if self.whole is None else self.whole.index_select(0, index)[0],
        )  # fmt: skip

    def __len__(self) -> int:
        return self.shape[0]

    def to(self, device: torch.device | str) -> Packed:
        return replace(
            self, codes=self.codes.to(device), scale=self.scale.to(device),
            zero=None if self.zero is None else self.zero.to(device),
            whole=None if self.whole is None else self.whole.to(device),
        )  # fmt: skip

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        optional = (self.zero, self.whole)
        return (self.codes, self.scale, *(one for one in optional if one is not None))

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors)


def _selected(tensor: Tensor, index: Tensor) -> Tensor:
    """One of a bank, whatever its type: not all operators know 8-bit floats."""
    if tensor.element_size() > 1:
        return tensor.index_select(0, index)[0]
    return tensor.view(torch.uint8).index_select(0, index)[0].view(tensor.dtype)


def dequantised(packed: Packed) -> Tensor:
    """fp32 [N, K] of one matrix."""
    rows, columns = packed.shape
    values = code_values(packed)
    if packed.zero is not None:
        values = values - spread(packed.zero.float(), packed)
    return values.mul_(spread(whole_scales(packed), packed)).view(rows, columns)


def whole_scales(packed: Packed) -> Tensor:
    """fp32 [R, G]: scales times the one that a stored matrix has."""
    scale = packed.scale.float()
    if packed.whole is None:
        return scale
    each = packed.whole.repeat_interleave(scale.shape[0] // packed.stacked)
    return scale * each[:, None]


def spread(scale: Tensor, packed: Packed) -> Tensor:
    """[N, K] out of one number a block [R, G]; what the last block of a side lacks is cut off."""
    rows, columns = packed.shape
    group, part = packed.form.group or max(columns, 1), rows // packed.stacked
    block_rows = packed.form.block_rows or max(part, 1)
    scale = scale.repeat_interleave(group, dim=1)[:, :columns]
    if block_rows == 1:
        return scale
    parts = scale.unflatten(0, (packed.stacked, ceil(part / block_rows) if part else 0))
    return parts.repeat_interleave(block_rows, dim=1)[:, :part].flatten(0, 1)


def code_values(packed: Packed) -> Tensor:
    """fp32 [N, K]: the codes as numbers, without scale and zero point."""
    form = packed.form
    if form.code is Code.E4M3:
        return packed.codes.view(torch.float8_e4m3fn).float()
    if form.bits == 8:
        return packed.codes.view(torch.int8).float()
    codes = split_codes(packed.codes, form.bits)
    if form.code is Code.E2M1:
        levels = torch.tensor(E2M1_LEVELS, device=codes.device)
        return torch.cat((levels, -levels)).index_select(0, codes.flatten().int()).view(codes.shape)
    half = 1 << (form.bits - 1)
    return (codes ^ half).float() - half


def split_codes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] -> uint8 [..., n * 8 / bits] in 0..2^bits - 1, lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def join_codes(codes: Tensor, bits: int) -> Tensor:
    """The inverse for integers of any type, of which the lowest `bits` bits count."""
    count = 8 // bits
    if codes.shape[-1] % count:
        raise ValueError(f"{codes.shape[-1]} columns of {bits} bits don't fill whole bytes")
    parts = (codes.to(torch.uint8) & (1 << bits) - 1).unflatten(-1, (-1, count))
    joined = parts[..., 0].clone()
    for index in range(1, count):
        joined |= parts[..., index] << bits * index
    return joined
