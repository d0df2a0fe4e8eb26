"""Short convolutions and the gated delta rule on the C++ kernels, for decode rows in fp32.

Other layouts go on to the torch variant or the reference of the same operator. Meaning:
`ops/reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.cpu import torch_variants as torch_variant
from ops.cpu.layout import FEW_ROWS, row_stride, token_stride
from ops.cpu.library import library
from ops.reference import delta, verify


def causal_conv_step(
    x: Tensor, weight: Tensor, windows: Tensor, slots: Tensor, dilation: int = 1
) -> Tensor:
    stride = row_stride(x)
    if not stride or not windows.is_contiguous():
        return torch_variant.causal_conv_step(x, weight, windows, slots, dilation)
    y, taps = torch.empty(x.shape), weight.t().contiguous()
    library().nrank_conv_step(
        x.data_ptr(), stride, taps.data_ptr(), windows.data_ptr(), slots.data_ptr(),
        y.data_ptr(), *x.shape, taps.shape[0], dilation,
    )  # fmt: skip
    return y


def causal_conv_chunk(
    x: Tensor, weight: Tensor, window: Tensor, dilation: int = 1
) -> tuple[Tensor, Tensor]:
    stride = row_stride(x)
    if not stride or not window.is_contiguous():
        return torch_variant.causal_conv_chunk(x, weight, window, dilation)
    y, taps = torch.empty(x.shape), weight.t().contiguous()
    slots = torch.zeros(1, dtype=torch.int64)
    library().nrank_conv_verify(
        x.data_ptr(), stride, taps.data_ptr(), window.data_ptr(), slots.data_ptr(),
        y.data_ptr(), 1, *x.shape, taps.shape[0], dilation,
    )  # fmt: skip
    return y, torch.cat((window, x[-len(window) :]))[-len(window) :]


def causal_conv_verify(
    x: Tensor, weight: Tensor, windows: Tensor, slots: Tensor, dilation: int = 1
) -> Tensor:
    stride = token_stride(x)
    if not stride or not windows.is_contiguous():
        return verify.causal_conv_verify(x, weight, windows, slots, dilation)
    y, taps = torch.empty(x.shape), weight.t().contiguous()
    library().nrank_conv_verify(
        x.data_ptr(), stride, taps.data_ptr(), windows.data_ptr(), slots.data_ptr(),
        y.data_ptr(), *x.shape, taps.shape[0], dilation,
    )  # fmt: skip
    return y


def window_commit_(x: Tensor, windows: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    whole = x.dim() == 3 and x.dtype == windows.dtype and windows.is_contiguous()
    words = x.element_size() // 4
    stride = token_stride(x) * words if whole else 0
    if not stride:
        return verify.window_commit_(x, windows, slots, counts)
    _, window, channels = windows.shape
    library().nrank_window_commit(  # copies words of 4 bytes, whatever they mean
        x.data_ptr(), stride, windows.data_ptr(), slots.data_ptr(), counts.data_ptr(),
        *x.shape[:2], window, channels * words,
    )  # fmt: skip
    return windows


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads = a.shape
    stride = row_stride(a)
    if not 0 < rows <= FEW_ROWS or not stride or stride != row_stride(b):
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
    out = _steps(q, k, v, g, beta, key_head, states, slots)
    if out is None:
        return torch_variant.gated_delta_step(q, k, v, g, beta, key_head, states, slots)
    return out


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
    """Token by token: the products of the chunk form cost more here, at any length."""
    states = state.clone(memory_format=torch.contiguous_format)[None]
    slots = torch.zeros(v.shape[0], dtype=torch.int64)
    out = _steps(q, k, v, g, beta, key_head, states, slots)
    if out is None:
        return delta.gated_delta_chunk(q, k, v, g, beta, key_head, state, chunk)
    return out, states[0]


def _steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    key_head: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor | None:
    """One token a row, one row after the other: a slot may recur. None for other layouts."""
    batch, key_heads, key_dim = q.shape
    heads, width = v.shape[1:]
    stride, v_stride = row_stride(q), row_stride(v)
    whole = g.is_contiguous() and beta.is_contiguous() and states.is_contiguous()
    if not stride or not v_stride or stride != row_stride(k) or not whole:
        return None
    out = torch.empty(batch, heads, width)
    library().nrank_delta_step(
        q.data_ptr(), k.data_ptr(), stride, v.data_ptr(), v_stride, g.data_ptr(),
        beta.data_ptr(), key_head.data_ptr(), states.data_ptr(), slots.data_ptr(),
        out.data_ptr(), batch, key_heads, heads, key_dim, width,
    )  # fmt: skip
    return out


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
    stride, v_stride = token_stride(q), token_stride(v)
    whole = g.is_contiguous() and beta.is_contiguous() and states.is_contiguous()
    if not stride or not v_stride or stride != token_stride(k) or not whole:
        return verify.gated_delta_verify(q, k, v, g, beta, key_head, states, slots)
    out = torch.empty(batch, tokens, heads, width)
    library().nrank_delta_verify(
        q.data_ptr(), k.data_ptr(), stride, v.data_ptr(), v_stride, g.data_ptr(),
        beta.data_ptr(), key_head.data_ptr(), states.data_ptr(), slots.data_ptr(),
        out.data_ptr(), batch, tokens, key_heads, heads, key_dim, width,
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
    stride, v_stride = token_stride(k), token_stride(v)
    whole = g.is_contiguous() and beta.is_contiguous() and states.is_contiguous()
    if not stride or not v_stride or not whole:
        return verify.gated_delta_commit_(k, v, g, beta, key_head, states, slots, counts)
    library().nrank_delta_commit(
        k.data_ptr(), stride, v.data_ptr(), v_stride, g.data_ptr(), beta.data_ptr(),
        key_head.data_ptr(), states.data_ptr(), slots.data_ptr(), counts.data_ptr(),
        batch, tokens, key_heads, heads, key_dim, width,
    )  # fmt: skip
    return states


OPERATORS = (
    causal_conv_step,
    causal_conv_chunk,
    causal_conv_verify,
    window_commit_,
    delta_gates,
    gated_delta_step,
    gated_delta_chunk,
    gated_delta_verify,
    gated_delta_commit_,
)
