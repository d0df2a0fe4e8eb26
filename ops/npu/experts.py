"""Routing, and this rank's experts as two grouped products, without a host read.

What the chip would corrupt is kept away from it: a route to a peer's expert gets a real bucket of
its own behind the owned ones, because npu_moe_init_routing_v2 counts an id beyond its last expert
out of bounds; rows of that bucket are cut off by selection, never multiplied by zero. The capacity
is tokens x top-k. Sorting is in fp32, because an int64 sort leaves the chip for its AI CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.npu import library
from ops.reference.moe import moe_experts as _no_experts

COUNTS_CUMULATED = 0  # expert_tokens_num_type
GATHER_INDEX = 0  # row_idx_type
NO_QUANTISATION = -1
SPLIT_ROWS = 0  # group_type
ONE_OUTPUT = 2  # split_item


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    probabilities = torch.softmax(logits.float(), dim=-1)
    ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids[:, :top_k].contiguous()


def gated_swiglu(gate_up: Tensor, gate: Tensor) -> Tensor:
    hidden: Tensor = library.library().npu_swiglu(gate_up)
    return hidden.mul_(torch.sigmoid(gate))


def swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    linear = torch.nn.functional.linear
    return linear(library.library().npu_swiglu(linear(x, gate_up)), down)


def moe_experts(x: Tensor, weights: Tensor, local: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    owned = gate_up.shape[0]
    if owned == 0 or x.shape[0] == 0:
        return _no_experts(x, weights, local, gate_up, down)
    rows, row_of, ends, is_ours = dispatch(x, local, owned)
    hidden = library.library().npu_swiglu(grouped(rows, gate_up, ends))
    return combine(grouped(hidden, down, ends), row_of, ends, weights, is_ours)


def dispatch(x: Tensor, local: Tensor, owned: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of all routes sorted by expert, peers' last.

    Returns rows [T * k, H], where each route's row lies [T * k] int32, the ends of the owned
    experts' segments [owned] int64, and which routes are ours [T, k].
    """
    is_ours = local >= 0
    ids = torch.where(is_ours, local, owned).to(torch.int32)
    buckets = owned + 1  # the last one is the peers'
    rows, row_of, ends, _ = library.library().npu_moe_init_routing_v2(
        x, ids, active_num=ids.numel(), expert_capacity=0, expert_num=buckets, drop_pad_mode=0,
        expert_tokens_num_type=COUNTS_CUMULATED, expert_tokens_num_flag=True,
        quant_mode=NO_QUANTISATION, active_expert_range=[0, buckets], row_idx_type=GATHER_INDEX,
    )  # fmt: skip
    return rows, row_of, ends[:owned].to(torch.int64), is_ours


def combine(
    outputs: Tensor, row_of: Tensor, ends: Tensor, weights: Tensor, is_ours: Tensor
) -> Tensor:
    """[T, H]: weighted sum of each token's routes; rows behind the last segment hold anything."""
    row = torch.arange(outputs.shape[0], device=outputs.device)
    outputs = torch.where((row < ends[-1])[:, None], outputs, 0)
    shares = torch.where(is_ours, weights, 0).to(outputs.dtype)
    summed: Tensor = library.library().npu_moe_token_unpermute(outputs, row_of, shares)
    return summed


def grouped(rows: Tensor, bank: Tensor, ends: Tensor) -> Tensor:
    """rows [M, K] by segments times bank [experts, N, K] -> [M, N]; the operator wants K first."""
    (out,) = library.library().npu_grouped_matmul(
        [rows], [bank.transpose(1, 2)], group_list=ends, split_item=ONE_OUTPUT,
        group_type=SPLIT_ROWS, group_list_type=COUNTS_CUMULATED,
    )  # fmt: skip
    result: Tensor = out
    return result


OPERATORS = (route, gated_swiglu, swiglu_mlp, moe_experts)
