"""Rotation, index keys, block selection and paged attention on the C++ kernels, for decode rows.

More rows and other layouts go on to the torch variant or the reference of the same operator.
Meaning: `ops/reference`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ops.cpu import torch_variants as torch_variant
from ops.cpu.layout import FEW_ROWS
from ops.cpu.library import library
from ops.reference import attention, rope, select


def rope_tables(
    positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not 0 < positions.numel() <= FEW_ROWS or not positions.is_contiguous():
        return torch_variant.rope_tables(positions, rotary_dim, theta, dtype)
    cos, sin = torch.empty(2, *positions.shape, rotary_dim).unbind(0)
    frequency = torch_variant.inverse_frequency(rotary_dim, theta)
    library().nrank_rope_tables(
        positions.data_ptr(), frequency.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        positions.numel(), rotary_dim // 2,
    )  # fmt: skip
    return cos, sin


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    whole = x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    if x.dim() != 3 or x.shape[0] > FEW_ROWS or not whole:
        return rope.apply_rope(x, cos, sin)
    out = torch.empty(x.shape)
    library().nrank_rope(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape, cos.shape[-1]
    )
    return out


def index_keys(
    raw: Tensor, scale: Tensor, eps: float, first_positions: Tensor, rotary_dim: int, theta: float
) -> Tensor:
    blocks, members, dim = raw.shape
    if not 0 < blocks <= FEW_ROWS or not raw.is_contiguous() or not first_positions.is_contiguous():
        return torch_variant.index_keys(raw, scale, eps, first_positions, rotary_dim, theta)
    out = torch.empty(blocks, dim)
    frequency = torch_variant.inverse_frequency(rotary_dim, theta)
    library().nrank_index_keys(
        raw.data_ptr(), scale.data_ptr(), first_positions.data_ptr(), frequency.data_ptr(),
        out.data_ptr(), blocks, members, dim, rotary_dim // 2, eps,
    )  # fmt: skip
    return out


def select_blocks(
    query: Tensor,
    index_pool: Tensor,
    page_table: Tensor,
    positions: Tensor,
    block_tokens: int,
    max_blocks: int,
) -> Tensor:
    batch, queries, heads, dim = query.shape
    whole = query.is_contiguous() and index_pool.is_contiguous() and positions.is_contiguous()
    if not 0 < batch * queries <= FEW_ROWS or not whole or page_table.stride(1) != 1:
        return select.select_blocks(
            query, index_pool, page_table, positions, block_tokens, max_blocks
        )
    page_blocks = index_pool.shape[1]
    blocks = page_table.shape[1] * page_blocks
    picked = torch.empty(batch, queries, min(max_blocks, blocks), dtype=torch.int64)
    library().nrank_select_blocks(
        query.data_ptr(), index_pool.data_ptr(), page_table.data_ptr(), page_table.stride(0),
        positions.data_ptr(), picked.data_ptr(), batch, queries, heads, dim,
        page_blocks, picked.shape[2], block_tokens,
    )  # fmt: skip
    return picked


@functools.cache
def _on_device(kv_groups: tuple[int, ...]) -> Tensor:
    return torch.tensor(kv_groups)


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
    batch, queries, heads, dim = query.shape
    whole = query.is_contiguous() and positions.is_contiguous() and page_table.stride(1) == 1
    if batch * queries > FEW_ROWS or not whole or not query.numel():
        return attention.paged_attention(
            query, k_pool, v_pool, page_table, positions, block_ids, block_tokens, kv_groups,
            scale,
        )  # fmt: skip
    page, blocks = k_pool.shape[1], None
    longest = page_table.shape[1] * page
    if block_ids is not None:
        blocks = block_ids.contiguous()
        longest = (blocks.shape[2] + 1) * block_tokens
    out = torch.empty(query.shape)
    groups = _on_device(kv_groups)
    library().nrank_attention(
        query.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), page_table.data_ptr(),
        page_table.stride(0), positions.data_ptr(),
        None if blocks is None else blocks.data_ptr(), groups.data_ptr(), out.data_ptr(),
        longest, batch, queries, heads, len(kv_groups), dim, page,
        0 if blocks is None else blocks.shape[2], block_tokens, scale,
    )  # fmt: skip
    return out


OPERATORS = (
    rope_tables,
    apply_rope,
    index_keys,
    select_blocks,
    paged_attention,
)
