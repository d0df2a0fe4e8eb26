"""What a loader does to packed weights as they come: bit orders of writers, FP8 to integers.

Everything is done in the memory that holds the weights, one matrix after the other, so that a
bank of experts never exists twice, and never in a wider type.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ops.lowbit.pack import zeros_of_words
from ops.lowbit.packed import Packed, spread
from placement.formats import Code

INT8_MAX = 127


def codes_of_words(words: Tensor) -> Tensor:
    """I32 words of codes + 8 [..., K / 8] as signed nibbles [..., K / 2], in their own memory."""
    codes = words.view(torch.uint8)
    for one in codes.flatten(0, -2).split(1 << 16):
        one ^= 0x88
    return codes


def zeros_of_bank(words: Tensor, rows: int, stacked: int) -> Tensor:
    """int8 [..., rows, G] of I32 words [..., W, G], eight rows a word, `stacked` matrices each."""
    parts = words.unflatten(-2, (stacked, words.shape[-2] // stacked)).flatten(0, -3)
    zeros = [zeros_of_words(part, rows // stacked) for part in parts]
    shape = (*words.shape[:-2], rows, words.shape[-1])
    return torch.stack(zeros).view(shape) if zeros else words.new_zeros(shape, dtype=torch.int8)


def without_fp8(packed: Packed) -> Packed:
    """FP8 codes as 8-bit integers under the same blocks of scales; others as they are.

    The largest value of a block becomes 127, in a scale of the type that it had. FP8 keeps 3 bits
    behind the first of each value, an integer a step of 1/127 of the block's largest: at most
    0.4 % of that are lost. ValueError for a code that is NaN.
    """
    if packed.form.code is not Code.E4M3:
        return packed
    whole = replace(packed.form, code=Code.INTEGER)
    bank = packed.codes.dim() > 2
    for one in [packed[i] for i in range(len(packed))] if bank else [packed]:
        _to_int8(one)
    return replace(packed, form=whole, codes=packed.codes.view(torch.int8))


def _to_int8(packed: Packed) -> None:
    values = packed.codes.view(torch.float8_e4m3fn).float()
    largest = _block_largest(values.abs(), packed)
    if largest.isnan().any():
        raise ValueError("holds a code that is no number")
    old = packed.scale.float()
    new = torch.where(largest > 0, old * largest / INT8_MAX, old).to(packed.scale.dtype)
    ratio = old / new.float()
    integers = values.mul_(spread(ratio, packed)).round_().clamp_(-INT8_MAX, INT8_MAX)
    packed.codes.view(torch.int8).copy_(integers)
    packed.scale.copy_(new)


def _block_largest(sizes: Tensor, packed: Packed) -> Tensor:
    """[R, G]: the largest of sizes [N, K] in each block of scales."""
    rows, columns = packed.shape
    part = rows // packed.stacked
    down, across = packed.form.block_rows or part, packed.form.group or columns
    found = []
    for half in sizes.split(part):
        bands = [band.amax(dim=0) for band in half.split(down)]
        found += [torch.stack([p.amax() for p in band.split(across)]) for band in bands]
    return torch.stack(found)


def has_nan_codes(codes: Tensor) -> bool:
    """Whether FP8 e4m3 codes hold 0x7F or 0xFF; makes no copy of them."""
    if not codes.numel():
        return False
    return (
        codes.view(torch.int8).max().item() == 0x7F or codes.view(torch.uint8).max().item() == 0xFF
    )


def e4m3_table(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[256]: the value of each FP8 code under one scale, in `dtype`."""
    codes = torch.arange(256, dtype=torch.uint8, device=scale.device).view(torch.float8_e4m3fn)
    return (codes.float() * scale.float()).to(dtype)
