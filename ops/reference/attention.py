"""Attention of grouped heads over a paged cache: dense causal, or over selected blocks.

Reads pages through a table and never trusts memory that was not written. The gate after the
attention, projections and rotation belong to the mixer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.reference.tiles import tile_shape


def write_kv_(k_pool: Tensor, v_pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k, v [N, nkv, d] at flat token slots [N] int64 (page * page_tokens + offset)."""
    for pool, values in ((k_pool, k), (v_pool, v)):
        _token_view(pool).index_copy_(0, slots, values.to(pool.dtype))


def _token_view(pool: Tensor) -> Tensor:
    """[pages, page, nkv, d] as [pages * page, nkv, d], never a copy."""
    pages, page, heads, dim = pool.shape
    return pool.view(pages * page, heads, dim)


def paged_attention(
    query: Tensor,  # [B, Q, nq, d], rotated
    k_pool: Tensor,  # [pages, page, nkv, d]
    v_pool: Tensor,  # [pages, page, nkv, d]
    page_table: Tensor,  # [B, P] int64
    positions: Tensor,  # [B, Q] int64, -1 for padding
    block_ids: Tensor | None,  # [B, Q, K] int64, -1 for none
    block_tokens: int,
    kv_groups: tuple[int, ...],  # query heads of each kv head, consecutive, sum nq
    scale: float,
) -> Tensor:
    """softmax(scale q . k) v -> [B, Q, nq, d] in the dtype of query; padding rows give zeros.

    Without block_ids a query sees tokens 0..position. With them it sees the tokens of its blocks
    and the tail: tokens after its last complete block, none if (position + 1) divides evenly.
    """
    table = page_table.clamp_min(0)
    if query.numel() == 0:
        return torch.zeros_like(query)
    if block_ids is None:
        return _dense(query, k_pool, v_pool, table, positions, kv_groups, scale)
    return _sparse(
        query, k_pool, v_pool, table, positions, block_ids, block_tokens, kv_groups, scale
    )


def _dense(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    positions: Tensor,
    kv_groups: tuple[int, ...],
    scale: float,
) -> Tensor:
    batch, queries, heads, _ = query.shape
    context = table.shape[1] * k_pool.shape[1]
    token = torch.arange(context, device=query.device)
    result = torch.empty_like(query)
    stored = 2 * context * k_pool[0, 0].numel()
    rows, columns = tile_shape(batch, queries, stored, context * (heads + 1))
    for top in range(0, batch, rows):
        row = slice(top, top + rows)
        written = token <= positions[row].amax(dim=1, keepdim=True)  # [rows, context]
        keys = k_pool[table[row]].flatten(1, 2)[:, None]
        values = v_pool[table[row]].flatten(1, 2).masked_fill(~written[..., None, None], 0)
        for left in range(0, queries, columns):
            here = (row, slice(left, left + columns))
            valid = token <= positions[here][..., None]
            result[here] = _attend(query[here], keys, values[:, None], valid, kv_groups, scale)
    return result


def _sparse(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    positions: Tensor,
    block_ids: Tensor,
    block_tokens: int,
    kv_groups: tuple[int, ...],
    scale: float,
) -> Tensor:
    batch, queries, heads, _ = query.shape
    length = block_ids.shape[2] * block_tokens + block_tokens - 1
    result = torch.empty_like(query)
    per_query = length * (2 * k_pool[0, 0].numel() + heads)
    rows, columns = tile_shape(batch, queries, 0, per_query)
    for top in range(0, batch, rows):
        for left in range(0, queries, columns):
            here = (slice(top, top + rows), slice(left, left + columns))
            tokens = _selected_tokens(block_ids[here], positions[here], block_tokens)
            valid = (tokens >= 0) & (tokens <= positions[here][..., None])
            slots = _token_slots(tokens.clamp_min(0), table[here[0]], k_pool.shape[1])
            keys = _token_view(k_pool)[slots]  # [rows, columns, length, nkv, d]
            values = _token_view(v_pool)[slots].masked_fill(~valid[..., None, None], 0)
            result[here] = _attend(query[here], keys, values, valid, kv_groups, scale)
    return result


def _selected_tokens(block_ids: Tensor, positions: Tensor, block_tokens: int) -> Tensor:
    """Token indices [b, q, K * block_tokens + block_tokens - 1]: the blocks', then the tail's.

    Entries that are negative or above the position stand for nothing.
    """
    inside = torch.arange(block_tokens, device=block_ids.device)
    first = torch.where(block_ids >= 0, block_ids * block_tokens, -block_tokens)
    of_blocks = (first[..., None] + inside).flatten(2)
    tail_start = (positions + 1) // block_tokens * block_tokens
    return torch.cat((of_blocks, tail_start[..., None] + inside[:-1]), dim=2)


def _token_slots(tokens: Tensor, table: Tensor, page: int) -> Tensor:
    """Flat slots of token indices [b, q, n] >= 0 through the page table [b, P]."""
    entry = (tokens // page).clamp_max(table.shape[1] - 1)
    pages = table.gather(1, entry.flatten(1)).view(tokens.shape)
    return pages * page + tokens % page


def _attend(
    query: Tensor,  # [b, q, nq, d]
    keys: Tensor,  # [b, m, n, nkv, d], m is q or 1 (the same keys for all queries)
    values: Tensor,  # like keys, zero where no query may look
    valid: Tensor,  # [b, q, n]
    kv_groups: tuple[int, ...],
    scale: float,
) -> Tensor:
    """[b, q, nq, d], computed in fp32 a kv head; rows without a valid key give zeros."""
    batch, queries, _, dim = query.shape
    shared = keys.shape[1]
    hidden = ~valid[:, :, None, :]
    parts = []
    for head, part in enumerate(torch.split(query, list(kv_groups), dim=2)):
        group = part.shape[2]
        rows = part.float().reshape(batch, shared, queries * group // shared, dim) * scale
        scores = torch.matmul(rows, keys[..., head, :].float().transpose(-1, -2))
        scores = scores.view(batch, queries, group, -1).masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1).view(*rows.shape[:3], -1)
        mixed = torch.matmul(weights, values[..., head, :].float())
        parts.append(mixed.view(batch, queries, group, dim))
    seen = valid.any(dim=-1)[..., None, None]
    return torch.cat(parts, dim=2).masked_fill(~seen, 0).to(query.dtype)
