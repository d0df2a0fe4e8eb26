"""How drafting gangs behave beside the grid of `test_reuse_grid`: plans, preemption, counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest, FinishReason
from rank_worker.step_plan import RowFlag
from tests.rank_worker.test_reuse_truth import Truth, chunks, generated

SHORT = (1, 63, 64, 65, 300)
PROMPT = tuple((17 * i * i + 5 * i + 3) % 500 for i in range(37))
COUNTING = "Count from 3 to 9."
RETRIEVAL = "My name is Anna. What is my name?"

Engines = Callable[..., Engine]
Chat = Callable[[str], tuple[int, ...]]


@pytest.fixture(scope="module")
def drafting(engine_of: Engines) -> Engines:
    """drafting(model, ranks, k): a gang that drafts whatever it gains."""

    def get(model: str, ranks: int = 1, k: int = 2, **config: Any) -> Engine:
        drafts = {"mtp": k, "mtp_auto": False} if k else {}
        return engine_of(model, ranks, **drafts, **config)

    return get


def test_greedy_ids_at_three_ranks(drafting: Engines, golden: Callable[[str], Any]) -> None:
    engine, cases = drafting("embedded", 3, 3), golden("embedded").cases
    requests = [EngineRequest(str(n), cases[n].prompt_ids, 6, ignore_eos=True) for n in SHORT]
    with chunks(engine, 64, 64):
        results = generated(engine, requests)
    for length, result in zip(SHORT, results, strict=True):
        cases[length].check_ids(result.token_ids)
        assert len(result.token_ids) == 6
        assert result.draft_tokens > 0


def test_the_embedded_head_guesses_its_own_tasks(drafting: Engines, chat: Chat) -> None:
    """A wrong pass through the head (norms, streams, positions) would be right by chance only."""
    requests = [
        EngineRequest("a", chat(COUNTING), 64, stop_token_ids=(4089, 4087)),
        EngineRequest("b", chat(RETRIEVAL), 64, stop_token_ids=(4089, 4087)),
    ]
    for ranks in (1, 2):
        results = generated(drafting("embedded", ranks, 2), requests)
        drafts = sum(r.draft_tokens for r in results)
        accepted = sum(r.accepted_tokens for r in results)
        assert drafts > 10
        assert accepted / drafts > 0.7, (accepted, drafts)  # the last round runs past the end


def test_a_last_chunk_as_long_as_a_draft_row_is_prefill(
    driver: Callable[..., Any], truth_of: Callable[[str], Truth]
) -> None:
    one = driver(2, prefill_chunk_tokens=3, step_tokens=32)
    requests = [
        EngineRequest("running", PROMPT[:3], 24, ignore_eos=True),
        EngineRequest("chunked", PROMPT[:15], 8, ignore_eos=True),
    ]
    results = one.generate(requests, every=2)
    last = RowFlag.PREFILL | RowFlag.SAMPLE
    mixed = [
        p.rows for p in one.plans if any(r.flags & last == last and r.count == 3 for r in p.rows)
    ]
    assert any(row.flags & RowFlag.DRAFT for rows in mixed for row in rows)
    wide = [row for plan in one.plans for row in plan.rows if row.count == 3]
    assert all(bool(row.flags & RowFlag.DRAFT) != bool(row.flags & RowFlag.PREFILL) for row in wide)
    for request, result in zip(requests, results, strict=True):
        truth_of("random-8").check(request, result.token_ids)


def test_preempted_requests_answer_the_same(engine_of: Engines, drafting: Engines) -> None:
    """Eleven pages for four sequences that want five each."""
    requests = [EngineRequest(f"r{i}", PROMPT[i : i + 20], 50, ignore_eos=True) for i in range(4)]
    small = {"context_tokens": 176, "kv_pool_tokens": 176}
    engine = drafting("random-8", 1, 3, **small)
    got = generated(engine, requests)
    assert engine.rank0.scheduler is not None
    assert engine.rank0.scheduler.num_preemptions > 0
    expected = generated(drafting("random-8", 1, 0), requests)
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]


def test_a_context_filled_to_its_end(drafting: Engines) -> None:
    """The last rounds run plain, and provisional entries never leave the page table."""
    one = EngineRequest("long", PROMPT[:20], 1000, ignore_eos=True)
    for k in (0, 1, 2, 3, 4):
        engine = drafting("random-8", 1, k, context_tokens=48, kv_pool_tokens=96)
        (result,) = generated(engine, [one])
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.token_ids) == 28
        if k == 0:
            expected = result.token_ids
        assert result.token_ids == expected


def test_counters_add_up(drafting: Engines) -> None:
    engine = drafting("random-8", 1, 2)
    before = engine.rank0.snapshot()
    results = generated(
        engine, [EngineRequest(f"r{i}", PROMPT[i:], 20, ignore_eos=True) for i in range(3)]
    )
    after = engine.rank0.snapshot()
    rounds = after.draft_rounds - before.draft_rounds
    drafts = sum(r.draft_tokens for r in results)
    assert after.draft_tokens - before.draft_tokens == drafts == 2 * rounds > 0
    accepted = [b - a for a, b in zip(before.accepted_by_position, after.accepted_by_position,
                                      strict=True)]  # fmt: skip
    assert accepted[0] >= accepted[1]
    assert sum(accepted) >= sum(r.accepted_tokens for r in results)
    assert after.generation_tokens - before.generation_tokens == 60
    memory = after.memory_bytes
    assert engine.rank0.plan is not None
    planned = engine.rank0.plan.ranks[0].rows
    assert {row: planned[row] for row in memory} == memory
    assert memory["mtp_state"] > 0
    assert memory["mtp_weights"] > 0
