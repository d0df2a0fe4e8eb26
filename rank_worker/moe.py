"""Mixture-of-experts channel mixer: the routed experts this rank owns and its shared-expert slice.

Every rank sees all tokens and routes alike; routes to peers' experts contribute exact zeros. The
result is a partial sum of routed and shared output, reduced once by the layer driver.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from placement.config import RankShare
from placement.experts import LayerHolders
from placement.spec import MoeSpec
from rank_worker.batch import Noted
from rank_worker.parts import Parts


class MoeChannel:
    """x [T, H] -> partial sum [T, H]. `counts` [experts] are routes since the last reset."""

    def __init__(
        self, parts: Parts, spec: MoeSpec, weights: dict[str, Tensor], prefix: str, layer: int
    ) -> None:
        pack = parts.device.pack_linear
        self.ops, self.spec = parts.ops, spec
        self.gate_up = weights.pop(f"{prefix}.experts_gate_up")
        self.down = weights.pop(f"{prefix}.experts_down")
        self.local_of = local_experts(parts.share, parts.holders[layer], layer)
        names = ("router", "shared_gate", "shared_gate_proj", "shared_up_proj")
        rows = [weights.pop(f"{prefix}.{name}") for name in names]
        self.widths = [row.shape[0] for row in rows[:2]] + [2 * rows[2].shape[0]]
        self.in_proj = pack(torch.cat(rows))
        self.shared_down = pack(weights.pop(f"{prefix}.shared_down"))
        self.counts = torch.zeros(spec.num_experts, dtype=torch.int64)
        self._one = torch.ones(1, dtype=torch.int64)

    def forward(self, x: Tensor, positions: Tensor, noted: Noted) -> Tensor:
        logits, shared_gate, gate_up = torch.split_with_sizes(
            linear(x, self.in_proj), self.widths, dim=-1
        )
        route_weights, ids = self.ops.route(logits, self.spec.top_k, self.spec.normalise_top_k)
        noted.note_decision(ids)
        self.counts.index_add_(0, ids.view(-1), self._one.expand(ids.numel()))
        local = self._local(ids, positions)
        out = self.ops.moe_experts(x, route_weights, local, self.gate_up, self.down)
        shared = self.ops.gated_swiglu(gate_up, shared_gate)
        return out.add_(linear(shared, self.shared_down))

    def _local(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[T, k]: which of this rank's experts computes a route, -1 for a peer's."""
        if len(self.local_of) == 1:
            return self.local_of[0].index_select(0, ids.view(-1)).view(ids.shape)
        turns = self.local_of.index_select(0, positions % len(self.local_of))
        return turns.gather(1, ids)


def local_experts(share: RankShare, holders: LayerHolders, layer: int) -> Tensor:
    """[turns, experts] int64: index into this rank's bank, -1 where a peer computes the route.

    An expert on several ranks is computed by one of them, in turn by a token's position, so that
    every rank knows without asking and a sequence takes the same turns in any batch.
    """
    own = {expert: index for index, expert in enumerate(share.experts[layer])}
    turns = max(len(ranks) for ranks in holders)
    table = torch.full((turns, len(holders)), -1, dtype=torch.int64)
    for expert, ranks in enumerate(holders):
        for turn in range(turns):
            if ranks[turn % len(ranks)] == share.rank:
                table[turn, expert] = own[expert]
    return table
