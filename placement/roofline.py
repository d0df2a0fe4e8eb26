"""A lower bound on the time of one decode step: bytes the busiest rank reads over its bandwidth.

Communication, launches and cache reads are not counted, so a real step takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.config import RankShare
from placement.ledger import weight_bytes
from placement.spec import Component, ModelSpec
from placement.topology import ChipProfile

# Looked up by row, not read whole.
LOOKUP_ROLES = ("embed", "ngram.table")


@dataclass(frozen=True)
class StepEstimate:
    """One token of one sequence: bytes the busiest rank reads, and the seconds that takes."""

    bytes_per_step: int
    decode_step_s: float


def estimate_decode_step(
    spec: ModelSpec, shares: Sequence[RankShare], item_bytes: int, profile: ChipProfile
) -> StepEstimate:
    """Dense weights whole, and top_k of the experts spread evenly over those there are."""
    worst = max(_step_bytes(spec, share, item_bytes) for share in shares)
    return StepEstimate(worst, worst / profile.bandwidth_bytes_per_s)


def _step_bytes(spec: ModelSpec, share: RankShare, item_bytes: int) -> int:
    read = [t for t in spec.tensors if not t.role.endswith(LOOKUP_ROLES)]
    rows = weight_bytes(read, share, item_bytes)
    routed = rows.pop(Component.ROUTED_EXPERTS.value, 0)
    moe = spec.layers[0].channel
    return sum(rows.values()) + routed * moe.top_k // moe.num_experts
