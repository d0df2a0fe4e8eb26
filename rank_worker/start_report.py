"""What a gang was planned to need, beside what it was measured to need when it had started.

Owns the comparison only: the plan and the ranks' snapshots come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from placement.explain import format_bytes
from placement.plan import Plan
from placement.roofline import StepEstimate
from rank_worker.affinity import cpus_text
from rank_worker.messages import RankSnapshot

CACHE_ROWS = ("kv_pages", "index_pages")  # bytes of a step that grow with the context
DRAFT_ROWS = ("mtp_weights", "mtp_state")


@dataclass(frozen=True)
class RankBytes:
    """Tensors of one rank: weights, caches and states. Workspace and reserve are no tensors."""

    rank: int
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class PrefixTier:
    """Kept states of one tier: as many on every rank, and the bytes that each rank set aside."""

    states: int
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True)
class StartReport:
    """`measured_step_s` is a warm-up decode step of one sequence with hardly any context, on the
    slowest rank; `estimated_step_s` the roofline of such a step, a bound from below.
    """

    estimated_step_s: float
    measured_step_s: float
    slowest_rank: int
    ranks: tuple[RankBytes, ...]
    recurrent_dtype: str = ""
    prefix_tiers: dict[str, PrefixTier] = field(default_factory=dict)  # device, host
    drafts_per_step: int = 0
    draft_bytes: tuple[int, ...] = ()  # of the draft head on each rank, with its cache
    cpus: tuple[tuple[int, ...], ...] = ()  # processors of each rank's step loop

    def lines(self) -> tuple[str, ...]:
        """One for the step and all memory, and one each for reuse, drafts and cores, where told."""
        told = [self._step()]
        if self.prefix_tiers:
            told.append(f"prefix cache: {self._tiers()}")
        if self.draft_bytes:
            told.append(f"multi-token prediction: {self._drafts()}")
        if any(self.cpus):
            told.append(f"processors: {self._cpus()}")
        return tuple(told)

    def _tiers(self) -> str:
        if not any(tier.states for tier in self.prefix_tiers.values()):
            return "off"
        tiers = ", ".join(
            f"{tier.states} states on the {name} ({_by_rank(tier.rank_bytes)})"
            for name, tier in self.prefix_tiers.items()
        )
        return f"{tiers}, recurrent parts in {self.recurrent_dtype}"

    def _drafts(self) -> str:
        if not self.drafts_per_step:
            return "off"
        return f"{self.drafts_per_step} drafts a step, draft head {_by_rank(self.draft_bytes)}"

    def _cpus(self) -> str:
        if len(self.cpus) > 1 and len(set(self.cpus)) == 1:
            return f"{cpus_text(self.cpus[0])}, shared by all ranks"
        return ", ".join(f"rank {rank} on {cpus_text(own)}" for rank, own in enumerate(self.cpus))

    def _step(self) -> str:
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
        recurrent_dtype=slow.recurrent_dtype,
        prefix_tiers=_prefix_tiers(snapshots),
        drafts_per_step=snapshots[0].drafts.drafts_per_step,
        draft_bytes=tuple(
            sum(one.memory_bytes.get(row, 0) for row in DRAFT_ROWS) for one in snapshots
        ),
        cpus=tuple(one.cpus for one in snapshots),
    )


def _prefix_tiers(snapshots: Sequence[RankSnapshot]) -> dict[str, PrefixTier]:
    figures = [one.prefix_cache for one in snapshots]
    return {
        tier: PrefixTier(states, tuple(one.cell_bytes.get(tier, 0) for one in figures))
        for tier, states in figures[0].cells.items()
    }


def _by_rank(sizes: Sequence[int]) -> str:
    return ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(sizes))


def short_step_s(estimate: StepEstimate) -> float:
    """The estimated step without reads of caches: the plan's is at the full context."""
    cached = sum(estimate.bytes_by_class.get(row, 0) for row in CACHE_ROWS)
    share = 1 - cached / estimate.bytes_per_step if estimate.bytes_per_step else 0.0
    return estimate.read_s * share + estimate.collective_s
