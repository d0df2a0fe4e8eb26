"""Mixture-of-experts channel mixer: the routed experts this rank owns and its shared-expert slice.

Every rank sees all tokens and routes alike; routes to peers' experts contribute exact zeros. The
result is a partial sum of routed and shared output, reduced once by the layer driver.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lowbit.packed import Packed
from placement.config import RankShare
from placement.errors import ConfigError
from placement.experts import LayerHolders
from placement.spec import MoeSpec
from rank_worker.batch import Noted
from rank_worker.parts import Parts
from rank_worker.projection import Projection
from rank_worker.weights import Weight

BANKS = ("experts_gate_up", "experts_down")


class Experts:
    """The routed experts of this rank: two banks, plain or packed, each in a format of its own.

    One token is computed here, where the layer is loaded, so that banks which the device can't
    multiply are refused before the next layer is read.
    """

    def __init__(self, parts: Parts, gate_up: Weight, down: Weight) -> None:
        self.ops, self.int8_activations = parts.ops, parts.int8_activations
        self.is_packed = isinstance(gate_up, Packed)
        if self.is_packed != isinstance(down, Packed):
            raise ConfigError(
                "experts are packed in one bank and plain in the other: quantise both or none"
            )
        self.gate_up, self.down = (
            bank if isinstance(bank, Packed) else parts.device.pack_bank(bank)
            for bank in (gate_up, down)
        )
        if isinstance(gate_up, Packed):
            self._try(parts, gate_up)

    def _try(self, parts: Parts, gate_up: Packed) -> None:
        """ConfigError where a product of these banks fails."""
        x, weights = (torch.ones(1, n, dtype=self.ops.dtype) for n in (gate_up.shape[-1], 1))
        local = torch.full((1, 1), 0 if len(gate_up) else -1)
        try:
            self(x, weights, local)
        except RuntimeError as error:
            where = parts.device.capability(self.ops.dtype)
            chip, dtype = where.soc or where.backend, str(where.dtype).removeprefix("torch.")
            cause = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"experts in {gate_up.form.name} can't be computed in {dtype} on {chip} ({cause}): "
                "use a checkpoint in floats, or another --dtype or --device"
            ) from error

    def __call__(self, x: Tensor, weights: Tensor, local: Tensor) -> Tensor:
        """Partial sum [T, H]; `local` [T, k] are indices into the banks, -1 for a peer's route."""
        routes = (x, weights, local, self.gate_up, self.down)
        if self.is_packed:
            packed: Tensor = self.ops.packed_experts(*routes, self.int8_activations)
            return packed
        plain: Tensor = self.ops.moe_experts(*routes)
        return plain


class MoeChannel:
    """x [T, H] -> partial sum [T, H]. `counts` [experts] are routes since the last reset."""

    def __init__(
        self, parts: Parts, spec: MoeSpec, weights: dict[str, Tensor], prefix: str, layer: int
    ) -> None:
        self.ops, self.spec = parts.ops, spec
        self.experts = Experts(parts, *(weights.pop(f"{prefix}.{name}") for name in BANKS))
        self.local_of = local_experts(parts.share, parts.holders[layer], layer)
        self.num_turns = len(self.local_of)
        self.owns_all = torch.equal(self.local_of, torch.arange(spec.num_experts)[None])
        names = ("router", "shared_gate", "shared_gate_proj", "shared_up_proj")
        rows = [weights.pop(f"{prefix}.{name}") for name in names]
        self.widths = [row.shape[0] for row in rows[:2]] + [2 * rows[2].shape[0]]
        self.in_proj = Projection(parts, rows)
        self.shared_down = Projection(parts, [weights.pop(f"{prefix}.shared_down")])
        self.counts = torch.zeros(spec.num_experts, dtype=torch.int64)
        self._one = torch.ones(1, dtype=torch.int64)

    def forward(self, x: Tensor, positions: Tensor, noted: Noted) -> Tensor:
        logits, shared_gate, gate_up = torch.split_with_sizes(self.in_proj(x), self.widths, dim=-1)
        route_weights, ids = self.ops.route(logits, self.spec.top_k, self.spec.normalise_top_k)
        noted.note_decision(ids)
        counted = self._one if noted.counted is None else noted.counted[:, None]
        self.counts.index_add_(0, ids.view(-1), counted.expand(ids.shape).reshape(-1))
        local = self._local(ids, positions)
        out = self.experts(x, route_weights, local)
        shared = self.ops.gated_swiglu(gate_up, shared_gate)
        return out.add_(self.shared_down(shared))

    def _local(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[T, k]: which of this rank's experts computes a route, -1 for a peer's."""
        if self.owns_all:
            return ids
        if self.num_turns == 1:
            return self.local_of[0].index_select(0, ids.view(-1)).view(ids.shape)
        turns = self.local_of.index_select(0, positions % self.num_turns)
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
