"""Reuse of prefixes: what is found, what is kept where, what makes room, and that nothing mixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rank_worker.messages import EngineRequest, FinishReason
from rank_worker.prefix_cache import MISS_REASONS
from rank_worker.scheduler import SchedulerLimits
from rank_worker.step_plan import CopyKind, RowFlag, StepPlan
from tests.rank_worker.fake_device import Run, check_answers

LIMITS = SchedulerLimits(
    step_tokens=64, prefill_chunk_tokens=0, page_tokens=4, num_pages=64, num_slots=4,
    context_tokens=128, check_interval_steps=4, prefix_states=8, prefix_host_states=8,
    prefix_interval_tokens=32,
)  # fmt: skip
PROMPT = tuple(range(100, 130))  # 7 pages and 2 tokens


def kinds(plans: list[StepPlan]) -> list[CopyKind]:
    return [copy.kind for plan in plans for copy in plan.copies]


def cached(run: Run, *prompt: int, **options: Any) -> int:
    return run.answer(*prompt, **options).cached_tokens


def counts_add_up(run: Run) -> None:
    counts = run.scheduler.cache.counts
    assert counts.queries == counts.hits + sum(counts.misses.values())
    assert set(counts.misses) == set(MISS_REASONS)


def test_a_repeated_prompt_computes_only_its_open_page() -> None:
    run = Run(LIMITS)
    assert cached(run, *PROMPT) == 0
    before = len(run.device.plans)
    assert cached(run, *PROMPT) == 28
    (first, *_) = run.device.plans[before:]
    assert [(row.start, row.count) for row in first.rows] == [(28, 2)]
    assert kinds([first]) == [CopyKind.RESTORE]
    assert run.scheduler.prompt_tokens == 30 + 2
    counts_add_up(run)


@pytest.mark.parametrize("length", range(1, 14))
def test_a_hit_leaves_a_token_to_compute_whatever_the_length(length: int) -> None:
    run = Run(LIMITS)
    prompt = PROMPT[:length]
    assert cached(run, *prompt) == 0
    assert cached(run, *prompt) == (length - 1) // 4 * 4


def test_a_conversation_goes_on_where_its_last_prompt_ended() -> None:
    """Three turns; each prompt is the one before with its answer and a question."""
    run = Run(replace(LIMITS, prefix_interval_tokens=1024))
    tokens, expected = PROMPT, 0
    for _ in range(3):
        assert cached(run, *tokens, max_tokens=9) == expected
        expected = (len(tokens) - 1) // 4 * 4
        answer = [t for b in run.batches[-9:] for t in b.token_ids]
        tokens = (*tokens, *answer, 7, 8)


def test_a_long_answer_keeps_states_at_the_interval() -> None:
    run = Run(LIMITS)
    one = EngineRequest("one", PROMPT, 70)
    run.add(one)
    run.finish()
    known = (*PROMPT, *run.ids(one))
    assert cached(run, *known, max_tokens=1) == 96  # the last multiple of 32 below 100


def test_prompts_that_share_a_beginning_find_it_from_the_third_on_without_an_interval() -> None:
    """The second finds pages without a state, and keeps one where it leaves them."""
    run = Run(replace(LIMITS, prefix_interval_tokens=1024))
    shared, found = PROMPT[:20], []
    for tail in range(5, 16):
        found.append(cached(run, *shared, *(1000 * tail + i for i in range(tail))))
    assert found == [0, 0] + [20] * 9
    assert run.scheduler.cache.counts.misses["no_state"] == 20
    counts_add_up(run)


def test_prompts_that_share_more_than_an_interval_find_it_from_the_second_on() -> None:
    run = Run(LIMITS)
    shared = tuple(range(300, 350))
    found = [cached(run, *shared, *(1000 * t + i for i in range(t))) for t in range(1, 12)]
    assert found[0] == 0
    assert min(found[1:]) >= 32
    assert set(found[2:]) == {48}


def test_chunks_end_where_a_state_is_kept_and_states_come_from_there() -> None:
    run = Run(LIMITS)
    run.answer(*range(500, 590))
    rows = [row for plan in run.device.plans for row in plan.rows if row.flags & RowFlag.PREFILL]
    ends = [row.start + row.count for row in rows]
    assert ends == [32, 64, 88, 90]
    assert kinds(run.device.plans).count(CopyKind.SAVE) == 3


def test_without_cells_nothing_is_kept() -> None:
    run = Run(replace(LIMITS, prefix_states=0, prefix_host_states=0))
    assert cached(run, *PROMPT) == cached(run, *PROMPT) == 0
    assert kinds(run.device.plans) == []
    assert run.scheduler.cache.pool.num_free == LIMITS.num_pages


def test_states_go_to_the_host_and_come_back() -> None:
    run = Run(replace(LIMITS, prefix_states=1, prefix_host_states=2))
    prompts = [tuple(range(start, start + 9)) for start in (100, 200, 300)]
    for prompt in prompts:
        assert cached(run, *prompt) == 0
    assert [cached(run, *prompt) for prompt in prompts] == [8, 8, 8]
    counts = run.scheduler.cache.cells.counts
    assert (counts.saves, counts.spills, counts.drops) == (3, 2, 0)
    assert (counts.restores, counts.fetches) == (1, 2)


def test_a_state_that_made_room_is_a_miss_with_that_reason() -> None:
    run = Run(replace(LIMITS, prefix_states=1, prefix_host_states=0))
    run.answer(*range(100, 109))
    run.answer(*range(200, 209))
    assert cached(run, *range(100, 109)) == 0
    assert run.scheduler.cache.counts.misses["state_dropped"] == 8
    counts_add_up(run)


def test_the_least_recently_used_prefix_makes_room_and_is_missed_as_evicted() -> None:
    run = Run(replace(LIMITS, num_pages=32, context_tokens=60))
    for start in (100, 200, 300):
        run.answer(*range(start, start + 29))
    run.answer(*range(100, 129))  # the oldest is used again
    run.answer(*range(400, 429))
    run.answer(*range(500, 529))
    assert cached(run, *range(100, 129)) > 0
    before = run.scheduler.cache.counts.misses["evicted"]
    assert cached(run, *range(200, 229)) == 0
    assert run.scheduler.cache.counts.misses["evicted"] > before
    counts_add_up(run)


def test_pages_in_use_are_never_evicted_and_cached_ones_never_cause_a_preemption() -> None:
    run = Run(replace(LIMITS, num_pages=32))
    for start in range(0, 2000, 100):
        run.answer(*range(start, start + 30))
    assert run.scheduler.num_preemptions == 0
    requests = [EngineRequest(f"r{i}", tuple(range(i, i + 40)), 20) for i in (1, 2)]
    run.add(*requests)
    run.finish()
    check_answers(run, requests)
    assert run.scheduler.num_preemptions == 0


def test_a_preempted_request_finds_its_own_beginning() -> None:
    run = Run(replace(LIMITS, num_pages=32))
    requests = [EngineRequest(f"r{i}", tuple(range(i * 50, i * 50 + 41)), 30) for i in range(2)]
    run.add(*requests)
    run.finish()
    assert run.scheduler.num_preemptions > 0
    assert run.scheduler.cache.cells.counts.restores > 0
    check_answers(run, requests)
    assert {b.cached_tokens for b in run.batches} == {0}, "what was found when it first came"


def test_a_row_that_is_not_finite_is_forgotten_with_all_it_added() -> None:
    run = Run(LIMITS)
    run.answer(*PROMPT[:9])
    bad = EngineRequest("bad", PROMPT, 9)
    run.add(bad)
    plan = run.step()
    while not any(row.flags & RowFlag.SAMPLE for row in plan.rows):
        plan = run.step()
    run.step(spoil=0)
    assert run.reason(bad) is FinishReason.ERROR
    assert cached(run, *PROMPT) == 8, "what was there before stays"
    assert cached(run, *PROMPT) == 28


def test_who_uses_a_forgotten_page_goes_on_and_frees_it() -> None:
    run = Run(LIMITS)
    bad, other = EngineRequest("bad", PROMPT, 9), EngineRequest("other", (*PROMPT, 5, 6, 7), 9)
    run.add(bad)
    for _ in range(3):
        run.step()
    run.add(other)
    run.step()
    assert run.scheduler.running[1].num_hit == 28
    run.step(spoil=0)
    run.finish()
    check_answers(run, [other])
    assert run.scheduler.cache.tree.num_nodes == 0
    assert run.scheduler.cache.pool.num_free == LIMITS.num_pages


def test_a_priority_goes_first_and_is_preempted_last() -> None:
    run = Run(replace(LIMITS, num_slots=1))
    low = [EngineRequest(f"low{i}", PROMPT, 5, priority=1) for i in range(2)]
    high = EngineRequest("high", PROMPT, 5, priority=-1)
    run.add(*low)
    run.step()
    run.add(high)
    run.finish()
    ends = [b.request_id for b in run.batches if b.finish_reason]
    assert ends == ["low0", "high", "low1"]
    run = Run(replace(LIMITS, num_pages=32, prefix_states=0))
    run.add(EngineRequest("low", PROMPT, 60, priority=1), EngineRequest("mid", PROMPT, 60))
    run.step()
    run.add(EngineRequest("high", PROMPT, 60, priority=-1))
    run.finish()
    assert [b.request_id for b in run.batches if b.finish_reason] == ["high", "mid", "low"]


@pytest.mark.parametrize("drafts", [0, 2])
def test_prefill_leaves_running_answers_their_share(drafts: int) -> None:
    """A decode row takes 1 ms, a prefill token 0.1 ms: chunks of 64 alone would halve it thrice."""
    limits = replace(
        LIMITS, num_pages=1024, context_tokens=2048, num_drafts=drafts, drafts_auto=False,
        decode_share=0.5,
    )  # fmt: skip
    run = Run(limits)
    stream = EngineRequest("stream", PROMPT, 900)
    run.add(stream)
    while not run.batches:
        run.step(seconds=1e-3)

    def tokens_per_s(steps: int) -> float:
        """Over `steps`, or as long as the other request's prompt takes."""
        begin, seconds = run.scheduler.generation_tokens, 0.0
        for index in range(steps):
            plan = run.scheduler.schedule()
            count = sum(row.count for row in plan.rows if row.flags & RowFlag.PREFILL)
            took = 1e-3 + 1e-4 * count
            run.batches += run.scheduler.update(run.device.execute(plan), 0.0, took)
            seconds += took
            if index and all(s.is_decode for s in run.scheduler.running):
                break
        return (run.scheduler.generation_tokens - begin) / seconds

    alone = sum(tokens_per_s(1) for _ in range(60)) / 60
    run.add(EngineRequest("long", tuple(range(1500)), 2))
    beside = tokens_per_s(1000)
    assert run.scheduler.running[1].num_computed >= 1500
    assert alone * 0.5 <= beside <= alone * 0.75, "and no more than needed is kept from prefill"


def test_a_prompt_alone_is_not_held_back() -> None:
    run = Run(replace(LIMITS, decode_share=0.5))
    run.add(EngineRequest("long", tuple(range(100)), 2))
    steps = 0
    while run.scheduler.has_work:
        run.step(seconds=1.0)
        steps += 1
    assert steps == 5  # 32, 64, 96, 100 and a decode step


def test_an_interval_that_is_no_multiple_of_a_page_is_rounded_up() -> None:
    assert Run(replace(LIMITS, prefix_interval_tokens=5)).scheduler.cache.interval_tokens == 8
