"""Products with low-bit weights that stay packed: dense layers, routed experts, table rows.

Weights are dequantised to fp32 one matrix at a time, at most an expert's; sums are fp32. With
`int8_activations` an input row is rounded first to 255 steps of its own largest value (W4A8,
W8A8), which is what integer units multiply; without, inputs keep their type (W4A16, W8A16).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ops.lowbit.convert import e4m3_table
from ops.lowbit.packed import Packed, dequantised

INT8_MAX = 127
FEW_ROUTES = 256  # up to here an expert is picked a route, which needs no host read (decode)


def rounded_rows(x: Tensor, int8_activations: bool) -> Tensor:
    """fp32 rows [..., K], rounded to 255 evenly spaced values each where asked for."""
    x = x.float()
    if not int8_activations or not x.shape[-1]:
        return x
    step = x.abs().amax(dim=-1, keepdim=True) / INT8_MAX
    return (x / torch.where(step > 0, step, 1.0)).round() * step


def packed_linear(x: Tensor, weight: Packed, int8_activations: bool) -> Tensor:
    """x [..., K] times the transpose of a packed weight [N, K] -> [..., N], in the dtype of x."""
    return linear(rounded_rows(x, int8_activations), dequantised(weight)).to(x.dtype)


def packed_experts(
    x: Tensor,  # [T, H]
    weights: Tensor,  # [T, k]
    local: Tensor,  # [T, k] int64: index into El, -1 for a route that a peer computes
    gate_up: Packed,  # [El, 2I, H]
    down: Packed,  # [El, H, I]
    int8_activations: bool,
) -> Tensor:
    """As `moe_experts`: the partial sum [T, H] over routes of this rank, in the dtype of x.

    An expert is dequantised when its turn comes; the inner row is rounded after it was multiplied
    by the route's weight.
    """
    if not len(gate_up) or not x.shape[0]:
        return torch.zeros_like(x)
    inputs, share = rounded_rows(x, int8_activations), weights.float()
    if local.numel() <= FEW_ROUTES:
        parts = []
        for row in range(x.shape[0]):
            for column, at in enumerate(local[row].clamp_min(0).split(1)):
                one, other, part = gate_up.select(at), down.select(at), share[row, column, None]
                routed = _routed(inputs[row, None], part, one, other, int8_activations)
                parts.append(routed.masked_fill(local[row, column] < 0, 0))
        return torch.cat(parts).view(*local.shape, -1).sum(dim=1).to(x.dtype)
    out = torch.zeros(x.shape, device=x.device)
    for expert in local[local >= 0].unique().tolist():
        rows, columns = (local == expert).nonzero(as_tuple=True)
        one, other = gate_up[expert], down[expert]
        routed = _routed(inputs[rows], share[rows, columns], one, other, int8_activations)
        out.index_add_(0, rows, routed)
    return out.to(x.dtype)


def _routed(
    x: Tensor, share: Tensor, gate_up: Packed, down: Packed, int8_activations: bool
) -> Tensor:
    """fp32 [N, H]: one expert's output of rows x [N, H], weighted by share [N]."""
    gate, up = linear(x, dequantised(gate_up)).chunk(2, dim=-1)
    hidden = silu(gate) * up * share[:, None]
    return linear(rounded_rows(hidden, int8_activations), dequantised(down))


def packed_table_rows(
    table: Tensor, scale: Tensor, ids: Tensor, start: int, dtype: torch.dtype
) -> Tensor:
    """Rows of an FP8 table [rows, w] (uint8 codes, one scale) by 256 looked-up values, in `dtype`.

    ids [...] -> [..., w]; rows that another rank owns give zeros. `start`: the first own row.
    """
    values = e4m3_table(scale, dtype)
    if table.shape[0] == 0:
        return values.new_zeros(*ids.shape, table.shape[1])
    local = ids - start
    owned = (local >= 0) & (local < table.shape[0])
    codes = table[local.clamp(0, table.shape[0] - 1)]
    return values[codes.long()].masked_fill(~owned[..., None], 0)
