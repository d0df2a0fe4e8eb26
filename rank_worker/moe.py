"""Mixture-of-experts channel mixer: the routed experts this rank owns and its shared-expert slice.

Every rank sees all tokens and routes alike; routes to peers' experts contribute exact zeros. The
result is a partial sum of routed and shared output, reduced once by the layer driver.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from placement.spec import MoeSpec
from rank_worker.batch import StepBatch
from rank_worker.parts import Parts


class MoeChannel:
    """x [T, H] -> partial sum [T, H]."""

    def __init__(
        self,
        parts: Parts,
        spec: MoeSpec,
        weights: dict[str, Tensor],
        prefix: str,
        experts: tuple[int, ...],
    ) -> None:
        pack = parts.device.pack_linear
        self.ops, self.spec = parts.ops, spec
        self.gate_up = weights.pop(f"{prefix}.experts_gate_up")
        self.down = weights.pop(f"{prefix}.experts_down")
        self.local_of = torch.full((spec.num_experts,), -1, dtype=torch.int64)
        self.local_of[torch.tensor(experts, dtype=torch.int64)] = torch.arange(len(experts))
        names = ("router", "shared_gate", "shared_gate_proj", "shared_up_proj")
        rows = [weights.pop(f"{prefix}.{name}") for name in names]
        self.widths = [row.shape[0] for row in rows[:2]] + [2 * rows[2].shape[0]]
        self.in_proj = pack(torch.cat(rows))
        self.shared_down = pack(weights.pop(f"{prefix}.shared_down"))

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        logits, shared_gate, gate_up = torch.split_with_sizes(
            linear(x, self.in_proj), self.widths, dim=-1
        )
        route_weights, ids = self.ops.route(logits, self.spec.top_k, self.spec.normalise_top_k)
        if batch.decisions is not None:
            batch.note_decision(ids)
        out = self.ops.moe_experts(x, route_weights, ids, self.gate_up, self.down, self.local_of)
        shared = self.ops.gated_swiglu(gate_up, shared_gate)
        return out.add_(linear(shared, self.shared_down))
