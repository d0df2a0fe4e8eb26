"""Rotary embedding on npu_rotary_mul, which takes any even width.

npu_apply_rotary_pos_emb would rotate queries and keys in one call, but only whole heads of 64 or
128; our models rotate a part of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.npu import library


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim, heads, width = cos.shape[-1], x.shape[-2], x.shape[-1]
    rows = x.view(1, -1, heads, width)
    tables = (table.view(1, -1, 1, rotary_dim) for table in (cos, sin))
    turned = library.library().npu_rotary_mul(rows[..., :rotary_dim].contiguous(), *tables)
    return torch.cat((turned, rows[..., rotary_dim:]), dim=-1).view(x.shape)


OPERATORS = (apply_rope,)
