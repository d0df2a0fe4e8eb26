"""Block selection of sparse attention: pooled index keys and the best blocks of each query.

A block is `block_tokens` consecutive tokens. Its key never changes once the block is complete,
so it is stored normed and rotated. The tail of an incomplete block is the attention's business.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ops.reference.norm import rms_norm
from ops.reference.rope import apply_rope, rope_tables
from ops.reference.tiles import tile_shape
from ops.reference.topk import stable_top_k


def index_keys(
    raw: Tensor,  # [N, r, dim]
    scale: Tensor,  # [dim] fp32
    eps: float,
    first_positions: Tensor,  # [N] int64
    rotary_dim: int,
    theta: float,
) -> Tensor:
    """Keys [N, dim] of complete blocks: fp32 mean of the raw keys, normed, rotated.

    The rotation is that of the block's first token.
    """
    pooled = raw.float().mean(dim=1).to(raw.dtype)
    normed = rms_norm(pooled, scale, eps)
    cos, sin = rope_tables(first_positions, rotary_dim, theta, raw.dtype)
    return apply_rope(normed[:, None, :], cos, sin)[:, 0]


def select_blocks(
    query: Tensor,  # [B, Q, h, dim], normed and rotated
    index_pool: Tensor,  # [pages, page_blocks, dim]
    page_table: Tensor,  # [B, P] int64
    positions: Tensor,  # [B, Q] int64, -1 for padding
    block_tokens: int,
    max_blocks: int,
) -> Tensor:
    """Block ids [B, Q, K] int64, K = min(max_blocks, P * page_blocks), filled up with -1.

    Score = sum over heads of relu(q . k) / sqrt(dim), fp32, over the complete blocks of the
    query: index below (position + 1) // block_tokens. Ties go to the lowest block.
    """
    batch, queries, heads, dim = query.shape
    blocks = page_table.shape[1] * index_pool.shape[1]
    picked = query.new_full((batch, queries, min(max_blocks, blocks)), -1, dtype=torch.int64)
    rows, columns = tile_shape(batch, queries, blocks * dim, (heads + 2) * blocks)
    for top in range(0, batch, rows):
        table = page_table[top : top + rows].clamp_min(0)
        keys = index_pool[table].flatten(1, 2).float()  # [rows, blocks, dim]
        for left in range(0, queries, columns):
            here = (slice(top, top + rows), slice(left, left + columns))
            visible = (positions[here] + 1) // block_tokens
            picked[here] = _best_blocks(query[here], keys, visible, picked.shape[-1])
    return picked


def _best_blocks(query: Tensor, keys: Tensor, visible: Tensor, count: int) -> Tensor:
    """query [b, q, h, dim], keys [b, n, dim] fp32, visible [b, q] blocks -> ids [b, q, count]."""
    dim = query.shape[-1]
    flat = query.float().flatten(1, 2)
    products = torch.matmul(flat, keys.transpose(1, 2)).view(*query.shape[:3], -1)
    scores = products.relu_().sum(dim=2) / math.sqrt(dim)
    block = torch.arange(keys.shape[1], device=keys.device)
    ids, valid = stable_top_k(scores, count, block < visible[..., None])
    assert valid is not None
    return ids.masked_fill(~valid, -1)
