"""Values to a low-bit format by rounding to nearest, and the tensors that a checkpoint stores.

No clipping: the largest value of a block keeps its place (clipped 2-bit weights made residuals
overflow). Scales are rounded to their stored type first, so that codes fit what a reader sees.
Owns what writers call their tensors and how they order bits; the loader's inverse of it is
`ops/lowbit/unpack.py`.

Use: `packed = quantise(values, formats.W4G128)`, then `stored(base, packed, Writer.COMPRESSED)`
gives name -> tensor for a safetensors file. A scale of 0 or NaN is never written.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil

import torch
from torch import Tensor

from ops.lowbit.packed import E2M1_LEVELS, Packed, join_codes, split_codes, spread, whole_scales
from placement.formats import Code, WeightFormat

E4M3_MAX, E4M3_LEAST = 448.0, 2.0**-9
E2M1_MAX = E2M1_LEVELS[-1]
WORD_CODES = 8  # 4-bit codes of an I32 word


class Writer(StrEnum):
    """Whose names and bit order a checkpoint has."""

    COMPRESSED = "compressed-tensors"  # all but the blocked formats
    BLOCKS = "blocks"  # FP8 in blocks of 128 x 128, `weight_scale_inv`
    MODELOPT = "modelopt"  # NVFP4, `weight_scale_2`
    NIBBLES = "nibbles"  # signed nibbles in I8 with an I8 offset a group
    CODES = "codes"  # `_codes` and `_scale`, 32 x 32 blocks


def quantise(
    values: Tensor, form: WeightFormat, scale_dtype: torch.dtype | None = None,
    largest: float | None = None,
) -> Packed:  # fmt: skip
    """Packed matrices of `values` [..., N, K] in any float type.

    `scale_dtype` None: fp32 or fp16 by the width that `form` says. `largest`: size of the largest
    value of the matrix that `values` are rows of, where one scale stands for all of it. ValueError
    for values that aren't finite, and for K that isn't whole groups of a format below 8 bits.
    """
    if not torch.isfinite(values).all():
        raise ValueError("values to quantise aren't finite")
    if form.bits < 8 and values.shape[-1] % (form.group or 1):
        raise ValueError(f"{values.shape[-1]} columns aren't whole groups of {form.group}")
    if values.dim() > 2:
        return _bank([quantise(one, form, scale_dtype) for one in values])
    values = values.float()
    low, high = _block_ranges(values, form)
    scale, zero, whole = _scales(low, high, form, scale_dtype or _scale_dtype(form), largest)
    blank = Packed(form, tuple(values.shape), torch.empty(0), scale, zero, whole)
    exact = values / spread(whole_scales(blank), blank)
    offset = 0 if zero is None else spread(zero.float(), blank)
    codes = _codes(exact, offset, form)
    return Packed(form, tuple(values.shape), codes, scale, zero, whole)


def quantise_table(values: Tensor) -> tuple[Tensor, Tensor]:
    """An n-gram table [rows, width] as float8_e4m3fn under one fp32 scale [1]."""
    largest = values.abs().max().float() if values.numel() else torch.tensor(0.0)
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0).view(1)
    exact = (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return exact.to(torch.float8_e4m3fn), scale


def _bank(parts: list[Packed]) -> Packed:
    first = parts[0]
    zero = (
        None if first.zero is None else torch.stack([p.zero for p in parts if p.zero is not None])
    )
    whole = None
    if first.whole is not None:
        whole = torch.stack([p.whole for p in parts if p.whole is not None])
    return Packed(
        first.form, (len(parts), *first.shape), torch.stack([p.codes for p in parts]),
        torch.stack([p.scale for p in parts]), zero, whole,
    )  # fmt: skip


def _block_ranges(values: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Least and largest value [R, G] of each block, 0 always among them."""
    rows, columns = values.shape
    down, across = form.block_rows or rows, form.group or columns
    padded = values.new_zeros(ceil(rows / down) * down, ceil(columns / across) * across)
    padded[:rows, :columns] = values
    blocks = padded.view(padded.shape[0] // down, down, -1, across)
    return blocks.amin(dim=(1, 3)).clamp_max(0), blocks.amax(dim=(1, 3)).clamp_min(0)


def _scale_dtype(form: WeightFormat) -> torch.dtype:
    if form.scale_bytes == 1:
        return torch.float8_e4m3fn if form.tensor_bytes else torch.float8_e8m0fnu
    return torch.float16 if form.scale_bytes == 2 else torch.float32


def _scales(
    low: Tensor, high: Tensor, form: WeightFormat, dtype: torch.dtype, top: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scale, zero point and whole scale for blocks of values between `low` and `high`."""
    largest = torch.maximum(high, -low)
    if form.code is Code.E4M3:
        return _rounded(largest / E4M3_MAX, dtype), None, None
    if form.code is Code.E2M1:
        return _float4_scales(largest, form, dtype, top)
    least, most = -(1 << form.bits - 1), (1 << form.bits - 1) - 1
    if not form.zero_bytes:
        return _rounded(torch.maximum(high / most, low / least), dtype), None, None
    scale = _rounded((high - low) / (most - least), dtype)
    zero = (least - low / scale.float()).round().clamp(least, most)
    return scale, zero.to(torch.int8 if form.zero_bytes == 1 else torch.float32), None


def _float4_scales(
    largest: Tensor, form: WeightFormat, dtype: torch.dtype, top: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if not form.tensor_bytes:  # powers of two, rounded up so that nothing clips
        exponent = (largest / E2M1_MAX).log2().ceil().clamp(-126, 126)
        power = torch.where(largest > 0, exponent.exp2(), 1.0)
        return power.to(dtype), None, None
    if top is None:
        top = float(largest.max()) if largest.numel() else 0.0
    whole = torch.tensor([top / (E2M1_MAX * E4M3_MAX) or 1.0])
    exact = torch.where(largest > 0, (largest / E2M1_MAX / whole).clamp_min(E4M3_LEAST), 1.0)
    return exact.clamp_max(E4M3_MAX).to(dtype), None, whole


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In the stored type, 1 for a block of zeros, never 0 for another one."""
    least = torch.finfo(dtype).smallest_normal
    return torch.where(scale > 0, scale.clamp_min(least), 1.0).to(dtype)


def _codes(exact: Tensor, offset: Tensor | int, form: WeightFormat) -> Tensor:
    """Codes of values in units of their scale, joined to bytes."""
    if form.code is Code.E4M3:
        return exact.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    if form.code is Code.E2M1:
        levels = torch.tensor(E2M1_LEVELS)
        middles = (levels[1:] + levels[:-1]) / 2
        size = torch.bucketize(exact.abs(), middles)
        return join_codes(size + 8 * (exact < 0), 4)
    least, most = -(1 << form.bits - 1), (1 << form.bits - 1) - 1
    integers = (exact.round() + offset).clamp(least, most).to(torch.int8)
    return integers if form.bits == 8 else join_codes(integers, form.bits)


def stored(base: str, packed: Packed, writer: Writer) -> dict[str, Tensor]:
    """Name -> tensor of one matrix [N, K] as `writer` stores it; `base` is its name without
    `.weight`. ValueError for a format that the writer doesn't have.
    """
    form, name = packed.form, base + ".weight"
    if writer is Writer.CODES and form.block_rows == 32 and form.bits < 8:
        return {base + "_codes": packed.codes, base + "_scale": packed.scale}
    if writer is Writer.BLOCKS and form.code is Code.E4M3 and form.group == 128:
        return {name: packed.codes, name + "_scale_inv": packed.scale}
    if writer is Writer.MODELOPT and packed.whole is not None:
        one = packed.whole[0].clone()
        return {name: packed.codes, name + "_scale": packed.scale, name + "_scale_2": one}
    if writer is Writer.NIBBLES and form.bits == 4 and form.code is Code.INTEGER:
        named = {name: packed.codes.view(torch.int8), name + "_scale": packed.scale}
        return named if packed.zero is None else {**named, name + "_offset": packed.zero}
    if writer is Writer.COMPRESSED and form.block_rows in (0, 1, 128):
        return _compressed(name, packed)
    raise ValueError(f"{writer} doesn't store {form.name}")


def _compressed(name: str, packed: Packed) -> dict[str, Tensor]:
    scale = {name + "_scale": packed.scale}
    if packed.form.code is Code.E2M1:
        found = {name + "_packed": packed.codes, **scale}
        if packed.whole is not None:  # the reciprocal of the one that multiplies
            return {**found, name + "_global_scale": 1 / packed.whole}
        return {**found, name + "_scale": packed.scale.view(torch.uint8)}
    if packed.form.bits == 8:
        zero = {} if packed.zero is None else {name + "_zero_point": packed.zero}
        return {name: packed.codes, **scale, **zero}
    named = {
        name + "_packed": words_of(packed.codes),
        **scale,
        name + "_shape": torch.tensor(packed.shape),
    }
    if packed.zero is not None:
        named[name + "_zero_point"] = zero_words(packed.zero)
    return named


def words_of(nibbles: Tensor) -> Tensor:
    """Signed nibbles [N, K / 2] as I32 words [N, K / 8] of codes + 8."""
    if nibbles.shape[-1] % 4:
        raise ValueError(f"{nibbles.shape[-1] * 2} columns of 4 bits don't fill whole I32 words")
    return (nibbles ^ 0x88).contiguous().view(torch.int32)


def zero_words(zero: Tensor) -> Tensor:
    """Zero points [N, G] int8 as I32 words [ceil(N / 8), G], eight rows a word, each + 8."""
    rows, groups = zero.shape
    padded = zero.new_full((ceil(rows / WORD_CODES) * WORD_CODES, groups), -8)  # bits of 0
    padded[:rows] = zero
    return words_of(join_codes(padded.t().contiguous(), 4)).t().contiguous()


def zeros_of_words(words: Tensor, rows: int) -> Tensor:
    """The inverse: int8 [rows, G] of words [ceil(rows / 8), G]."""
    flat = words.t().flatten().contiguous().view(torch.uint8)
    nibbles = flat.view(words.shape[1], 4 * words.shape[0])  # [G, 4 * words]
    return (split_codes(nibbles, 4).to(torch.int8) - 8).t()[:rows].contiguous()
