"""Operators on the C++ decode kernels, for the few rows of a decode step in fp32.

Anything else (many rows, other layouts) goes on to the torch variant or the reference of the same
operator. Meaning: `ops/reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.cpu import torch_variants as torch_variant
from ops.cpu.library import library
from ops.reference import attention, moe, ngram, rope, verify

FEW_ROWS = 16  # above it, matrix products of all rows at once are faster


def _row_stride(x: Tensor) -> int:
    """Elements between rows of x [N, ...] whose rows are contiguous; 0 when they are not."""
    if x.shape[0] and x[0].is_contiguous():
        return x.stride(0)
    return 0


def hyper_mix(
    streams: Tensor, scale: Tensor, down_inject: Tensor, up: Tensor, eps: float, rank: int
) -> tuple[Tensor, Tensor | None]:
    tokens, num_streams, hidden = streams.shape
    packed = down_inject.stride(0) == 1 and up.stride(0) == 1
    if not 0 < tokens <= FEW_ROWS or not packed or not streams.is_contiguous():
        return torch_variant.hyper_mix(streams, scale, down_inject, up, eps, rank)
    width, outs = num_streams * hidden, down_inject.shape[0]
    mixed = torch.empty(tokens, hidden)
    inject = torch.empty(tokens, outs - rank)
    scratch = torch.empty(2 * width + outs)
    library().nrank_hyper_mix(
        streams.data_ptr(), scale.data_ptr(), down_inject.data_ptr(), up.data_ptr(),
        mixed.data_ptr(), inject.data_ptr(), scratch.data_ptr(),
        tokens, num_streams, hidden, rank, outs - rank, eps,
    )  # fmt: skip
    return mixed, inject if outs > rank else None


def hyper_inject_(streams: Tensor, inject: Tensor, y: Tensor) -> Tensor:
    whole = streams.is_contiguous() and inject.is_contiguous() and y.is_contiguous()
    if streams.shape[0] > FEW_ROWS or not whole:
        return torch_variant.hyper_inject_(streams, inject, y)
    library().nrank_hyper_inject(
        streams.data_ptr(), inject.data_ptr(), y.data_ptr(), *streams.shape
    )
    return streams


def causal_conv_step(
    x: Tensor, weight: Tensor, windows: Tensor, slots: Tensor, dilation: int = 1
) -> Tensor:
    stride = _row_stride(x)
    if not stride or not weight.is_contiguous() or not windows.is_contiguous():
        return torch_variant.causal_conv_step(x, weight, windows, slots, dilation)
    y = torch.empty(x.shape)
    library().nrank_conv_step(
        x.data_ptr(), stride, weight.data_ptr(), windows.data_ptr(), slots.data_ptr(),
        y.data_ptr(), *x.shape, weight.shape[1], dilation,
    )  # fmt: skip
    return y


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads = a.shape
    stride = _row_stride(a)
    if not 0 < rows <= FEW_ROWS or not stride or stride != _row_stride(b):
        return torch_variant.delta_gates(a, b, a_log, dt_bias)
    g, beta = torch.empty(rows, heads), torch.empty(rows, heads)
    library().nrank_delta_gates(
        a.data_ptr(), b.data_ptr(), stride, a_log.data_ptr(), dt_bias.data_ptr(),
        g.data_ptr(), beta.data_ptr(), rows, heads,
    )  # fmt: skip
    return g, beta


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    key_head: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    batch, key_heads, key_dim = q.shape
    heads, width = v.shape[1:]
    stride, v_stride = _row_stride(q), _row_stride(v)
    whole = g.is_contiguous() and beta.is_contiguous() and states.is_contiguous()
    if not stride or not v_stride or stride != _row_stride(k) or not whole:
        return torch_variant.gated_delta_step(q, k, v, g, beta, key_head, states, slots)
    out = torch.empty(batch, heads, width)
    scratch = torch.empty(2 * key_heads * key_dim + width)
    library().nrank_delta_step(
        q.data_ptr(), k.data_ptr(), stride, v.data_ptr(), v_stride, g.data_ptr(),
        beta.data_ptr(), key_head.data_ptr(), states.data_ptr(), slots.data_ptr(),
        out.data_ptr(), scratch.data_ptr(), batch, key_heads, heads, key_dim, width,
    )  # fmt: skip
    return out


def causal_conv_verify(
    x: Tensor, weight: Tensor, windows: Tensor, slots: Tensor, dilation: int = 1
) -> Tensor:
    rows = x.flatten(0, 1)
    stride = _row_stride(rows)
    if not stride or not weight.is_contiguous() or not windows.is_contiguous():
        return verify.causal_conv_verify(x, weight, windows, slots, dilation)
    y = torch.empty(x.shape)
    library().nrank_conv_verify(
        rows.data_ptr(), stride, weight.data_ptr(), windows.data_ptr(), slots.data_ptr(),
        y.data_ptr(), *x.shape, weight.shape[1], dilation,
    )  # fmt: skip
    return y


def window_commit_(x: Tensor, windows: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    rows, words = x.flatten(0, 1), x.element_size() // 4
    stride = _row_stride(rows) * words
    whole = x.dim() == 3 and x.dtype == windows.dtype and windows.is_contiguous()
    if not whole or not words or not stride:
        return verify.window_commit_(x, windows, slots, counts)
    _, window, channels = windows.shape
    library().nrank_window_commit(  # copies words of 4 bytes, whatever they mean
        rows.data_ptr(), stride, windows.data_ptr(), slots.data_ptr(), counts.data_ptr(),
        *x.shape[:2], window, channels * words,
    )  # fmt: skip
    return windows


def gated_delta_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    key_head: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    batch, tokens, key_heads, key_dim = q.shape
    heads, width = v.shape[2:]
    query, key, value = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    stride, v_stride = _row_stride(query), _row_stride(value)
    whole = g.is_contiguous() and beta.is_contiguous() and states.is_contiguous()
    if not stride or not v_stride or stride != _row_stride(key) or not whole:
        return verify.gated_delta_verify(q, k, v, g, beta, key_head, states, slots)
    out = torch.empty(batch, tokens, heads, width)
    scratch = torch.empty(2 * tokens * key_heads * key_dim + width + key_dim * width)
    library().nrank_delta_verify(
        query.data_ptr(), key.data_ptr(), stride, value.data_ptr(), v_stride, g.data_ptr(),
        beta.data_ptr(), key_head.data_ptr(), states.data_ptr(), slots.data_ptr(),
        out.data_ptr(), scratch.data_ptr(), batch, tokens, key_heads, heads, key_dim, width,
    )  # fmt: skip
    return out


def gated_delta_commit_(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    key_head: Tensor,
    states: Tensor,
    slots: Tensor,
    counts: Tensor,
) -> Tensor:
    batch, tokens, key_heads, key_dim = k.shape
    heads, width = v.shape[2:]
    key, value = k.flatten(0, 1), v.flatten(0, 1)
    stride, v_stride = _row_stride(key), _row_stride(value)
    whole = g.is_contiguous() and beta.is_contiguous() and states.is_contiguous()
    if not stride or not v_stride or not whole:
        return verify.gated_delta_commit_(k, v, g, beta, key_head, states, slots, counts)
    scratch = torch.empty(tokens * key_heads * key_dim + width)
    library().nrank_delta_commit(
        key.data_ptr(), stride, value.data_ptr(), v_stride, g.data_ptr(), beta.data_ptr(),
        key_head.data_ptr(), states.data_ptr(), slots.data_ptr(), counts.data_ptr(),
        scratch.data_ptr(), batch, tokens, key_heads, heads, key_dim, width,
    )  # fmt: skip
    return states


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    rows = gate.dim() == 3 and x.is_contiguous() and 0 < gate.shape[0] <= FEW_ROWS
    if not rows or not gate[0].is_contiguous():
        return torch_variant.gated_rms_norm(x, weight, gate, eps, activation)
    out = torch.empty(x.shape)
    library().nrank_gated_norm(
        x.data_ptr(), weight.data_ptr(), gate.data_ptr(), gate.stride(0), out.data_ptr(),
        *x.shape, eps, activation == "silu",
    )  # fmt: skip
    return out


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    stride = _row_stride(logits)
    if not 0 < tokens <= FEW_ROWS or not stride:
        return torch_variant.route(logits, top_k, normalise)
    weights = torch.empty(tokens, top_k)
    ids = torch.empty(tokens, top_k, dtype=torch.int64)
    scratch = torch.empty(experts)
    library().nrank_route(
        logits.data_ptr(), stride, weights.data_ptr(), ids.data_ptr(), scratch.data_ptr(),
        tokens, experts, top_k, normalise,
    )  # fmt: skip
    return weights, ids


def moe_experts(x: Tensor, weights: Tensor, local: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    tokens, hidden = x.shape
    few = 0 < tokens <= FEW_ROWS and gate_up.shape[0] > 0
    arrays = (x, weights, local, gate_up, down)
    if not few or not all(array.is_contiguous() for array in arrays):
        return torch_variant.moe_experts(x, weights, local, gate_up, down)
    out = torch.empty(tokens, hidden)
    intermediate = down.shape[2]
    scratch = torch.empty(2 * intermediate + hidden)
    library().nrank_moe(
        x.data_ptr(), weights.data_ptr(), local.data_ptr(), gate_up.data_ptr(),
        down.data_ptr(), out.data_ptr(), scratch.data_ptr(),
        tokens, weights.shape[1], hidden, intermediate,
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [T, d] or [T, heads, d]."""
    stride = _row_stride(x) if x.dim() in (2, 3) else 0
    if not 0 < x.shape[0] <= FEW_ROWS or not stride:
        return torch_variant.rms_norm(x, scale, eps)
    out = torch.empty(x.shape)
    inner = x.shape[1] if x.dim() == 3 else 1
    library().nrank_rms_norm(
        x.data_ptr(), stride, scale.data_ptr(), out.data_ptr(),
        x.shape[0], inner, x.shape[-1], eps,
    )  # fmt: skip
    return out


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
    normed = rms_norm(raw.mean(dim=1), scale, eps)
    tables = torch_variant.rope_tables(first_positions, rotary_dim, theta, raw.dtype)
    return apply_rope(normed.unsqueeze(1), *tables).squeeze(1)


