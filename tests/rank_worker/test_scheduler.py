"""Scheduling, judged by a device that knows nothing but the plans it executes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import ConfigError
from rank_worker.messages import EngineRequest, FinishReason, SamplingParams
from rank_worker.scheduler import Scheduler, SchedulerLimits
from rank_worker.step_plan import Opcode, RowFlag
from tests.rank_worker.fake_device import Run, check_answers, expected_ids

LIMITS = SchedulerLimits(
    step_tokens=32, prefill_chunk_tokens=0, page_tokens=4, num_pages=32, num_slots=4,
    context_tokens=64, check_interval_steps=4,
)  # fmt: skip


def request(name: str, prompt: int = 5, max_tokens: int = 6, **options: Any) -> EngineRequest:
    first = sum(name.encode()) * 7
    return EngineRequest(name, tuple(range(first, first + prompt)), max_tokens, **options)


def test_decode_comes_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    run = Run(replace(LIMITS, step_tokens=8))
    run.add(request("a", 4), request("b", 3))
    run.step()
    run.add(request("c", 30))
    plan = run.step()
    assert [(row.count, row.flags) for row in plan.rows] == [
        (1, RowFlag.SAMPLE), (1, RowFlag.SAMPLE), (6, RowFlag.PREFILL),
    ]  # fmt: skip
    run.finish()


@pytest.mark.parametrize("chunk", [1, 3, 0])
def test_prefill_goes_in_chunks_and_the_last_one_is_prefill_even_with_one_token(chunk: int) -> None:
    run = Run(replace(LIMITS, step_tokens=8, prefill_chunk_tokens=chunk))
    one = request("a", 10)
    run.add(one)
    size = chunk or 8
    for start in range(0, 10, size):
        (row,) = run.step().rows
        flags = RowFlag.PREFILL | (RowFlag.SAMPLE if start + size >= 10 else RowFlag.NONE)
        assert (row.start, row.count, row.flags) == (start, min(size, 10 - start), flags)
    if chunk:
        assert row.count == 1, "the sizes here end in a chunk of one token"
    (row,) = run.step().rows
    assert (row.start, row.count, row.flags) == (10, 1, RowFlag.SAMPLE)
    run.finish()
    check_answers(run, [one])


def test_a_prompt_of_one_token_is_prefill() -> None:
    run = Run(LIMITS)
    run.add(request("a", 1))
    (row,) = run.step().rows
    assert row.flags == RowFlag.PREFILL | RowFlag.SAMPLE


def test_the_budget_bounds_prefill_over_several_requests() -> None:
    run = Run(replace(LIMITS, step_tokens=12))
    requests = [request(name, 9) for name in "abc"]
    run.add(*requests)
    assert [row.count for row in run.step().rows] == [9, 3]
    assert [row.count for row in run.step().rows] == [1, 6, 5]
    run.finish()
    check_answers(run, requests)


def test_requests_start_in_the_order_of_their_arrival() -> None:
    run = Run(replace(LIMITS, num_slots=2, num_pages=16))
    requests = [request(name, 7, 3 + i % 3) for i, name in enumerate("abcdefgh")]
    run.add(*requests)
    run.finish()
    firsts = list(dict.fromkeys(b.request_id for b in run.batches))
    assert firsts == [r.request_id for r in requests]
    check_answers(run, requests)


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    run = Run(replace(LIMITS, num_pages=16))
    run.add(request("running", 30, 20))
    run.step()
    run.add(request("large", 40, 2), request("small", 2, 2))
    assert len(run.step().rows) == 1
    assert [s.request.request_id for s in run.scheduler.waiting] == ["large", "small"]
    run.finish()
    assert [b.request_id for b in run.batches if b.finish_reason] == ["running", "large", "small"]


def test_at_most_num_slots_requests_run() -> None:
    run = Run(replace(LIMITS, num_slots=2))
    run.add(*(request(name) for name in "abcd"))
    assert len(run.step().rows) == 2
    assert len(run.scheduler.waiting) == 2
    run.finish()


def test_preempted_requests_resume_by_recompute_with_the_same_tokens() -> None:
    run = Run(replace(LIMITS, num_pages=16))
    requests = [request(name, 10, 30) for name in "abcd"]
    run.add(*requests)
    run.finish()
    assert run.scheduler.num_preemptions > 0
    check_answers(run, requests)
    resumed = [
        row
        for plan in run.device.plans
        for row in plan.rows
        if row.flags & RowFlag.PREFILL and row.start == 0 and row.count > 10
    ]
    assert resumed, "a resumed request computes its own answer again"


@pytest.mark.parametrize("short", range(1, 9))
def test_a_request_preempted_after_its_row_was_planned_leaves_the_plan(short: int) -> None:
    """A new decode row takes the last page, then the old prefill row of the same step needs it."""
    run = Run(replace(LIMITS, step_tokens=8, prefill_chunk_tokens=4, num_pages=16))
    requests = [request("old", 60, 3), request("new", short, 30)]
    run.add(*requests)
    run.finish()
    assert run.scheduler.num_preemptions > 0
    check_answers(run, requests)


def test_the_oldest_request_is_never_preempted() -> None:
    run = Run(replace(LIMITS, num_pages=16))
    run.add(*(request(name, 10, 30) for name in "abcd"))
    oldest = run.scheduler.waiting[0]
    run.finish()
    assert run.scheduler.num_preemptions > 0
    assert oldest.preemptions == 0


def test_a_lone_sequence_fills_the_whole_context() -> None:
    run = Run(replace(LIMITS, num_pages=16))
    one = request("a", 3, 1000)
    run.add(one)
    run.finish(most_steps=62)
    assert len(run.ids(one)) == 61
    assert run.reason(one) is FinishReason.LENGTH
    assert run.scheduler.num_preemptions == 0


def test_a_pool_smaller_than_one_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 60 tokens, less than one context of 64"):
        Scheduler(replace(LIMITS, num_pages=15))


def test_abort_of_waiting_and_running_requests() -> None:
    run = Run(replace(LIMITS, num_slots=2))
    requests = [request(name) for name in "abcd"]
    run.add(*requests)
    run.step()
    run.scheduler.abort(["a", "c", "nobody"])
    run.scheduler.check_integrity()
    run.finish()
    assert run.reason(requests[0]) is None
    assert run.ids(requests[2]) == ()
    check_answers(run, [requests[1], requests[3]])


def test_abort_while_a_step_is_in_flight_drops_its_token() -> None:
    run = Run(LIMITS)
    requests = [request(name) for name in "ab"]
    run.add(*requests)
    run.step()
    run.step(during=("a",))
    assert len(run.ids(requests[0])) == 1
    late = request("late")
    run.add(late)
    run.finish()
    assert run.ids(requests[0]) == expected_ids(requests[0], 64)[:1]
    check_answers(run, [requests[1], late])


def test_a_row_that_is_not_finite_ends_that_request_only() -> None:
    run = Run(LIMITS)
    requests = [request(name) for name in "abc"]
    run.add(*requests)
    run.step()
    run.step(spoil=1)
    bad = run.batches[-2]
    assert (bad.request_id, bad.token_ids, bad.finish_reason, bad.error_kind) == (
        "b", (), FinishReason.ERROR, "non_finite",
    )  # fmt: skip
    assert bad.error_message == "logits of request b are not finite at position 6"
    run.finish()
    check_answers(run, [requests[0], requests[2]])
    assert len(run.ids(requests[1])) == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_max_tokens_ends_with_length(max_tokens: int) -> None:
    run = Run(LIMITS)
    one = request("a", 5, max_tokens)
    run.add(one)
    run.finish()
    assert len(run.ids(one)) == max_tokens
    assert run.reason(one) is FinishReason.LENGTH


def test_stop_ids_end_with_stop_and_belong_to_the_answer() -> None:
    free = expected_ids(request("a", 5, 8), 64)
    run = Run(LIMITS)
    stopped = request("a", 5, 8, stop_token_ids=(free[3], 10**6))
    run.add(stopped)
    run.finish()
    assert free[3] not in free[:3]
    assert run.ids(stopped) == free[:4]
    assert run.reason(stopped) is FinishReason.STOP


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    free = expected_ids(request("a", 5, 8), 64)
    run = Run(LIMITS)
    one = request("a", 5, 8, stop_token_ids=(free[3],), ignore_eos=True)
    run.add(one)
    run.finish()
    assert run.ids(one) == free
    assert run.reason(one) is FinishReason.LENGTH


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    free = expected_ids(request("a", 5, 4), 64)
    run = Run(LIMITS)
    one = request("a", 5, 4, stop_token_ids=(free[3],))
    run.add(one)
    run.finish()
    assert run.reason(one) is FinishReason.STOP


def test_plans_carry_epoch_step_and_check_at_the_interval() -> None:
    run = Run(replace(LIMITS, epoch=7, check_interval_steps=3))
    run.add(request("a", 5, 7))
    run.finish()
    assert [p.step for p in run.device.plans] == [1, 2, 3, 4, 5, 6, 7]
    assert {p.epoch for p in run.device.plans} == {7}
    assert [p.check for p in run.device.plans] == [False, False, True] * 2 + [False]
    idle = run.scheduler.schedule()
    assert (idle.opcode, idle.epoch, idle.step) == (Opcode.IDLE, 7, 7)


def test_an_admission_carries_the_sampling_parameters() -> None:
    run = Run(LIMITS)
    sampling = SamplingParams(0.7, 5, 0.9, 0.05, 2**64 - 1, 3)
    run.add(request("a", sampling=sampling))
    (admit,) = run.scheduler.schedule().admits
    assert (admit.temperature, admit.top_k, admit.top_p, admit.min_p) == (0.7, 5, 0.9, 0.05)
    assert (admit.seed, admit.choice) == (2**64 - 1, 3)


def test_counters_count_each_prompt_and_generated_token_once() -> None:
    run = Run(LIMITS)
    requests = [request("a", 9, 4), request("b", 40, 6)]
    run.add(*requests)
    run.finish()
    assert run.scheduler.prompt_tokens == 49
    assert run.scheduler.generation_tokens == 10
    assert {b.prompt_tokens for b in run.batches if b.request_id == "b"} == {40}
    assert {b.time_s for b in run.batches} == {1.5}


@st.composite
def workloads(draw: st.DrawFn) -> tuple[SchedulerLimits, list[EngineRequest]]:
    page = draw(st.sampled_from([2, 4]))
    context = draw(st.integers(10, 30))
    fewest = -(-context // page)
    limits = SchedulerLimits(
        step_tokens=draw(st.integers(1, 20)),
        prefill_chunk_tokens=draw(st.integers(0, 6)),
        page_tokens=page,
        num_pages=draw(st.integers(fewest, fewest + 6)),
        num_slots=draw(st.integers(1, 4)),
        context_tokens=context,
        check_interval_steps=draw(st.integers(1, 4)),
        num_drafts=draw(st.integers(0, 4)),
        drafts_auto=draw(st.booleans()),
    )
    requests = []
    for i in range(draw(st.integers(1, 7))):
        prompt = draw(st.integers(1, context - 1))
        stop = draw(st.sets(st.integers(0, 996), max_size=3))
        requests.append(
            EngineRequest(
                f"r{i}", tuple(range(i * 50, i * 50 + prompt)), draw(st.integers(1, 25)),
                stop_token_ids=tuple(stop), ignore_eos=draw(st.booleans()),
            )
        )  # fmt: skip
    return limits, requests


@settings(max_examples=250, deadline=None, derandomize=True)
@given(workloads(), st.data())
def test_random_runs_keep_every_page_slot_and_token(
    workload: tuple[SchedulerLimits, list[EngineRequest]], data: st.DataObject
) -> None:
    limits, requests = workload
    run = Run(limits)
    todo, aborted = list(requests), set()
    while todo:
        act = data.draw(st.sampled_from(["add", "step", "abort", "abort in flight"]))
        if act == "add":
            run.add(todo.pop(0))
            continue
        names: tuple[str, ...] = ()
        if act != "step" and data.draw(st.booleans()):
            names = (data.draw(st.sampled_from(requests)).request_id,)
            known = [s.request.request_id for s in (*run.scheduler.running, *run.scheduler.waiting)]
            aborted |= set(names) & set(known)
        if act == "abort":
            run.scheduler.abort(names)
            run.scheduler.check_integrity()
        else:
            run.step(during=names)
    run.finish()
    for one in requests:
        expected = expected_ids(one, limits.context_tokens)
        last = [b for b in run.batches if b.request_id == one.request_id][-1:]
        assert all(0 <= b.accepted_tokens <= b.draft_tokens for b in last)
        if one.request_id in aborted:
            assert run.ids(one) == expected[: len(run.ids(one))]
        else:
            assert run.ids(one) == expected
            assert run.reason(one) is not None
    assert run.scheduler.cache.num_available == limits.num_pages
    assert len(run.scheduler.free_slots) == limits.num_slots
