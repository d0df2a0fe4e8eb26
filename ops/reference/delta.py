"""Gated delta rule: a recurrent state [key_dim, value_dim] a value head, in fp32.

One token does: S <- exp(g) S; m = S^T k; S <- S + k (beta (v - m))^T; o = S^T q, with q and k
normalised to unit length and q scaled by key_dim ** -0.5. The chunk form gives the same result
through one triangular solve a chunk (Yang et al., "Gated Delta Networks", section 3.3). Knows
nothing of slots beyond an index, nor of sequences beyond the rows it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

_L2_EPS = 1e-6


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay g <= 0 and write strength beta, both [N, Hv] fp32, from a, b [N, Hv].

    beta is rounded to the activation dtype first, as in training.
    """
    g = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g, torch.sigmoid(b).float()


def _unit_length(x: Tensor) -> Tensor:
    values = x.float()
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + _L2_EPS)


def per_value_head(q: Tensor, k: Tensor, key_head: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised q (scaled) and k [N, Hk, dk], repeated for the value heads: [N, Hv, dk] fp32."""
    scaled = _unit_length(q) * q.shape[-1] ** -0.5
    return scaled.index_select(1, key_head), _unit_length(k).index_select(1, key_head)


def delta_update(state: Tensor, key: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The state [B, Hv, dk, dv] after one token a row: key [B, Hv, dk], v [B, Hv, dv]."""
    state = state * g.exp()[..., None, None]
    read = torch.matmul(key[..., None, :], state)[..., 0, :]
    delta = (v.float() - read) * beta[..., None]
    return state + key[..., :, None] * delta[..., None, :]


def gated_delta_step(
    q: Tensor,  # [B, Hk, dk]
    k: Tensor,  # [B, Hk, dk]
    v: Tensor,  # [B, Hv, dv]
    g: Tensor,  # [B, Hv] fp32
    beta: Tensor,  # [B, Hv] fp32
    key_head: Tensor,  # [Hv] int64: key head that serves a value head
    states: Tensor,  # [slots, Hv, dk, dv] fp32, updated in place
    slots: Tensor,  # [B] int64
) -> Tensor:
    """One token a row; returns o [B, Hv, dv] in the dtype of v."""
    query, key = per_value_head(q, k, key_head)
    state = delta_update(states.index_select(0, slots), key, v, g, beta)
    states.index_copy_(0, slots, state)
    return torch.matmul(query[..., None, :], state)[..., 0, :].to(v.dtype)


def gated_delta_chunk(
    q: Tensor,  # [T, Hk, dk]
    k: Tensor,  # [T, Hk, dk]
    v: Tensor,  # [T, Hv, dv]
    g: Tensor,  # [T, Hv] fp32
    beta: Tensor,  # [T, Hv] fp32
    key_head: Tensor,  # [Hv] int64
    state: Tensor,  # [Hv, dk, dv] fp32
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """T >= 1 tokens of one sequence: o [T, Hv, dv] in the dtype of v, and the new state."""
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
    """query, key [Hv, C, dk], value [Hv, C, dv], g, beta [Hv, C] -> o [Hv, C, dv], new state.

    With D[i, j] = exp(sum of g over j+1..i) the corrected values u solve
    (I + strictly_lower(beta k k^T * D)) u = beta (v - D[i, start] k S).
    """
    total = g.cumsum(1)  # log decay from the chunk's start
    from_start = total.exp()[..., None]
    future = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    pair = (total[:, :, None] - total[:, None, :]).masked_fill(future, float("-inf")).exp()
    written = beta[..., None] * (value - from_start * torch.matmul(key, state))
    system = torch.matmul(beta[..., None] * key, key.transpose(1, 2)) * pair
    u = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    within = torch.matmul(query, key.transpose(1, 2)) * pair
    output = torch.matmul(query * from_start, state) + torch.matmul(within, u)
    to_end = (total[:, -1:] - total).exp()[..., None]
    added = torch.matmul((key * to_end).transpose(1, 2), u)
    return output, state * total[:, -1].exp()[:, None, None] + added