def table_rows(table: Tensor, ids: Tensor, start: int) -> Tensor:
    if not table.is_contiguous() or not ids.is_contiguous():
        return ngram.table_rows(table, ids, start)
    out = torch.empty(*ids.shape, table.shape[1])
    library().nrank_table_rows(
        table.data_ptr(), ids.data_ptr(), out.data_ptr(), ids.numel(), *table.shape, start
    )
    return out


def ngram_ids(
    history: Tensor, eos: int, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor
) -> Tensor:
    size, heads = multipliers.shape[0], vocab_sizes.shape[0]
    if not history.is_contiguous():
        return ngram.ngram_ids(history, eos, multipliers, vocab_sizes, offsets)
    batch, queries = history.shape[0], history.shape[1] - size + 1
    ids = torch.empty(batch, queries, heads, dtype=torch.int64)
    library().nrank_ngram_ids(
        history.data_ptr(), multipliers.data_ptr(), vocab_sizes.data_ptr(), offsets.data_ptr(),
        ids.data_ptr(), batch, queries, size - 1, size, heads // (size - 1), eos,
    )  # fmt: skip
    return ids


def gated_swiglu(gate_up: Tensor, gate: Tensor) -> Tensor:
    stride = _row_stride(gate_up)
    if not 0 < gate_up.shape[0] <= FEW_ROWS or not stride:
        return moe.gated_swiglu(gate_up, gate)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    library().nrank_gated_swiglu(
        gate_up.data_ptr(), stride, gate.data_ptr(), gate.stride(0), out.data_ptr(), *out.shape
    )
    return out


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
    out, scores = torch.empty(query.shape), torch.empty(longest)
    slots = torch.empty(longest, dtype=torch.int64)
    groups = torch.tensor(kv_groups)
    library().nrank_attention(
        query.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), page_table.data_ptr(),
        page_table.stride(0), positions.data_ptr(),
        None if blocks is None else blocks.data_ptr(), groups.data_ptr(), out.data_ptr(),
        scores.data_ptr(), slots.data_ptr(), batch, queries, heads, len(kv_groups), dim, page,
        0 if blocks is None else blocks.shape[2], block_tokens, scale,
    )  # fmt: skip
    return out


OPERATORS = (
    hyper_mix,
    hyper_inject_,
    causal_conv_step,
    delta_gates,
    gated_delta_step,
    causal_conv_verify,
    window_commit_,
    gated_delta_verify,
    gated_delta_commit_,
    gated_rms_norm,
    route,
    moe_experts,
    rms_norm,
    apply_rope,
    index_keys,
    table_rows,
    ngram_ids,
    gated_swiglu,
    paged_attention,
)
