"""Sampled output depends on seed, choice and position only: not on ranks, batch or chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from ops.reference.sampling import sample
from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest, SamplingParams

TOKENS = 10
FREE = SamplingParams(temperature=1.0, seed=2**64 - 3)
FILTERS = {
    "top-k": SamplingParams(1.0, top_k=5, seed=11),
    "top-p": SamplingParams(0.9, top_p=0.7, seed=12),
    "min-p": SamplingParams(1.3, min_p=0.08, seed=13),
    "all": SamplingParams(1.1, 40, 0.9, 0.01, seed=2**63 + 14, choice=2),
}
PROMPT = tuple((17 * i * i + 5 * i + 3) % 4000 for i in range(37))
OTHER = tuple((13 * i * i + 11 * i + 1) % 4000 for i in range(21))


def request(name: str, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> EngineRequest:
    return EngineRequest(name, prompt, TOKENS, sampling, ignore_eos=True)


def ids_of(engine: Engine, *requests: EngineRequest) -> list[tuple[int, ...]]:
    results = engine.generate(requests)
    assert [r.error for r in results] == [None] * len(requests)
    assert all(len(r.token_ids) == TOKENS for r in results)
    return [r.token_ids for r in results]


@contextmanager
def chunks(engine: Engine, tokens: int) -> Iterator[None]:
    scheduler = engine.rank0.scheduler
    assert scheduler is not None
    before = scheduler.limits
    scheduler.limits = replace(before, prefill_chunk_tokens=tokens)
    yield
    scheduler.limits = before


@pytest.fixture(scope="module")
def alone(engine_of: Callable[..., Engine]) -> Callable[[SamplingParams], tuple[int, ...]]:
    """Ids of PROMPT at one rank with nothing else running."""
    known: dict[SamplingParams, tuple[int, ...]] = {}

    def get(sampling: SamplingParams) -> tuple[int, ...]:
        if sampling not in known:
            (known[sampling],) = ids_of(engine_of("embedded"), request("alone", sampling))
        return known[sampling]

    return get


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sampling", [FREE, FILTERS["all"]], ids=["free", "filtered"])
def test_any_rank_count_samples_the_same(
    engine_of: Callable[..., Engine], alone: Callable[..., Any], sampling: SamplingParams,
    ranks: int,
) -> None:  # fmt: skip
    engine = engine_of("embedded", ranks)
    expected = alone(sampling)
    assert ids_of(engine, request("again", sampling)) == [expected]
    with chunks(engine, 12):
        assert ids_of(engine, request("chunked", sampling)) == [expected]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_mixed_batch_samples_each_request_as_if_alone(
    engine_of: Callable[..., Engine], alone: Callable[..., Any], ranks: int
) -> None:
    """Greedy, free and filtered rows side by side; then without the filtered ones."""
    engine = engine_of("embedded", ranks)
    params = [SamplingParams(), FREE, *FILTERS.values()]
    mixed = [request(f"r{i}", p) for i, p in enumerate(params)]
    mixed.insert(2, request("other", FREE, OTHER))
    with chunks(engine, 16):
        answers = ids_of(engine, *mixed)
    del answers[2]
    assert answers == [alone(p) for p in params]
    assert ids_of(engine, *mixed[:2]) == answers[:2]


def logits_and_ids(engine: Engine, one: EngineRequest) -> tuple[list[Any], Sequence[int]]:
    runner = engine.rank0.runner
    assert runner is not None
    runner.logits_log = []
    (ids,) = ids_of(engine, one)
    log, runner.logits_log = runner.logits_log, None
    return log, ids


@pytest.mark.parametrize("sampling", [FREE, *FILTERS.values()], ids=["free", *FILTERS])
def test_each_id_is_what_the_reference_draws_from_the_logits(
    engine_of: Callable[..., Engine], sampling: SamplingParams
) -> None:
    """Parameters reach the operator unchanged, with the absolute index of the sampled token."""
    log, ids = logits_and_ids(engine_of("embedded"), request("logged", sampling))
    seed = sampling.seed - 2**64 if sampling.seed >= 2**63 else sampling.seed
    assert len(log) == TOKENS
    for i, (logits, token) in enumerate(zip(log, ids, strict=True)):
        drawn = sample(
            logits, torch.tensor([sampling.temperature]), torch.tensor([sampling.top_k]),
            torch.tensor([sampling.top_p]), torch.tensor([sampling.min_p]), torch.tensor([seed]),
            torch.tensor([sampling.choice]), torch.tensor([len(PROMPT) + i]),
        )  # fmt: skip
        assert drawn.tolist() == [token]


def test_seed_and_choice_change_the_answer(alone: Callable[..., Any]) -> None:
    variants = [FREE, replace(FREE, seed=1), replace(FREE, seed=2**63 + 1), replace(FREE, choice=1)]
    assert len({alone(v) for v in variants}) == len(variants)
    assert alone(SamplingParams()) not in {alone(v) for v in variants}


@pytest.mark.parametrize("ranks", [1, 2])
def test_filters_that_leave_one_token_are_greedy(
    engine_of: Callable[..., Engine], alone: Callable[..., Any], ranks: int
) -> None:
    narrow = [
        SamplingParams(1.0, top_k=1, seed=5),
        SamplingParams(1.0, top_p=1e-6, seed=5),
        SamplingParams(1.0, min_p=1.0, seed=5),
    ]
    requests = [request(f"r{i}", p) for i, p in enumerate(narrow)]
    assert ids_of(engine_of("embedded", ranks), *requests) == [alone(SamplingParams())] * 3


def test_a_slot_forgets_the_sampling_of_the_one_before(
    engine_of: Callable[..., Engine], alone: Callable[..., Any]
) -> None:
    engine = engine_of("embedded")
    for sampling in (FILTERS["all"], SamplingParams(), FREE, FILTERS["top-k"], FREE):
        assert ids_of(engine, request("turn", sampling)) == [alone(sampling)]
