"""Mixture-of-experts channel mixer: the routed experts this rank owns and its shared-expert slice.

Every rank sees all tokens and routes alike; routes to peers' experts contribute exact zeros. The
result is a partial sum of routed and shared output, reduced once by the layer driver.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
        self.gate_up = packed_bank(weights.pop(f"{prefix}.experts_gate_up"), pack)
        self.down = packed_bank(weights.pop(f"{prefix}.experts_down"), pack)
        self.local_of = local_experts(parts.share, parts.holders[layer], layer)
        self.num_turns = len(self.local_of)
        self.owns_all = torch.equal(self.local_of, torch.arange(spec.num_experts)[None])
        names = ("router", "shared_gate", "shared_gate_proj", "shared_up_proj")
        rows = [weights.pop(f"{prefix}.{name}") for name in names]
        self.widths = [row.shape[0] for row in rows[:2]] + [2 * rows[2].shape[0]]
        self.in_proj = pack(torch.cat(rows))
        self.shared_down = pack(weights.pop(f"{prefix}.shared_down"))
        self.counts = torch.zeros(spec.num_experts, dtype=torch.int64)
        self._one = torch.ones(1, dtype=torch.int64)

    def forward(self, x: Tensor, positions: Tensor, noted: Noted) -> Tensor:
        logits, shared_gate, gate_up = torch.split_with_sizes(
            self.ops.linear(x, self.in_proj), self.widths, dim=-1
        )
        route_weights, ids = self.ops.route(logits, self.spec.top_k, self.spec.normalise_top_k)
        noted.note_decision(ids)
        self.counts.index_add_(0, ids.view(-1), self._one.expand(ids.numel()))
        local = self._local(ids, positions)
        out = self.ops.moe_experts(x, route_weights, local, self.gate_up, self.down)
        shared = self.ops.gated_swiglu(gate_up, shared_gate)
        return out.add_(self.ops.linear(shared, self.shared_down))

    def _local(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[T, k]: which of this rank's experts computes a route, -1 for a peer's."""
        if self.owns_all:
            return ids
        if self.num_turns == 1:
            return self.local_of[0].index_select(0, ids.view(-1)).view(ids.shape)
        turns = self.local_of.index_select(0, positions % self.num_turns)
        return turns.gather(1, ids)


def packed_bank(bank: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """`bank` [experts, out, in] with each expert in the device's layout.

    Rewritten in place, so that no more than one expert is in memory twice.
    """
    strides = bank.stride()
    for expert in bank:
        packed = pack(expert)
        expert.as_strided(packed.shape, packed.stride()).copy_(packed)
        strides = (bank.stride(0), *packed.stride())
    return bank.as_strided(bank.shape, strides)


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
