"""Mixture of experts: routing, the experts a rank owns, and the dense SwiGLU block.

All ranks see all tokens; a route to a peer's expert adds an exact zero here. Who owns which
expert is the caller's business: routes name experts of this rank's own bank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ops.reference.tiles import TILE_ELEMENTS
from ops.reference.topk import stable_top_k

# Up to here the experts' weights are gathered a route, which needs no host read (decode).
FEW_ROUTES = 256


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, k] (dtype of logits) and expert ids [T, k] int64 of logits [T, E].

    Softmax in fp32 over all experts, then top-k (ties to the lowest id); `normalise` divides by
    the sum of the chosen.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)
    ids, _ = stable_top_k(probabilities, top_k)
    weights = probabilities.gather(1, ids)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def gated_swiglu(gate_up: Tensor, gate: Tensor) -> Tensor:
    """silu(g) * u * sigmoid(gate): gate_up [T, 2I] (g first), gate [T, 1] -> [T, I]."""
    return _swiglu(gate_up) * torch.sigmoid(gate)


def swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x): x [T, H], gate_up [2I, H] (gate first), down [H, I]; I may be 0.

    With I cut over ranks the result is a partial sum.
    """
    return linear(_swiglu(linear(x, gate_up)), down)


def moe_experts(
    x: Tensor,  # [T, H]
    weights: Tensor,  # [T, k]
    local: Tensor,  # [T, k] int64: index into El, -1 for a route that a peer computes
    gate_up: Tensor,  # [El, 2I, H]
    down: Tensor,  # [El, H, I]
) -> Tensor:
    """Partial sum [T, H] of weights * expert(x) over the routes that this rank owns."""
    if gate_up.shape[0] == 0 or x.shape[0] == 0:
        return torch.zeros_like(x)
    if local.numel() <= FEW_ROUTES:
        return _by_route(x, weights, local, gate_up, down)
    return _by_expert(x, weights, local, gate_up, down)


def _by_route(x: Tensor, weights: Tensor, local: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One small product a route, with the weights gathered tile by tile; reads nothing back."""
    top_k = local.shape[1]
    owned = (local >= 0).flatten()
    expert = local.flatten().clamp_min(0)
    tile = max(1, TILE_ELEMENTS // gate_up[0].numel()) if gate_up[0].numel() else len(expert)
    parts = []
    for start in range(0, len(expert), tile):
        chosen = expert[start : start + tile]
        row = torch.arange(start, start + len(chosen), device=x.device) // top_k
        hidden = _swiglu(torch.bmm(gate_up[chosen], x[row][..., None])[..., 0])
        parts.append(torch.bmm(down[chosen], hidden[..., None])[..., 0].float())
    routed = torch.cat(parts) * weights.flatten()[:, None].float()
    routed = routed.masked_fill(~owned[:, None], 0)
    return routed.view(*local.shape, -1).sum(dim=1).to(x.dtype)


def _by_expert(x: Tensor, weights: Tensor, local: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Routes sorted by expert, one product a busy expert; reads the segment sizes once.

    An expert appears once a token at most, so each `index_add_` touches a row once and the sum
    has one order: that of the expert index.
    """
    flat = local.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
    share = weights.flatten().float()
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index, routes in enumerate(torch.split(order, counts)[1:]):
        if len(routes):
            rows = routes // local.shape[1]
            y = swiglu_mlp(x[rows], gate_up[index], down[index]).float()
            result.index_add_(0, rows, y * share[routes][:, None])
    return result.to(x.dtype)
