"""Products with low-bit weights on a 310P: int8 rows as they are, others widened in parts.

No operator of the chip multiplies below 8 bits. With `int8_activations` products are those of
int8 matrices with a scale a row, which quantise each input row themselves; without, those of fp16.
Of a bank only the experts that a step's routes name are widened, at most WIDENED_BYTES of them at
once as of the rows of a dense layer, and nothing is read on the host. Codes are taken apart by
fp16 arithmetic, which is exact up to 2048 (torch_npu's `>>` does not broadcast); 8-bit floats and
bf16, which the chip lacks, are read through their bits.

Between int8 rows and a format with groups lies one more rounding, to 1/127 of the largest value
that a row can hold: at most a fourteenth of what 4 bits cost the loudest group of the row.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from math import lcm, prod

import torch
from torch import Tensor

from ops.lowbit.packed import E2M1_LEVELS, Packed
from ops.npu import library
from ops.npu.experts import combine, dispatch, grouped
from ops.reference.packed import rounded_rows
from placement.errors import ConfigError
from placement.formats import Code
from placement.topology import WIDENED_BYTES

TILE_WEIGHTS = 1 << 22  # that are taken apart at once
WHOLE = 16  # rows and columns of an int8 matrix are whole multiples of it
INT8_MAX = 127


def packed_linear(x: Tensor, weight: Packed, int8_activations: bool) -> Tensor:
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    if not rows.numel() or not weight.shape[0]:
        return x.new_zeros(*x.shape[:-1], weight.shape[0])
    whole = not (weight.shape[0] % WHOLE or columns % WHOLE)
    if int8_activations and whole and is_int8_rows(weight):
        codes, scale = _int8_bank(weight)
        out = library.library().npu_quant_matmul_dequant(rows, codes, scale)
        return out.view(*x.shape[:-1], -1)
    if int8_activations and not whole:
        rows = rounded_rows(rows, True).to(x.dtype)
    parts = [_dense(rows, part, int8_activations and whole) for part in _row_parts(weight)]
    out = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    return out.view(*x.shape[:-1], -1)


def _dense(rows: Tensor, part: Packed, is_int8: bool) -> Tensor:
    """`part` is a bank of one."""
    first = torch.zeros(1, dtype=torch.int64, device=rows.device)
    if not is_int8:
        return torch.nn.functional.linear(rows, widened(part, first)[0])
    codes, scale = widened_int8(part, first)
    out: Tensor = library.library().npu_quant_matmul_dequant(rows, codes[0], scale[0])
    return out


def _row_parts(weight: Packed) -> list[Packed]:
    """Banks of one matrix each, of as many rows as WIDENED_BYTES hold in fp16; they share memory.

    Rows that were stacked, and those under one scale for all, stay together.
    """
    if "npu rows" not in weight.views:
        rows, columns = weight.shape
        down = weight.form.block_rows
        unit = lcm(down, WHOLE)
        step = max(unit, WIDENED_BYTES // (2 * columns) // unit * unit) if unit else rows
        if weight.stacked > 1 or step >= rows:
            step = rows
        weight.views["npu rows"] = [
            _rows_of(weight, at, min(at + step, rows), down or rows) for at in range(0, rows, step)
        ]
    parts: list[Packed] = weight.views["npu rows"]
    return parts


def _rows_of(weight: Packed, start: int, stop: int, down: int) -> Packed:
    if stop - start == weight.shape[0]:
        blocks = slice(None)
    else:
        blocks = slice(start // down, -(-stop // down))
    return replace(
        weight, shape=(1, stop - start, weight.shape[1]), codes=weight.codes[None, start:stop],
        scale=weight.scale[None, blocks],
        zero=None if weight.zero is None else weight.zero[None, blocks],
        whole=None if weight.whole is None else weight.whole[None],
    )  # fmt: skip


def packed_table_rows(
    table: Tensor, scale: Tensor, ids: Tensor, start: int, dtype: torch.dtype
) -> Tensor:
    values = (_values_of_bytes(torch.float8_e4m3fn, table.device) * floats(scale)).to(dtype)
    if not table.shape[0]:
        return values.new_zeros(*ids.shape, table.shape[1])
    local = (ids - start).flatten()
    owned = (local >= 0) & (local < table.shape[0])
    codes = table.index_select(0, local.clamp(0, table.shape[0] - 1))
    rows = values.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    return rows.masked_fill_(~owned[:, None], 0).view(*ids.shape, table.shape[1])


def packed_experts(
    x: Tensor, weights: Tensor, local: Tensor, gate_up: Packed, down: Packed, int8_activations: bool
) -> Tensor:
    if int8_activations:
        _check_widths(gate_up)
        _check_widths(down)
    owned = len(gate_up)
    if owned == 0 or x.shape[0] == 0:
        return torch.zeros_like(x)
    if int8_activations and is_int8_rows(gate_up) and is_int8_rows(down):
        rows, row_of, ends, is_ours = dispatch(x, local, owned)
        hidden = library.library().npu_swiglu(_int8_product(rows, *_int8_bank(gate_up), ends))
        out = _int8_product(hidden, *_int8_bank(down), ends)
        return combine(out, row_of, ends, weights, is_ours)
    experts, places = active(local.to(torch.int32), owned)  # 64 bits leave the chip for its AI CPU
    step = experts_at_once(gate_up, down, int8_activations)
    parts = []
    for start in range(0, len(experts), step):
        chosen = experts[start : start + step]
        here = places - start
        here = torch.where((here >= 0) & (here < len(chosen)), here, -1)
        rows, row_of, ends, is_ours = dispatch(x, here, len(chosen))
        hidden = _widened_product(rows, gate_up, chosen, ends, int8_activations)
        hidden = library.library().npu_swiglu(hidden)
        out = _widened_product(hidden, down, chosen, ends, int8_activations)
        parts.append(combine(out, row_of, ends, weights, is_ours))
    return (
        parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=torch.float32).to(x.dtype)
    )


def _check_widths(bank: Packed) -> None:
    rows, columns = bank.shape[-2:]
    if rows % WHOLE or columns % WHOLE:
        raise ConfigError(
            f"experts of {rows} x {columns} in {bank.form.name}: int8 products of an Ascend 310P "
            f"take multiples of {WHOLE}; set int8_activations: false"
        )


def active(local: Tensor, owned: int) -> tuple[Tensor, Tensor]:
    """As many of `owned` experts as there can be busy ones, and where each route's one is.

    Ids [min(owned, T * k)], the busy ones first and in order, then others; places [T, k] among
    them, -1 for a peer's route.
    """
    every = torch.arange(owned, dtype=local.dtype, device=local.device)
    if local.numel() >= owned:
        return every, local
    busy = (local.flatten()[:, None] == every).any(dim=0)
    key = torch.where(busy, every, every + owned).to(torch.float32)
    experts = torch.sort(key).indices[: local.numel()]
    place = busy.to(torch.float32).cumsum(0).to(local.dtype) - 1
    chosen = place.index_select(0, local.clamp_min(0).flatten()).view(local.shape)
    return experts, torch.where(local >= 0, chosen, -1)


def experts_at_once(gate_up: Packed, down: Packed, int8_activations: bool) -> int:
    """Experts whose wide weights fill WIDENED_BYTES; at least 1."""
    each = prod(gate_up.shape[1:]) + prod(down.shape[1:])
    return max(1, WIDENED_BYTES // (each * (1 if int8_activations else 2)))


def is_int8_rows(packed: Packed) -> bool:
    """True for 8-bit integers under one scale a row, without zero points."""
    form = packed.form
    is_row = form.code is Code.INTEGER and (form.bits, form.group, form.block_rows) == (8, 0, 1)
    return is_row and packed.zero is None and packed.whole is None


def _int8_bank(packed: Packed) -> tuple[Tensor, Tensor]:
    """int8 [E, N, K] as loaded and fp32 [E, N], made once where it is stored otherwise."""
    if "npu" not in packed.views:
        packed.views["npu"] = floats(packed.scale).flatten(-2).contiguous()
    scale: Tensor = packed.views["npu"]
    return packed.codes.view(torch.int8), scale


def _int8_product(rows: Tensor, bank: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """Rows [M, K] fp16, quantised a row, by segments times bank [E, N, K] int8 -> [M, N] fp16."""
    product: Tensor = library.library().npu_quant_grouped_matmul_dequant(rows, bank, scale, ends)
    return product


def _widened_product(
    rows: Tensor, bank: Packed, chosen: Tensor, ends: Tensor, int8_activations: bool
) -> Tensor:
    if int8_activations:
        return _int8_product(rows, *widened_int8(bank, chosen), ends)
    return grouped(rows, widened(bank, chosen), ends)


def widened(bank: Packed, chosen: Tensor) -> Tensor:
    """fp16 [A, N, K] of the experts `chosen` [A], over memory [A, K, N]."""
    scale, zero, _ = _blocks(bank, chosen)
    rows, columns = bank.shape[-2:]
    out = torch.empty(len(chosen), columns, rows, dtype=torch.float16, device=chosen.device)
    for part in _tiles(bank, chosen):
        numbers = _scaled(bank, chosen[part], scale[part], None if zero is None else zero[part])
        out[part].copy_(numbers.transpose(1, 2))
    return out.transpose(1, 2)


def widened_int8(bank: Packed, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [A, N, K] of the experts `chosen` [A] and the scale of each row, fp32 [A, N]."""
    if is_int8_rows(bank):
        codes, scale = _int8_bank(bank)
        return codes.index_select(0, chosen), scale.index_select(0, chosen)
    scale, zero, largest = _blocks(bank, chosen)
    by_row = (scale * largest).amax(dim=-1) / INT8_MAX
    scale = (scale / by_row[..., None]).to(torch.float16)
    zero = None if zero is None else zero.to(torch.float16)
    out = torch.empty(len(chosen), *bank.shape[-2:], dtype=torch.int8, device=chosen.device)
    for part in _tiles(bank, chosen):
        numbers = _scaled(bank, chosen[part], scale[part], None if zero is None else zero[part])
        out[part].copy_(numbers.round_())
    return out, by_row


