"""Cache write, block selection and attention over pages; fp16 products, fp32 softmax.

A dense chunk of one sequence runs on npu_prompt_flash_attention. All else is composed of gathers
and batched products: the paged operators of torch_npu and ATB take context lengths from the host,
and ours are on the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ops.npu import library
from ops.reference.attention import _selected_tokens, _token_slots, _token_view
from ops.reference.tiles import tile_shape

MAX_FLASH_TOKENS = 65_535
MAX_FLASH_HEAD = 512
FLASH_WIDTH = 16  # a head is whole tiles


def write_kv_(k_pool: Tensor, v_pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    if not slots.numel() or not k_pool.numel():
        return
    for pool, values in ((k_pool, k), (v_pool, v)):
        library.library().npu_scatter_nd_update_(_token_view(pool), slots[:, None], values)


def select_blocks(
    query: Tensor,
    index_pool: Tensor,
    page_table: Tensor,
    positions: Tensor,
    block_tokens: int,
    max_blocks: int,
) -> Tensor:
    batch, queries, heads, dim = query.shape
    blocks = page_table.shape[1] * index_pool.shape[1]
    count = min(max_blocks, blocks)
    if not query.numel():
        return query.new_full((batch, queries, count), -1, dtype=torch.int64)
    block = torch.arange(blocks, device=query.device)
    parts = []
    rows, columns = tile_shape(batch, queries, blocks * dim, (heads + 2) * blocks)
    for top in range(0, batch, rows):
        keys = index_pool[page_table[top : top + rows].clamp_min(0)].flatten(1, 2)
        line = []
        for left in range(0, queries, columns):
            here = (slice(top, top + rows), slice(left, left + columns))
            flat = query[here].flatten(1, 2)
            products = torch.matmul(flat, keys.transpose(1, 2)).float()
            scores = products.view(*query[here].shape[:3], -1).relu_().sum(dim=2)
            visible = block < ((positions[here] + 1) // block_tokens)[..., None]
            line.append(_best(scores * (1.0 / math.sqrt(dim)), visible, count))
        parts.append(torch.cat(line, dim=1) if len(line) > 1 else line[0])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _best(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Ids of the largest scores >= 0, ties to the lowest; -1 where nothing more is visible."""
    ordered, ids = torch.sort(
        torch.where(visible, scores, -1.0), dim=-1, descending=True, stable=True
    )
    return torch.where(ordered[..., :count] >= 0, ids[..., :count], -1)


def paged_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    positions: Tensor,
    block_ids: Tensor | None,
    block_tokens: int,
    kv_groups: tuple[int, ...],
    scale: float,
) -> Tensor:
    if query.numel() == 0:
        return torch.zeros_like(query)
    table = page_table.clamp_min(0)
    if block_ids is not None:
        return _sparse(
            query, k_pool, v_pool, table, positions, block_ids, block_tokens, kv_groups, scale
        )
    if _flash_takes(query, k_pool, table, kv_groups):
        return _flash(query, k_pool, v_pool, table, positions, kv_groups, scale)
    return _dense(query, k_pool, v_pool, table, positions, kv_groups, scale)


def _flash_takes(query: Tensor, pool: Tensor, table: Tensor, kv_groups: tuple[int, ...]) -> bool:
    """One sequence of several queries, the same number of them to each key head."""
    tokens, dim = table.shape[1] * pool.shape[1], query.shape[-1]
    alike = len(set(kv_groups)) == 1 and query.dtype is torch.float16
    fits = tokens <= MAX_FLASH_TOKENS and dim <= MAX_FLASH_HEAD and dim % FLASH_WIDTH == 0
    return alike and fits and query.shape[0] == 1 and query.shape[1] > 1


def _flash(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    positions: Tensor,
    kv_groups: tuple[int, ...],
    scale: float,
) -> Tensor:
    heads, kv_heads = query.shape[2], len(kv_groups)
    hidden, unwritten = _hidden(table, k_pool, positions)
    keys = k_pool[table[0]].flatten(0, 1).masked_fill(unwritten[0], 0)
    values = v_pool[table[0]].flatten(0, 1).masked_fill(unwritten[0], 0)
    out = library.library().npu_prompt_flash_attention(
        query.transpose(1, 2).contiguous(), keys.transpose(0, 1)[None].contiguous(),
        values.transpose(0, 1)[None].contiguous(), atten_mask=hidden[:, None], num_heads=heads,
        scale_value=scale, input_layout="BNSD", num_key_value_heads=kv_heads, sparse_mode=0,
    )  # fmt: skip
    return out.transpose(1, 2).masked_fill((positions < 0)[..., None, None], 0)


def _hidden(table: Tensor, pool: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What a query may not see [B, Q, n], and what nobody has written [B, n, 1, 1]."""
    token = torch.arange(table.shape[1] * pool.shape[1], device=table.device)
    hidden = token > positions[..., None]
    return hidden, (token > positions.amax(dim=1, keepdim=True))[..., None, None]


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
    stored = 2 * context * k_pool[0, 0].numel()
    rows, columns = tile_shape(batch, queries, stored, context * (heads + 1))
    parts = []
    for top in range(0, batch, rows):
        row = slice(top, top + rows)
        hidden, unwritten = _hidden(table[row], k_pool, positions[row])
        keys = k_pool[table[row]].flatten(1, 2)[:, None]
        values = v_pool[table[row]].flatten(1, 2).masked_fill(unwritten, 0)[:, None]
        line = [
            _attend(query[row, at], keys, values, hidden[:, at], kv_groups, scale)
            for at in _slices(queries, columns)
        ]
        parts.append(torch.cat(line, dim=1) if len(line) > 1 else line[0])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


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
    rows, columns = tile_shape(batch, queries, 0, length * (2 * k_pool[0, 0].numel() + heads))
    parts = []
    for row in _slices(batch, rows):
        line = []
        for at in _slices(queries, columns):
            here = (row, at)
            tokens = _selected_tokens(block_ids[here], positions[here], block_tokens)
            hidden = (tokens < 0) | (tokens > positions[here][..., None])
            slots = _token_slots(tokens.clamp_min(0), table[row], k_pool.shape[1])
            keys = _token_view(k_pool)[slots]
            values = _token_view(v_pool)[slots].masked_fill(hidden[..., None, None], 0)
            line.append(_attend(query[here], keys, values, hidden, kv_groups, scale))
        parts.append(torch.cat(line, dim=1) if len(line) > 1 else line[0])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


def _attend(
    query: Tensor,  # [b, q, nq, d]
    keys: Tensor,  # [b, m, n, nkv, d], m is q or 1
    values: Tensor,  # like keys, zero where no query may look
    hidden: Tensor,  # [b, q, n]
    kv_groups: tuple[int, ...],
    scale: float,
) -> Tensor:
    batch, queries, _, dim = query.shape
    shared = keys.shape[1]
    parts = []
    for head, part in enumerate(torch.split(query, list(kv_groups), dim=2)):
        group = part.shape[2]
        rows = (part * scale).reshape(batch, shared, queries * group // shared, dim)
        scores = torch.matmul(rows, keys[..., head, :].transpose(-1, -2)).float()
        scores = scores.view(batch, queries, group, -1)
        scores = scores.masked_fill_(hidden[:, :, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(query.dtype).view(*rows.shape[:3], -1)
        mixed = torch.matmul(weights, values[..., head, :])
        parts.append(mixed.view(batch, queries, group, dim))
    blind = hidden.all(dim=-1)[..., None, None]
    return torch.cat(parts, dim=2).masked_fill(blind, 0)


OPERATORS = (write_kv_, select_blocks, paged_attention)
