"""What an answer has to be: the ids of a plain run, up to its first decision too close to call.

`Truth` and the other helpers here serve all tests of reuse and drafts on real models. An engine is
a gang (`Engine`) or a rank that is driven step by step (`Driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.reference.sampling import _kept, gumbel
from rank_worker.launch import GenerationResult
from rank_worker.messages import EngineRequest, FinishReason, SamplingParams
from rank_worker.pages import PagePool
from rank_worker.prefix_cache import PrefixCache
from tests.conftest import MARGIN

CLOSE_ONE_IN = 2000  # decisions closer than MARGIN may not be more frequent
PAGE = 16

GREEDY = SamplingParams()
FREE = SamplingParams(temperature=0.8, seed=5)
FILTERS = (
    SamplingParams(temperature=0.8, top_p=0.9, seed=6),
    SamplingParams(temperature=0.8, top_k=30, seed=7),
    SamplingParams(temperature=0.8, min_p=0.05, seed=8),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, seed=9, choice=1),
)

QUESTIONS = (
    "Count from 3 to 9.",
    "My name is Anna. What is my name?",
    "Count from 11 to 17.",
    "My name is Otto. What is my name?",
    "Count from 2 to 6.",
    "My name is Maria. What is my name?",
)


def random_prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 500, (length,), generator=generator).tolist())


@dataclass(frozen=True)
class Prompts:
    """Prompts that a model can say something to: drafts of the embedded one are often right."""

    text: tuple[int, ...]  # empty: anything goes
    chat: Callable[[str], tuple[int, ...]]

    def of_length(self, length: int) -> tuple[int, ...]:
        """Another one for each length, from the first token on."""
        if not self.text:
            return random_prompt(100 + length, length)
        return self.text[13 * length : 14 * length]

    def turn(self, person: int, turn: int) -> tuple[int, ...]:
        if not self.text:
            return random_prompt(1000 + 50 * person + turn, 9 + 5 * person + turn)
        return self.chat(QUESTIONS[(person + turn) % len(QUESTIONS)])


@dataclass(frozen=True)
class TrueAnswer:
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]  # best minus second score, in logits

    @property
    def comparable(self) -> int:
        """Leading tokens that any correct implementation gives."""
        close = [at for at, margin in enumerate(self.margins) if margin < MARGIN]
        return close[0] if close else len(self.token_ids)


class Truth:
    """Answers of one rank without cache, drafts, chunks and company. Keeps them."""

    def __init__(self, driver: Any) -> None:
        config = driver.config
        assert (config.ranks, config.mtp, config.prefix_cache) == (1, 0, False)
        assert (config.prefill_chunk_tokens, config.step_tokens) == (0, 2048)
        self.driver = driver
        self.num_tokens = self.num_close = 0
        self._answers: dict[tuple[tuple[int, ...], SamplingParams], TrueAnswer] = {}

    def of(self, request: EngineRequest) -> TrueAnswer:
        """The request's answer without regard to stop tokens."""
        key, count = (request.prompt_ids, request.sampling), request.max_tokens
        known = self._answers.get(key)
        if known is None or len(known.token_ids) < count:
            known = self._answers[key] = self._answer(request)
            self._note_close(request, known)
        return TrueAnswer(known.token_ids[:count], known.margins[:count])

    def check(self, request: EngineRequest, token_ids: Sequence[int]) -> None:
        """Fails unless the ids are right up to the first decision that is too close."""
        true, ids = self.of(request), tuple(token_ids)
        assert len(ids) == len(true.token_ids), request.request_id
        count = true.comparable
        assert ids[:count] == true.token_ids[:count], request.request_id

    def _answer(self, request: EngineRequest) -> TrueAnswer:
        alone = replace(request, ignore_eos=True, stop_token_ids=())
        log = self.driver.runner.logits_log = []
        (result,) = self.driver.generate([alone])
        logits = torch.cat(log)
        assert len(result.token_ids) == request.max_tokens == len(logits)
        first = len(request.prompt_ids)
        found = margins(logits, result.token_ids, request.sampling, first)
        return TrueAnswer(result.token_ids, tuple(found.tolist()))

    def _note_close(self, request: EngineRequest, true: TrueAnswer) -> None:
        self.num_tokens += len(true.margins)
        for at, margin in enumerate(true.margins):
            if margin < MARGIN:
                self.num_close += 1
                print(f"{request.request_id}: token {at} is close to call, margin {margin:.1e}")
        limit = max(1, self.num_tokens // CLOSE_ONE_IN)
        assert self.num_close <= limit, f"{self.num_close} close calls in {self.num_tokens} tokens"


def margins(logits: Tensor, ids: Sequence[int], p: SamplingParams, first: int) -> Tensor:
    """How far each chosen score lies above the next one, in logits; [len(ids)].

    logits [len(ids), vocab] are those at positions first - 1, first, ...
    """
    scores = logits
    if p.temperature:
        rows, vocab = logits.shape
        scaled = logits / p.temperature
        seed, choice = torch.full((rows,), p.seed), torch.full((rows,), p.choice)
        noise = gumbel(seed, choice, torch.arange(first, first + rows), torch.arange(vocab))
        limits = [torch.full((rows,), value) for value in (p.top_k, p.top_p, p.min_p)]
        kept = _kept(scaled, *limits)
        scores = (scaled + noise).masked_fill(~kept, float("-inf")) * p.temperature
    best = scores.topk(2)
    assert best.indices[:, 0].tolist() == list(ids), "not what the scores say"
    return best.values[:, 0] - best.values[:, 1]


@contextmanager
def chunks(engine: Any, tokens: int, step_tokens: int = 0) -> Iterator[None]:
    """Prefill in pieces of at most `tokens` (0: whole) from now on. Only rank 0 knows."""
    scheduler = engine.rank0.scheduler
    before = scheduler.limits
    budget = step_tokens or 2048
    scheduler.limits = replace(before, prefill_chunk_tokens=tokens, step_tokens=budget)
    try:
        yield
    finally:
        scheduler.limits = before


@contextmanager
def prefix_cache(
    engine: Any, states: int | None = None, host_states: int | None = None, interval: int = 512
) -> Iterator[PrefixCache]:
    """An empty prefix cache with so many states, at most what the gang has; states 0: off.

    Only rank 0 knows where anything lies, so it alone is told.
    """
    rank = engine.rank0
    has, limits, before = rank.plan.prefix, rank.scheduler.limits, rank.scheduler.cache
    device = has.device if states is None else states
    host = has.host if host_states is None else host_states
    assert device <= has.device
    assert host <= has.host
    pool = PagePool(limits.num_pages)
    rank.scheduler.cache = PrefixCache(pool, limits.page_tokens, interval, device, host)
    try:
        yield rank.scheduler.cache
    finally:
        rank.scheduler.cache = before


def generated(engine: Any, requests: Sequence[EngineRequest]) -> list[GenerationResult]:
    """Results without an error; afterwards nothing is held by anybody."""
    results = engine.generate(requests)
    assert [r.error for r in results] == [None] * len(requests)
    for request, result in zip(requests, results, strict=True):
        assert 0 <= result.accepted_tokens <= min(result.draft_tokens, len(result.token_ids))
        assert 0 <= result.cached_tokens < len(request.prompt_ids)
    check_idle(engine)
    return results


def check_idle(engine: Any) -> None:
    """Nothing runs or waits, and every page is free or cached."""
    scheduler, now = engine.rank0.scheduler, engine.rank0.snapshot()
    scheduler.check_integrity()
    assert (now.running, now.waiting, now.slots_used, now.pages_used) == (0, 0, 0, 0)
    cache = scheduler.cache
    assert cache.pool.num_free + cache.tree.num_nodes == cache.pool.num_pages
    counts = cache.counts
    assert counts.queries == counts.hits + sum(counts.misses.values())


def check(engine: Any, truth: Truth, requests: Sequence[EngineRequest]) -> list[GenerationResult]:
    """Runs all together; every answer must be right."""
    results = generated(engine, requests)
    for request, result in zip(requests, results, strict=True):
        truth.check(request, result.token_ids)
        assert result.finish_reason is FinishReason.LENGTH
        assert (result.draft_tokens > 0) <= (engine.config.mtp > 0)
    return results


def reachable(request: EngineRequest) -> int:
    """Tokens that a hit of the whole prompt has: full pages, and one token is left to compute."""
    return (len(request.prompt_ids) - 1) // PAGE * PAGE


@pytest.fixture
def truth(truth_of: Callable[[str], Truth]) -> Truth:
    return truth_of("random-8")


def test_the_truth_is_what_transformers_says(truth: Truth, golden: Callable[[str], Any]) -> None:
    for length in (65, 300):
        case = golden("random-8").cases[length]
        request = EngineRequest(case.name, case.prompt_ids, 16, ignore_eos=True)
        true = truth.of(request)
        case.check_ids(true.token_ids)
        assert true.margins == pytest.approx(case.margins[:16].tolist(), abs=1e-3)
        truth.check(request, case.token_ids[:16])


@pytest.mark.parametrize("sampling", [GREEDY, FREE, *FILTERS])
def test_a_wrong_id_a_missing_one_and_one_too_many_are_told(
    truth: Truth, sampling: SamplingParams
) -> None:
    request = EngineRequest("a", random_prompt(1, 20), 12, sampling, ignore_eos=True)
    ids = truth.of(request).token_ids
    truth.check(request, ids)
    for wrong in (ids[:-1], (*ids, 1), (*ids[:-1], ids[-1] ^ 1)):
        with pytest.raises(AssertionError):
            truth.check(request, wrong)


def test_close_calls_are_left_out_and_counted(
    truth: Truth, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = EngineRequest("a", random_prompt(2, 20), 12, ignore_eos=True)
    ids = truth.of(request).token_ids
    key = (request.prompt_ids, request.sampling)
    close = TrueAnswer(ids, (*[1.0] * 7, 1e-5, *[1.0] * 4))
    monkeypatch.setitem(truth._answers, key, close)
    truth.check(request, (*ids[:7], *[0] * 5))
    with pytest.raises(AssertionError):
        truth.check(request, (*ids[:6], *[0] * 6))
    one = Truth(truth.driver)
    one._note_close(request, close)
    assert "token 7 is close to call" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="2 close calls in 24 tokens"):
        one._note_close(request, close)