def _tiles(bank: Packed, chosen: Tensor) -> list[slice]:
    step = max(1, TILE_WEIGHTS // max(1, prod(bank.shape[1:])))
    return [slice(at, at + step) for at in range(0, len(chosen), step)]


def _blocks(bank: Packed, chosen: Tensor) -> tuple[Tensor, Tensor | None, Tensor | float]:
    """Scale and zero point [A, N, G] fp32, and the largest number that a code can be from zero."""
    scale = floats(selected(bank.scale, chosen))
    if bank.whole is not None:
        halves = scale.unflatten(1, (bank.stacked, -1))
        scale = (halves * bank.whole.index_select(0, chosen)[..., None, None]).flatten(1, 2)
    scale = _by_row(scale, bank)
    half = float(1 << bank.form.bits - 1)
    if bank.zero is None:
        return scale, None, E2M1_LEVELS[-1] if bank.form.code is Code.E2M1 else half
    zero = _by_row(floats(selected(bank.zero, chosen)), bank)
    return scale, zero, torch.maximum(zero + half, half - 1 - zero)


def _by_row(blocks: Tensor, bank: Packed) -> Tensor:
    """[A, N, G] of one number a block [A, R, G]; what the last block of a part lacks is cut."""
    part = bank.shape[-2] // bank.stacked
    down = bank.form.block_rows or part
    if down == 1:
        return blocks
    parts = blocks.unflatten(1, (bank.stacked, -1))[:, :, :, None]
    repeated = parts.expand(-1, -1, -1, down, -1).flatten(2, 3)
    return repeated[:, :, :part].flatten(1, 2)


def _scaled(bank: Packed, chosen: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """[a, N, K]: (code - zero) * scale, in the type of the scale [a, N, G]."""
    columns, group = bank.shape[-1], bank.form.group
    values = code_numbers(selected(bank.codes, chosen), bank)
    if not group:
        values = values if zero is None else values - zero
        return values * scale
    if columns % group:
        values = values if zero is None else values - _wide(zero, group, columns)
        return values * _wide(scale, group, columns)
    values = values.unflatten(-1, (-1, group))
    if zero is not None:
        values = values - zero[..., None]
    return (values * scale[..., None]).flatten(-2)


def _wide(blocks: Tensor, group: int, columns: int) -> Tensor:
    return blocks[..., None].expand(*blocks.shape, group).flatten(-2)[..., :columns]


def code_numbers(codes: Tensor, bank: Packed) -> Tensor:
    """fp16 [..., K] of codes [..., K * bits / 8]: integers, or the levels of E2M1."""
    form = bank.form
    if form.bits == 8:
        return codes.view(torch.int8).to(torch.float16)
    base, rest, fields = float(1 << form.bits), codes.to(torch.float16), []
    for _ in range(8 // form.bits):
        above = torch.floor(rest / base)
        fields.append(rest - above * base)
        rest = above
    field = torch.stack(fields, dim=-1).flatten(-2)
    is_negative = torch.floor(field * (2 / base))
    if form.code is Code.INTEGER:
        return field - is_negative * base
    size = field - is_negative * 8  # 0, 1, .. 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6
    level = size * 0.5 + (size - 4).clamp_min(0) * 0.5 + (size - 6).clamp_min(0)
    return level * (1 - 2 * is_negative)


def selected(tensor: Tensor, chosen: Tensor) -> Tensor:
    """Matrices of a bank by index; those of a type that the chip lacks through their bits."""
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        return tensor.index_select(0, chosen)
    return tensor.view(bits).index_select(0, chosen).view(tensor.dtype)


_BITS = {
    torch.float8_e4m3fn: torch.uint8, torch.float8_e8m0fnu: torch.uint8, torch.bfloat16: torch.int16
}  # fmt: skip


def floats(numbers: Tensor) -> Tensor:
    """fp32 of scales or zero points in any type: no arithmetic in one that the chip lacks."""
    if numbers.dtype is torch.bfloat16:  # the upper half of an fp32
        return (numbers.view(torch.int16).to(torch.int32) * 65536).view(torch.float32)
    if numbers.dtype not in _BITS:
        return numbers.to(torch.float32)
    table = _values_of_bytes(numbers.dtype, numbers.device)
    index = numbers.view(torch.uint8).flatten().to(torch.int32)
    return table.index_select(0, index).view(numbers.shape)


@functools.cache
def _values_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """fp32 [256]; made once, on the host, so that no step and no capture copies it."""
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)
    return values.to(device)


OPERATORS = (packed_linear, packed_experts, packed_table_rows)
