"""Drafts change speed and nothing else: ids, ends and usage are those of a run without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rank_worker.launch import Engine, GenerationResult
from rank_worker.messages import EngineRequest, FinishReason, SamplingParams
from rank_worker.step_plan import RowFlag, StepPlan

MODELS = ("embedded", "random-8")
LENGTHS = (1, 63, 64, 65, 300, 1100)
SHORT = (1, 63, 64, 65, 300)
FREE = SamplingParams(temperature=0.8, seed=5)
FILTERED = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=6)
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


@contextmanager
def prefill_chunk(engine: Engine, tokens: int, step_tokens: int = 0) -> Iterator[None]:
    scheduler = engine.rank0.scheduler
    assert scheduler is not None
    before = scheduler.limits
    budget = step_tokens or tokens or 2048
    scheduler.limits = replace(before, prefill_chunk_tokens=tokens, step_tokens=budget)
    yield
    scheduler.limits = before


def generated(engine: Engine, requests: Sequence[EngineRequest]) -> list[GenerationResult]:
    results = engine.generate(requests)
    assert [r.error for r in results] == [None] * len(requests)
    assert engine.rank0.scheduler is not None
    engine.rank0.scheduler.check_integrity()
    for result in results:
        assert 0 <= result.accepted_tokens <= min(result.draft_tokens, len(result.token_ids))
    return results


def check(engine: Engine, cases: Sequence[Any], max_tokens: int) -> None:
    requests = [EngineRequest(c.name, c.prompt_ids, max_tokens, ignore_eos=True) for c in cases]
    for case, result in zip(cases, generated(engine, requests), strict=True):
        case.check_ids(result.token_ids)
        assert len(result.token_ids) == max_tokens
        assert result.draft_tokens > 0


def check_grid(engine: Engine, golden: Any, chunks: Sequence[int], max_tokens: int) -> None:
    for chunk in chunks:
        with prefill_chunk(engine, chunk):
            check(engine, [golden.cases[n] for n in LENGTHS[1:]], max_tokens)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "k"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3)])
def test_greedy_ids_in_a_batch(
    drafting: Engines, golden: Callable[[str], Any], model: str, ranks: int, k: int
) -> None:
    engine = drafting(model, ranks, k)
    with prefill_chunk(engine, 64):
        check(engine, [golden(model).cases[n] for n in SHORT], max_tokens=12)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [16, 0])
def test_greedy_ids_at_other_chunk_sizes_and_alone(
    drafting: Engines, golden: Callable[[str], Any], model: str, chunk: int
) -> None:
    engine, cases = drafting(model, 1, 2), golden(model).cases
    with prefill_chunk(engine, chunk):
        check(engine, [cases[n] for n in SHORT], max_tokens=12)
        check(engine, [cases[1]], max_tokens=24)
        check(engine, [cases[300]], max_tokens=48)


def test_greedy_ids_at_three_ranks(drafting: Engines, golden: Callable[[str], Any]) -> None:
    engine = drafting("embedded", 3, 3)
    with prefill_chunk(engine, 64):
        check(engine, [golden("embedded").cases[n] for n in SHORT], max_tokens=6)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [16, 64, 0])
def test_greedy_ids_after_a_long_prompt(
    drafting: Engines, golden: Callable[[str], Any], model: str, chunk: int
) -> None:
    check_grid(drafting(model, 2, 2), golden(model), [chunk], max_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_whole_grid_of_greedy_ids(
    drafting: Engines, golden: Callable[[str], Any], model: str, ranks: int, k: int
) -> None:
    engine = drafting(model, ranks, k)
    check_grid(engine, golden(model), [16, 64, 0], max_tokens=48)
    for length in LENGTHS:
        check(engine, [golden(model).cases[length]], max_tokens=48)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "k"), [(1, 1), (1, 4), (2, 2)])
def test_sampled_ids_are_those_without_drafts(
    drafting: Engines, model: str, ranks: int, k: int
) -> None:
    requests = [
        EngineRequest("free", PROMPT, 16, FREE, ignore_eos=True),
        EngineRequest("filtered", PROMPT[5:], 16, FILTERED, ignore_eos=True),
        EngineRequest("greedy", PROMPT[9:], 16, ignore_eos=True),
    ]
    plain = generated(drafting(model, 1, 0), requests)
    engine = drafting(model, ranks, k)
    together = generated(engine, requests)
    assert [r.token_ids for r in together] == [r.token_ids for r in plain]
    for one, other in zip(requests[:2], plain, strict=False):
        assert generated(engine, [one])[0].token_ids == other.token_ids


@pytest.mark.parametrize("chunk", [0, 3])
def test_prompts_of_every_length_up_to_fifty(drafting: Engines, chunk: int) -> None:
    """Pages of 16 tokens, blocks of 4; with chunks of 3 a last one is as long as a draft row."""
    prompts = [PROMPT[:n] + PROMPT[: max(0, n - 37)] for n in range(1, 51)]
    requests = [EngineRequest(f"r{len(p)}", p, 7, ignore_eos=True) for p in prompts]
    plain, engine = drafting("random-8", 1, 0), drafting("random-8", 1, 2)
    with prefill_chunk(engine, chunk, step_tokens=64):
        got = generated(engine, requests)
    expected = generated(plain, requests)
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]


@pytest.fixture(scope="module")
def chat(embedded_model_dir: Any) -> Chat:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)

    def ids(text: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        made = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tuple(made["input_ids"])

    return ids


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_end_of_an_answer_is_the_same(drafting: Engines, chat: Chat, k: int) -> None:
    """max_tokens 1..12, stop ids and end tokens inside a round: ids, reason and counts."""
    prompt, stop = chat(COUNTING), (4089, 4087)
    plain, engine = drafting("embedded", 1, 0), drafting("embedded", 1, k)
    (whole,) = generated(plain, [EngineRequest("whole", prompt, 64, stop_token_ids=stop)])
    assert whole.finish_reason is FinishReason.STOP
    requests = [EngineRequest(f"m{n}", prompt, n, stop_token_ids=stop) for n in range(1, 13)]
    requests.append(EngineRequest("eos", prompt, 64, stop_token_ids=stop))
    requests += [
        EngineRequest(f"s{at}", prompt, 64, stop_token_ids=(token,))
        for at, token in enumerate(dict.fromkeys(whole.token_ids))
    ]
    expected, got = generated(plain, requests), generated(engine, requests)
    assert [(r.token_ids, r.finish_reason) for r in got] == [
        (r.token_ids, r.finish_reason) for r in expected
    ]
    assert engine.rank0.scheduler is not None
    assert sum(r.accepted_tokens for r in got) > 0


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


@pytest.fixture
def plans(drafting: Engines, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Every plan that the embedded gang with two drafts executes."""
    runner = drafting("embedded", 1, 2).rank0.runner
    assert runner is not None
    seen: list[StepPlan] = []
    execute = runner.execute

    def noted(plan: StepPlan) -> Any:
        seen.append(plan)
        return execute(plan)

    monkeypatch.setattr(runner, "execute", noted)
    return seen


def test_a_last_chunk_as_long_as_a_draft_row_is_prefill(
    drafting: Engines, plans: list[StepPlan]
) -> None:
    engine = drafting("embedded", 1, 2)
    requests = [
        EngineRequest("running", PROMPT[:3], 12, ignore_eos=True),
        EngineRequest("chunked", PROMPT[:15], 8, ignore_eos=True),
    ]
    with prefill_chunk(engine, 3, step_tokens=32):
        got = generated(engine, requests)
    last = RowFlag.PREFILL | RowFlag.SAMPLE
    mixed = [p.rows for p in plans if any(r.flags & last == last and r.count == 3 for r in p.rows)]
    assert any(row.flags & RowFlag.DRAFT for rows in mixed for row in rows)
    wide = [row for plan in plans for row in plan.rows if row.count == 3]
    assert all(bool(row.flags & RowFlag.DRAFT) != bool(row.flags & RowFlag.PREFILL) for row in wide)
    expected = generated(drafting("embedded", 1, 0), requests)
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]


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
