"""Projections, norms, streams, experts and tables on the C++ kernels, for a decode step in fp32.

Anything else (many rows, other layouts) goes on to the torch variant or the reference of the same
operator. Meaning: `ops/reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.cpu import torch_variants as torch_variant
from ops.cpu.layout import FEW_ROWS, is_packed, row_stride
from ops.cpu.library import library
from ops.reference import dense, moe, ngram

# Above, torch's matrix product is as fast (AVX-512; [T, 192] x [192, 1048] and the like).
LINEAR_ROWS = 16


def linear(x: Tensor, weight: Tensor) -> Tensor:
    stride = row_stride(x) if x.dim() == 2 else 0
    if not stride or not 0 < x.shape[0] <= LINEAR_ROWS or not is_packed(weight):
        return dense.linear(x, weight)
    outs, ins = weight.shape
    out = torch.empty(x.shape[0], outs)
    library().nrank_linear(
        x.data_ptr(), stride, weight.data_ptr(), out.data_ptr(), x.shape[0], ins, outs
    )
    return out


def hyper_mix(
    streams: Tensor, scale: Tensor, down_inject: Tensor, up: Tensor, eps: float, rank: int
) -> tuple[Tensor, Tensor | None]:
    tokens, num_streams, hidden = streams.shape
    packed = is_packed(down_inject) and is_packed(up) and streams.is_contiguous()
    if not 0 < tokens <= FEW_ROWS or not packed:
        return torch_variant.hyper_mix(streams, scale, down_inject, up, eps, rank)
    outs = down_inject.shape[0]
    mixed = torch.empty(tokens, hidden)
    inject = torch.empty(tokens, outs - rank)
    library().nrank_hyper_mix(
        streams.data_ptr(), scale.data_ptr(), down_inject.data_ptr(), up.data_ptr(),
        mixed.data_ptr(), inject.data_ptr(), tokens, num_streams, hidden, rank, outs - rank, eps,
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


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [T, d] or [T, heads, d], the last dimension contiguous."""
    if x.dim() not in (2, 3) or not 0 < x.shape[0] <= FEW_ROWS or x.stride(-1) != 1:
        return torch_variant.rms_norm(x, scale, eps)
    out = torch.empty(x.shape)
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    library().nrank_rms_norm(
        x.data_ptr(), x.stride(0), inner_stride, scale.data_ptr(), out.data_ptr(),
        x.shape[0], inner, x.shape[-1], eps,
    )  # fmt: skip
    return out


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    rows = gate.dim() == 3 and x.is_contiguous() and 0 < gate.shape[0] <= FEW_ROWS
    stride = row_stride(gate) if rows else 0
    if not stride:
        return torch_variant.gated_rms_norm(x, weight, gate, eps, activation)
    out = torch.empty(x.shape)
    library().nrank_gated_norm(
        x.data_ptr(), weight.data_ptr(), gate.data_ptr(), stride, out.data_ptr(),
        *x.shape, eps, activation == "silu",
    )  # fmt: skip
    return out


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    stride = row_stride(logits)
    if not 0 < tokens <= FEW_ROWS or not stride:
        return torch_variant.route(logits, top_k, normalise)
    weights = torch.empty(tokens, top_k)
    ids = torch.empty(tokens, top_k, dtype=torch.int64)
    library().nrank_route(
        logits.data_ptr(), stride, weights.data_ptr(), ids.data_ptr(),
        tokens, experts, top_k, normalise,
    )  # fmt: skip
    return weights, ids


def moe_experts(x: Tensor, weights: Tensor, local: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    tokens, hidden = x.shape
    few = 0 < tokens <= FEW_ROWS and gate_up.shape[0] > 0
    whole = few and x.is_contiguous() and weights.is_contiguous() and local.is_contiguous()
    if not whole or not is_packed(gate_up) or not is_packed(down):
        return torch_variant.moe_experts(x, weights, local, gate_up, down)
    out = torch.empty(tokens, hidden)
    library().nrank_moe(
        x.data_ptr(), weights.data_ptr(), local.data_ptr(), gate_up.data_ptr(),
        down.data_ptr(), out.data_ptr(), tokens, weights.shape[1], hidden, down.shape[2],
    )  # fmt: skip
    return out


def gated_swiglu(gate_up: Tensor, gate: Tensor) -> Tensor:
    stride = row_stride(gate_up)
    if not 0 < gate_up.shape[0] <= FEW_ROWS or not stride:
        return moe.gated_swiglu(gate_up, gate)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    library().nrank_gated_swiglu(
        gate_up.data_ptr(), stride, gate.data_ptr(), gate.stride(0), out.data_ptr(), *out.shape
    )
    return out


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


def ngram_gate(
    embedding: Tensor,
    streams: Tensor,
    key: Tensor,
    value: Tensor,
    norm_key: Tensor,
    norm_query: Tensor,
    norm_conv: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    tokens, num_streams, hidden = streams.shape
    whole = (
        embedding.is_contiguous()
        and streams.is_contiguous()
        and is_packed(key)
        and is_packed(value)
    )
    if not 0 < tokens <= FEW_ROWS or not whole:
        return ngram.ngram_gate(
            embedding, streams, key, value, norm_key, norm_query, norm_conv, eps
        )
    gated, normed = torch.empty(streams.shape), torch.empty(tokens, num_streams * hidden)
    library().nrank_ngram_gate(
        embedding.data_ptr(), streams.data_ptr(), key.data_ptr(), value.data_ptr(),
        norm_key.data_ptr(), norm_query.data_ptr(), norm_conv.data_ptr(), gated.data_ptr(),
        normed.data_ptr(), tokens, num_streams, hidden, embedding.shape[1], eps,
    )  # fmt: skip
    return gated, normed


OPERATORS = (
    linear,
    hyper_mix,
    hyper_inject_,
    rms_norm,
    gated_rms_norm,
    route,
    moe_experts,
    gated_swiglu,
    table_rows,
    ngram_ids,
    ngram_gate,
)
