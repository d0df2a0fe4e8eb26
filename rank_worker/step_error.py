"""An exception inside a step, told with its place: rank, step, phase and the requests in the step.

Owns that message. A healthy step pays nothing for it: the phase is read off the traceback.
"""

from __future__ import annotations

from traceback import walk_tb

from placement.errors import RankError
from rank_worker.draft import Drafter
from rank_worker.slot_names import SlotNames
from rank_worker.step_plan import RowFlag, StepPlan

DRAFT, VERIFY, STEP = "draft", "verify", "step"


def step_error(error: Exception, rank: int, plan: StepPlan, names: SlotNames) -> RankError:
    """What `error` becomes. A RankError that names a rank, a step or a phase keeps it."""
    phase = _phase(error, plan)
    where = f"step {plan.step} (phase {phase}) of {names.text(plan)}"
    if not isinstance(error, RankError):
        text = f"rank {rank} failed in {where}: {type(error).__name__}: {error}"
        return RankError(text, rank, plan.step, phase)
    return type(error)(
        f"{error}; in {where}",
        error.rank if error.rank >= 0 else rank,
        error.step if error.step >= 0 else plan.step,
        error.phase or phase,
    )


def _phase(error: Exception, plan: StepPlan) -> str:
    """Draft: the head that makes drafts was at work. Verify: the step has drafts to check."""
    modules = {frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)}
    if Drafter.__module__ in modules:
        return DRAFT
    return VERIFY if any(row.flags & RowFlag.DRAFT for row in plan.rows) else STEP
