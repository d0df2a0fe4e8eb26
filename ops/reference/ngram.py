"""Hashed n-gram embedding: table rows of the last tokens, gated into the residual streams.

The caller owns the token history, the table's split over ranks and the dilated convolution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear

from ops.reference.norm import grouped_rms_norm

_GATE_FLOOR = 1e-6


def ngram_ids(
    history: Tensor, eos: int, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor
) -> Tensor:
    """Row ids [B, Q, h] of history [B, n - 1 + Q] int64 (padded with eos at a sequence's start).

    The n-gram of order m hashes XOR over j < m of (token j back) * multipliers[j], modulo the
    head's own vocab size, plus its offset; heads are grouped by order 2..n. A token across an
    earlier eos counts as eos: an eos sees its predecessors, the token after it sees none.
    """
    order = multipliers.shape[0]
    heads = vocab_sizes.shape[0] // (order - 1)
    queries = history.shape[1] - (order - 1)
    mixed = history[:, order - 1 :] * multipliers[0]
    same_text = torch.ones_like(mixed, dtype=torch.bool)
    rows = []
    for back in range(1, order):
        token = history[:, order - 1 - back : order - 1 - back + queries]
        same_text = same_text & (token != eos)
        mixed = mixed ^ (torch.where(same_text, token, eos) * multipliers[back])
        part = slice((back - 1) * heads, back * heads)
        rows.append(torch.remainder(mixed[..., None], vocab_sizes[part]) + offsets[part])
    return torch.cat(rows, dim=-1)


def table_rows(table: Tensor, ids: Tensor, start: int) -> Tensor:
    """Rows [..., w] of table [rows_local, w], the part of a larger one that begins at `start`.

    Ids [...] are global; rows of other ranks give exact zeros, so a sum over ranks is the lookup.
    """
    if table.shape[0] == 0:
        return table.new_zeros(*ids.shape, table.shape[1])
    local = ids - start
    owned = (local >= 0) & (local < table.shape[0])
    rows = table[local.clamp(0, table.shape[0] - 1)]
    return rows.masked_fill(~owned[..., None], 0)


def ngram_gate(
    embedding: Tensor,  # [T, D]
    streams: Tensor,  # [T, S, H]
    key: Tensor,  # [S * H, D]
    value: Tensor,  # [H, D]
    norm_key: Tensor,  # [S, H] fp32
    norm_query: Tensor,  # [S, H] fp32
    norm_conv: Tensor,  # [S, H] fp32
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gated values [T, S, H] and their normed form [T, S * H], the convolution's input.

    gate = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) with s = key . query / sqrt(H) a stream.
    """
    hidden = streams.shape[-1]
    keys = grouped_rms_norm(linear(embedding, key).view(streams.shape), norm_key, eps)
    queries = grouped_rms_norm(streams, norm_query, eps)
    score = (keys.float() * queries.float()).sum(-1) / math.sqrt(hidden)
    gate = torch.sigmoid(score.sign() * score.abs().clamp_min(_GATE_FLOOR).sqrt())
    gated = gate.to(streams.dtype)[..., None] * linear(embedding, value)[:, None, :]
    return gated, grouped_rms_norm(gated, norm_conv, eps).flatten(1)
