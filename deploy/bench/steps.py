"""What the steps of a run spent their time on, from the counters of rank 0.

Differences of two snapshots, one before and one after a run of a gang that was idle at both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rank_worker.messages import RankSnapshot

REST = "rest"  # of a step, in none of its parts: with gloo the collectives, which it can't tell


@dataclass(frozen=True)
class StepTimes:
    """Steps of one run, their seconds, and those by part (see rank_worker.step_clock)."""

    steps: int
    seconds: float
    parts: Mapping[str, float]

    @classmethod
    def between(cls, before: RankSnapshot, after: RankSnapshot) -> StepTimes:
        parts = {
            part: seconds - before.step_parts.get(part, 0.0)
            for part, seconds in after.step_parts.items()
        }
        steps = after.busy_steps - before.busy_steps
        return cls(steps, after.step_seconds - before.step_seconds, parts)


@dataclass(frozen=True)
class StepSplit:
    """The mean step of some runs, prefill among them; `parts_ms` add up to `step_ms`."""

    steps: int
    step_ms: float
    parts_ms: dict[str, float]

    @classmethod
    def of(cls, runs: Sequence[StepTimes | None]) -> StepSplit | None:
        """None for a system that tells nothing of its steps, or that made none."""
        known = [times for times in runs if times is not None]
        steps = sum(times.steps for times in known)
        if not steps:
            return None
        seconds = sum(times.seconds for times in known)
        by_part = {
            part: sum(times.parts.get(part, 0.0) for times in known) for part in known[0].parts
        }
        by_part[REST] = seconds - sum(by_part.values())
        scale = 1e3 / steps
        return cls(steps, seconds * scale, {p: s * scale for p, s in by_part.items()})
