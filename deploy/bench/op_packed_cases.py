"""Arguments of operators on low-bit weights at the production shapes of `op_cases`.

Inputs keep their type (A16, though float32 is timed, too) or are rounded to 8 bits (A8). Experts
of a bank have the same codes under other scales: their time is that of any codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deploy.bench.op_cases import (
    DECODE_ROWS,
    DTYPES,
    EXPERT_SETS,
    HEAD_DIM,
    HIDDEN,
    INNER,
    NGRAM_HEADS,
    NGRAM_WIDTH,
    OWNED,
    QUERY_HEADS,
    RANKS,
    TABLE_ROWS,
    TOP_K,
    Arguments,
    OpCase,
    normal,
    routes,
)
from ops.lowbit.pack import quantise, quantise_table
from ops.lowbit.packed import Packed
from placement.formats import W4G128, W8_SYM, WeightFormat

FORMATS = (W4G128, W8_SYM)
FLOAT32 = (torch.float32,)  # all that is timed where references take long to unpack


def packed_weight(form: WeightFormat, outputs: int, inputs: int) -> Packed:
    return quantise(torch.randn(outputs, inputs) * inputs**-0.5, form)


def packed_bank(form: WeightFormat, outputs: int, inputs: int) -> Packed:
    """[OWNED, outputs, inputs]."""
    one = packed_weight(form, outputs, inputs)
    factors = torch.linspace(0.5, 1.5, OWNED)[:, None, None]
    scale = (one.scale * factors).to(one.scale.dtype)
    codes: Tensor = one.codes.repeat(OWNED, 1, 1)
    return replace(one, shape=(OWNED, outputs, inputs), codes=codes, scale=scale)


def linear_arguments(dtype: torch.dtype, rows: int, form: WeightFormat, is_a8: bool) -> Arguments:
    """The projection behind attention: those before it are twice as large to unpack."""
    inputs = QUERY_HEADS * HEAD_DIM
    weight = packed_weight(form, HIDDEN, inputs)
    return {"x": normal(dtype, rows, inputs), "weight": weight, "int8_activations": is_a8}


def expert_arguments(
    dtype: torch.dtype, rows: int, form: WeightFormat, is_a8: bool
) -> Sequence[Arguments]:
    bank = {
        "gate_up": packed_bank(form, 2 * INNER, HIDDEN),
        "down": packed_bank(form, HIDDEN, INNER),
    }
    return [
        {
            "x": normal(dtype, rows, HIDDEN), "weights": torch.rand(rows, TOP_K).to(dtype),
            "local": routes(rows), **bank, "int8_activations": is_a8,
        }
        for _ in range(EXPERT_SETS)
    ]  # fmt: skip


def table_arguments(dtype: torch.dtype, rows: int) -> Arguments:
    codes, scale = quantise_table(torch.randn(TABLE_ROWS, NGRAM_WIDTH))
    ids = torch.randint(0, RANKS * TABLE_ROWS, (rows, 1, NGRAM_HEADS))
    codes = codes.view(torch.uint8)
    return {"table": codes, "scale": scale, "ids": ids, "start": TABLE_ROWS, "dtype": dtype}


def _format_cases(rows: int, form: WeightFormat, is_a8: bool) -> Iterator[OpCase]:
    text = f"{form.name} {'A8' if is_a8 else 'A16'}"
    dtypes = FLOAT32 if rows == 1 else DTYPES
    yield OpCase(
        "packed_linear", f"{rows} {text}",
        lambda dtype: [linear_arguments(dtype, rows, form, is_a8)], rows, dtypes,
    )  # fmt: skip
    yield OpCase(
        "packed_experts", f"{rows}x{TOP_K} {text}",
        lambda dtype: expert_arguments(dtype, rows, form, is_a8), rows, FLOAT32,
    )  # fmt: skip


def _table_case(rows: int) -> OpCase:
    return OpCase("packed_table_rows", str(rows), lambda d: [table_arguments(d, rows)], rows)


def _cases() -> Iterator[OpCase]:
    for form in FORMATS:
        for rows in DECODE_ROWS:
            yield from _format_cases(rows, form, is_a8=False)
        yield from _format_cases(1, form, is_a8=True)
    yield from map(_table_case, DECODE_ROWS)


PACKED_CASES = tuple(_cases())
