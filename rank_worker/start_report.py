"""What a gang was planned to need, beside what it was measured to need when it had started.

Owns the comparison only: the plan and the ranks' snapshots come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.explain import format_bytes
from placement.plan import Plan
from placement.roofline import StepEstimate
from rank_worker.messages import RankSnapshot

CACHE_ROWS = ("kv_pages", "index_pages")  # bytes of a step that grow with the context


@dataclass(frozen=True)
class RankBytes:
    """Tensors of one rank: weights, caches and states. Workspace and reserve are no tensors."""

    rank: int
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class StartReport:
    """`measured_step_s` is a warm-up decode step of one sequence with hardly any context, on the
    slowest rank; `estimated_step_s` the roofline of such a step, a bound from below.
    """

    estimated_step_s: float
    measured_step_s: float
    slowest_rank: int
    ranks: tuple[RankBytes, ...]

    def text(self) -> str:
        """One line."""
        sizes = ", ".join(
            f"rank {one.rank} {format_bytes(one.planned_bytes)} and "
            f"{format_bytes(one.measured_bytes)}"
            for one in self.ranks
        )
        return (
            f"decode step: at least {self.estimated_step_s * 1e3:.3g} ms estimated, "
            f"{self.measured_step_s * 1e3:.3g} ms measured (one sequence, short context, slowest "
            f"rank {self.slowest_rank}); weights and caches planned and measured: {sizes}"
        )


def start_report(plan: Plan, snapshots: Sequence[RankSnapshot]) -> StartReport:
    """Of a started gang; `snapshots` has one of every rank, in order of rank."""
    slow = max(snapshots, key=lambda one: one.warm_step_seconds)
    return StartReport(
        estimated_step_s=short_step_s(plan.estimate),
        measured_step_s=slow.warm_step_seconds,
        slowest_rank=slow.rank,
        ranks=tuple(
            RankBytes(
                one.rank,
                sum(plan.ranks[one.rank].rows.get(row, 0) for row in one.memory_bytes),
                sum(one.memory_bytes.values()),
            )
            for one in snapshots
        ),
    )


def short_step_s(estimate: StepEstimate) -> float:
    """The estimated step without reads of caches: the plan's is at the full context."""
    cached = sum(estimate.bytes_by_class.get(row, 0) for row in CACHE_ROWS)
    share = 1 - cached / estimate.bytes_per_step if estimate.bytes_per_step else 0.0
    return estimate.read_s * share + estimate.collective_s
