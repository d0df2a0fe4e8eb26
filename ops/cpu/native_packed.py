"""Products with packed weights on the C++ kernels: a decode step from the codes, more rows from
one matrix unpacked at a time.

Inputs may be bfloat16 or float16, too: they are widened for the product. Meaning:
`ops/reference/packed.py`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ops.cpu.layout import FEW_ROWS, row_stride
from ops.cpu.library import available, library
from ops.lowbit.packed import Packed
from ops.reference import packed as reference
from ops.reference.packed import rounded_rows
from ops.spec import Capability
from placement.formats import Code

CHUNKS = {Code.INTEGER: 32, Code.E2M1: 16}  # codes decoded at once; groups are whole chunks
_STORED = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3,
    torch.float8_e8m0fnu: 4, torch.int8: 5,
}  # fmt: skip


class _View(ctypes.Structure):
    """`Packed` of packed.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "whole")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "bits", "is_float4", "scale_type", "zero_type", "rows", "columns", "group",
                "block_rows", "stacked", "down", "across",
            )
        ),
    )  # fmt: skip


def available_for_packed(capability: Capability) -> str | None:
    """As for the other kernels, but for inputs of any type."""
    return available(Capability(capability.backend, dtype=torch.float32))


def _view(weight: Packed) -> _View | None:
    """The weight as the kernels see it, made once; None for what they don't know."""
    if "cpu" not in weight.views:
        weight.views["cpu"] = _make_view(weight)
    view: _View | None = weight.views["cpu"]
    return view


def _make_view(weight: Packed) -> _View | None:
    form, (rows, columns) = weight.form, weight.shape[-2:]
    group = form.group or columns
    chunk = CHUNKS.get(form.code, 0)
    is_whole = form.bits == 8 or (chunk and columns % group == 0 and group % chunk == 0)
    known = form.code in CHUNKS and is_whole and all(weight.shape)
    if not known or any(not t.is_contiguous() or t.dtype not in _TYPES for t in weight.tensors):
        return None
    zero, whole = weight.zero, weight.whole
    return _View(
        weight.codes.data_ptr(), weight.scale.data_ptr(),
        None if zero is None else zero.data_ptr(), None if whole is None else whole.data_ptr(),
        form.bits, form.code is Code.E2M1, _STORED[weight.scale.dtype],
        0 if zero is None else _STORED[zero.dtype], rows, columns, group, form.block_rows,
        weight.stacked, *weight.scale.shape[-2:],
    )  # fmt: skip


_TYPES = {*_STORED, torch.uint8}


def packed_linear(x: Tensor, weight: Packed, int8_activations: bool) -> Tensor:
    view = _view(weight)
    if view is None or not x.numel():
        return reference.packed_linear(x, weight, int8_activations)
    rows = x.reshape(-1, x.shape[-1]).float()
    stride = row_stride(rows)
    if not stride or rows.shape[0] > FEW_ROWS:
        out = linear(rounded_rows(rows, int8_activations), _unpacked(view, 0))
    else:
        out = torch.empty(rows.shape[0], view.rows)
        library().nrank_packed_linear(
            rows.data_ptr(), stride, ctypes.byref(view), out.data_ptr(), rows.shape[0],
            int8_activations,
        )  # fmt: skip
    return out.view(*x.shape[:-1], view.rows).to(x.dtype)


def packed_experts(
    x: Tensor, weights: Tensor, local: Tensor, gate_up: Packed, down: Packed, int8_activations: bool
) -> Tensor:
    if not gate_up.shape[0] or not x.numel():
        return torch.zeros_like(x)
    views = _view(gate_up), _view(down)
    if views[0] is None or views[1] is None:
        return reference.packed_experts(x, weights, local, gate_up, down, int8_activations)
    rows, share = x.float().contiguous(), weights.float().contiguous()
    if x.shape[0] > FEW_ROWS:
        return _many(rows, share, local, views[0], views[1], int8_activations).to(x.dtype)
    local, out = local.contiguous(), torch.empty(x.shape)
    library().nrank_packed_moe(
        rows.data_ptr(), share.data_ptr(), local.data_ptr(), ctypes.byref(views[0]),
        ctypes.byref(views[1]), out.data_ptr(), *local.shape, int8_activations,
    )  # fmt: skip
    return out.to(x.dtype)


def _many(
    x: Tensor, weights: Tensor, local: Tensor, gate_up: _View, down: _View, int8_activations: bool
) -> Tensor:
    """Rows sorted by expert; each busy expert is unpacked once, into the same memory."""
    flat, top_k = local.flatten(), local.shape[1]
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1).tolist()
    inputs, share = rounded_rows(x, int8_activations), weights.flatten()
    out = torch.zeros(x.shape)
    rooms = [torch.empty(view.rows, view.columns) for view in (gate_up, down)]
    for expert, routes in enumerate(torch.split(order, counts)[1:]):
        if len(routes):
            rows = routes // top_k
            gate, up = linear(inputs[rows], _unpacked(gate_up, expert, rooms[0])).chunk(2, dim=-1)
            hidden = silu(gate).mul_(up).mul_(share[routes, None])
            hidden = rounded_rows(hidden, int8_activations)
            out.index_add_(0, rows, linear(hidden, _unpacked(down, expert, rooms[1])))
    return out


def _unpacked(view: _View, expert: int, room: Tensor | None = None) -> Tensor:
    out = torch.empty(view.rows, view.columns) if room is None else room
    library().nrank_unpack(ctypes.byref(view), expert, out.data_ptr())
    return out


def packed_table_rows(
    table: Tensor, scale: Tensor, ids: Tensor, start: int, dtype: torch.dtype
) -> Tensor:
    values = reference.e4m3_table(scale, dtype)
    local = (ids - start).flatten()
    owned = (local >= 0) & (local < table.shape[0])
    if not table.shape[0]:
        return values.new_zeros(*ids.shape, table.shape[1])
    codes = table.index_select(0, local.clamp(0, table.shape[0] - 1))
    rows = values.index_select(0, codes.flatten().int()).view(codes.shape)
    return rows.masked_fill_(~owned[:, None], 0).view(*ids.shape, table.shape[1])


OPERATORS: tuple[Any, ...] = (packed_linear, packed_experts, packed_table_rows)
