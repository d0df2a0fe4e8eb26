"""The chunked gated delta rule with the triangular system inverted by matrix products alone.

A triangular solve is a loop on the vector unit. The inverse of a unit lower triangle doubles in
size from blocks of 8: inv([[A, 0], [B, D]]) = [[A', 0], [-D' B A', D']]. Inside a block the series
I + N + ... + N^7 of the nilpotent N is (I + N)(I + N^2)(I + N^4). Larger blocks would be fewer
products, but its terms grow as the binomials of the size do, and cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.reference.delta import per_value_head

BLOCK = 8


def gated_delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    key_head: Tensor,
    state: Tensor,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    query, key = per_value_head(q, k, key_head)
    query, key, value, g, beta = (x.transpose(0, 1) for x in (query, key, v.float(), g, beta))
    outputs = []
    for start in range(0, v.shape[0], chunk):
        part = slice(start, start + chunk)
        output, state = _one_chunk(
            query[:, part], key[:, part], value[:, part], g[:, part], beta[:, part], state
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1).transpose(0, 1).to(v.dtype).contiguous(), state


def _one_chunk(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `ops.reference.delta._one_chunk`, with the inverse in place of the solve."""
    total = g.cumsum(1)
    from_start = total.exp()[..., None]
    index = torch.arange(g.shape[1], device=g.device)
    future = index[:, None] < index
    pair = (total[:, :, None] - total[:, None, :]).masked_fill(future, float("-inf")).exp()
    written = beta[..., None] * (value - from_start * torch.matmul(key, state))
    system = torch.matmul(beta[..., None] * key, key.transpose(1, 2)) * pair
    u = torch.matmul(inverse(system.masked_fill(index[:, None] <= index, 0)), written)
    within = torch.matmul(query, key.transpose(1, 2)) * pair
    output = torch.matmul(query * from_start, state) + torch.matmul(within, u)
    to_end = (total[:, -1:] - total).exp()[..., None]
    added = torch.matmul((key * to_end).transpose(1, 2), u)
    return output, state * total[:, -1].exp()[:, None, None] + added


def inverse(lower: Tensor) -> Tensor:
    """Inverse of I + lower, with lower [H, C, C] strictly lower triangular."""
    heads, size = lower.shape[0], lower.shape[1]
    padded = BLOCK
    while padded < size:
        padded *= 2
    rest = padded - size
    lower = torch.nn.functional.pad(lower, (0, rest, 0, rest))
    blocks = lower.view(heads, padded // BLOCK, BLOCK, padded // BLOCK, BLOCK)
    found = _series(-torch.diagonal(blocks, dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous())
    width = BLOCK
    while width < padded:
        pairs = padded // (2 * width)
        grid = lower.view(heads, pairs, 2, width, pairs, 2, width)[:, :, 1, :, :, 0]
        below = torch.diagonal(grid, dim1=1, dim2=3).permute(0, 3, 1, 2)
        upper_left, lower_right = found.view(heads, pairs, 2, width, width).unbind(2)
        corner = -torch.matmul(lower_right, torch.matmul(below, upper_left))
        top = torch.cat((upper_left, torch.zeros_like(corner)), dim=-1)
        found = torch.cat((top, torch.cat((corner, lower_right), dim=-1)), dim=-2)
        width *= 2
    return found.view(heads, padded, padded)[:, :size, :size]


def _series(nilpotent: Tensor) -> Tensor:
    """Sum of the powers 0..7 of [..., 8, 8]."""
    unit = torch.eye(BLOCK, device=nilpotent.device, dtype=nilpotent.dtype)
    square = torch.matmul(nilpotent, nilpotent)
    fourth = torch.matmul(square, square)
    return torch.matmul(torch.matmul(unit + nilpotent, unit + square), unit + fourth)


OPERATORS = (gated_delta_chunk,)
