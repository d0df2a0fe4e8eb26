"""Who drafts when: rows, pages and budget of drafts, and when a sequence gives them up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rank_worker.draft_gain import ALLOWANCE
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch
from rank_worker.outline import Outline
from rank_worker.scheduler import NON_FINITE, Scheduler, SchedulerLimits
from rank_worker.step_plan import Row, RowFlag, StepPlan

LIMITS = SchedulerLimits(
    step_tokens=32, prefill_chunk_tokens=0, page_tokens=4, num_pages=32, num_slots=4,
    context_tokens=64, check_interval_steps=4, num_drafts=2, drafts_auto=False,
)  # fmt: skip
SAMPLE, DRAFT, ENTER, PROPOSE = RowFlag.SAMPLE, RowFlag.DRAFT, RowFlag.ENTER, RowFlag.PROPOSE
PREFILL, ROUND = RowFlag.PREFILL, DRAFT | ENTER | PROPOSE | SAMPLE


def request(name: str = "a", prompt: int = 5, tokens: int = 30, **more: Any) -> EngineRequest:
    return EngineRequest(name, tuple(range(100, 100 + prompt)), tokens, **more)


def started(limits: SchedulerLimits = LIMITS, *requests: EngineRequest) -> Scheduler:
    """All prompts computed in one step, one token made of each."""
    scheduler = Scheduler(limits)
    for one in requests or (request(),):
        scheduler.add(one)
    scheduler.schedule()
    scheduler.update([[7]] * len(scheduler.running))
    return scheduler


def step(
    scheduler: Scheduler, accepted: int = 0, seconds: float = 0.0
) -> tuple[StepPlan, list[TokenBatch]]:
    """One step in which each row with drafts keeps `accepted`; made tokens are 7."""
    plan = scheduler.schedule()
    rows = [row for row in plan.rows if row.flags & SAMPLE]
    made = [[7] * (1 + accepted if row.flags & DRAFT else 1) for row in rows]
    batches = scheduler.update(made, seconds=seconds)
    scheduler.check_integrity()
    return plan, batches


def test_a_prompt_enters_the_head_and_its_end_makes_drafts() -> None:
    scheduler = Scheduler(replace(LIMITS, prefill_chunk_tokens=3))
    scheduler.add(request())
    plan, _ = step(scheduler)
    assert plan.rows == (Row(0, 0, 3, PREFILL | ENTER, next_token=103),)
    plan, _ = step(scheduler)
    assert plan.rows == (Row(0, 3, 2, PREFILL | SAMPLE | ENTER | PROPOSE),)
    plan, _ = step(scheduler, accepted=2)
    assert plan.rows == (Row(0, 5, 3, ROUND),)
    plan, _ = step(scheduler)
    assert plan.rows == (Row(0, 8, 3, ROUND),), "goes on after the three tokens that stay"


def test_plain_and_wide_rows_stand_in_groups() -> None:
    scheduler = started(LIMITS, *(request(name) for name in "abcd"))
    scheduler.running[2].has_drafts = False
    plan, _ = step(scheduler)
    assert [row.count for row in plan.rows] == [1, 3, 3, 3]
    assert plan.rows[0].flags == SAMPLE | ENTER | PROPOSE


def test_drafts_leave_each_sequence_its_token_and_prefill_its_half() -> None:
    scheduler = started(replace(LIMITS, step_tokens=20), *(request(name) for name in "abcd"))
    scheduler.limits = replace(LIMITS, step_tokens=7)
    plan, _ = step(scheduler)
    assert [row.count for row in plan.rows] == [1, 1, 1, 3]
    scheduler.abort(["d"])
    scheduler.add(request("late", 20))
    plan, _ = step(scheduler)
    assert [row.count for row in plan.rows] == [1, 1, 3, 2]
    assert sum(row.count for row in plan.rows) == 7


def test_drafts_take_only_pages_that_are_free() -> None:
    """Both prompts fill their pages: a wider row would need one more, and gets none."""
    limits = replace(LIMITS, num_pages=16, step_tokens=100)
    scheduler = started(limits, request("a", 38), request("b", 23))
    assert scheduler.cache.num_available == 0
    assert all(s.has_drafts for s in scheduler.running)
    plan, _ = step(scheduler)
    assert [row.count for row in plan.rows] == [1, 1]
    assert scheduler.num_preemptions == 0
    plain = started(replace(limits, num_drafts=0), request("a", 38), request("b", 23))
    for one in (scheduler, plain):
        while one.has_work:
            step(one)
    assert scheduler.num_preemptions == plain.num_preemptions > 0


def test_no_drafts_are_made_for_a_token_that_is_never_sampled() -> None:
    """Of three tokens the first comes from the prompt; drafts pay for two more or not at all."""
    for tokens, entered in ((1, False), (2, False), (3, True)):
        scheduler = Scheduler(LIMITS)
        scheduler.add(request(tokens=tokens))
        plan, _ = step(scheduler)
        assert bool(plan.rows[0].flags & PROPOSE) is entered
        assert bool(plan.rows[0].flags & ENTER) is entered
    plan, batches = step(scheduler, accepted=2)
    assert plan.rows[0].flags == SAMPLE | DRAFT
    assert batches[0].token_ids == (7, 7)


def test_a_row_without_room_in_the_context_runs_plain() -> None:
    scheduler = started(replace(LIMITS, context_tokens=8), request(tokens=60))
    plan, batches = step(scheduler)
    assert plan.rows[0].count == 3
    plan, batches = step(scheduler)
    assert (plan.rows[0].start, plan.rows[0].count) == (6, 1)
    assert batches[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("made", "taken", "reason", "accepted"),
    [
        ([7, 8, 9], (7, 8, 9), None, 2),
        ([7, 50, 9], (7, 50), FinishReason.STOP, 2),
        ([50, 8, 9], (50,), FinishReason.STOP, 1),
        ([7, 8, NON_FINITE], (7, 8), FinishReason.ERROR, 2),
        ([7, NON_FINITE], (7,), FinishReason.ERROR, 1),
        ([7, 50, NON_FINITE], (7, 50), FinishReason.STOP, 2),
        ([NON_FINITE], (), FinishReason.ERROR, 0),
    ],
)
def test_an_answer_ends_inside_a_round(
    made: list[int], taken: tuple[int, ...], reason: FinishReason | None, accepted: int
) -> None:
    scheduler = started(LIMITS, request(stop_token_ids=(50,)))
    scheduler.schedule()
    (batch,) = scheduler.update([made])
    assert (batch.token_ids, batch.finish_reason) == (taken, reason)
    assert (batch.draft_tokens, batch.accepted_tokens) == (2, accepted)
    assert scheduler.generation_tokens == 1 + len(taken)
    assert (batch.error_kind == "non_finite") is (reason is FinishReason.ERROR)


def test_max_tokens_cuts_a_round() -> None:
    scheduler = started(LIMITS, request(tokens=3))
    _, (batch,) = step(scheduler, accepted=2)
    assert (batch.token_ids, batch.finish_reason) == ((7, 7), FinishReason.LENGTH)


def test_acceptance_is_counted_by_position() -> None:
    scheduler = started()
    for accepted in (2, 0, 1, 2):
        step(scheduler, accepted)
    assert scheduler.draft_rounds == 4
    assert scheduler.accepted_by_position == [3, 2]
    assert (scheduler.running[0].draft_tokens, scheduler.running[0].accepted_tokens) == (8, 5)


AUTO = replace(LIMITS, drafts_auto=True, context_tokens=128)


def test_a_step_without_drafts_is_made_to_be_measured() -> None:
    scheduler = started(AUTO, request(tokens=100))
    plan, _ = step(scheduler, seconds=1.0)
    assert plan.rows[0].flags == SAMPLE | ENTER, "no entry of the head may be missing"
    plan, _ = step(scheduler, seconds=5.0)
    assert plan.rows[0].flags == SAMPLE | ENTER | PROPOSE
    plan, _ = step(scheduler, seconds=1.5)
    assert plan.rows[0].flags == ROUND
    assert scheduler.cost.ratio(1) == pytest.approx(1.5)


def test_a_sequence_that_drafts_slow_down_stops_for_good() -> None:
    scheduler = started(AUTO, request(tokens=100))
    (sequence,) = scheduler.running
    for seconds in (1.0, 5.0, 3.0, 3.0):
        assert sequence.is_drafting
        step(scheduler, 0, seconds)
    assert sequence.gain.best - sequence.gain.steps > 2 * ALLOWANCE
    assert not sequence.is_drafting
    for _ in range(3):
        plan, _ = step(scheduler)
        assert plan.rows[0].flags == SAMPLE
    scheduler._preempt(Outline(0), sequence)
    plan, _ = step(scheduler)
    assert plan.rows[0].flags == PREFILL | SAMPLE, "not after a preemption either"


def test_a_sequence_that_gains_goes_on() -> None:
    scheduler = started(AUTO, request(tokens=100))
    for seconds in (1.0, 5.0, *[1.5] * 30):
        step(scheduler, 1, seconds)
    assert scheduler.running[0].is_drafting
