"""An answer ends where it would without drafts, with the same counts; so do its probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest, FinishReason
from rank_worker.step_plan import RowFlag
from tests.rank_worker.test_reuse_truth import (
    FILTERS,
    FREE,
    GREEDY,
    Truth,
    check,
    check_idle,
    prefix_cache,
    random_prompt,
    reachable,
)

Engines = Callable[..., Engine]
Chat = Callable[[str], tuple[int, ...]]
EOS = (4089, 4087)
LONGEST = 12
PATIENCE_S = 60.0
SPREAD = 1e-3


@dataclass(frozen=True)
class End:
    """What a client sees of an answer."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    accepted_tokens: int = field(compare=False)


def ends(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, End]:
    """Runs all together; counts are those that the rank reports."""
    ids: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    found: dict[str, End] = {}
    engine.rank0.submit(requests)
    while len(found) < len(requests):
        batches = engine.rank0.poll_outputs(PATIENCE_S)
        assert batches
        for batch in batches:
            name = batch.request_id
            assert name not in found, "tokens after the end"
            ids[name] += batch.token_ids
            if batch.finish_reason:
                counts = batch.prompt_tokens, batch.cached_tokens, batch.accepted_tokens
                found[name] = End(ids[name], batch.finish_reason, *counts)
    check_idle(engine)
    return found


def cut_in_every_way(
    prompt: tuple[int, ...], answer: Sequence[int], lengths: Sequence[int]
) -> Iterator[EngineRequest]:
    """All lengths without stop tokens and with the model's own, `lengths` with each token of the
    answer as a stop token.
    """
    stops: dict[str, tuple[int, ...]] = {"none": (), "eos": EOS}
    stops |= {f"token {at}": (token,) for at, token in enumerate(dict.fromkeys(answer))}
    for name, stop in stops.items():
        for count in lengths if name.startswith("token") else range(1, LONGEST + 1):
            yield EngineRequest(f"{name}, {count} tokens", prompt, count, stop_token_ids=stop)


COUNTING, RETRIEVAL = "Count from 3 to 9.", "My name is Anna. What is my name?"


@pytest.mark.parametrize(
    ("k", "question", "lengths"),
    [
        (2, COUNTING, (LONGEST,)),
        *(
            pytest.param(k, question, range(1, LONGEST + 1), marks=pytest.mark.slow)
            for k in (2, 3, 4)
            for question in (COUNTING, RETRIEVAL)
        ),
    ],
)
def test_an_end_inside_an_accepted_batch_is_an_end(
    reusing: Engines, truth_of: Callable[[str], Truth], chat: Chat, k: int, question: str,
    lengths: Sequence[int],
) -> None:  # fmt: skip
    plain, engine, prompt = reusing("embedded", 1, 0), reusing("embedded", 1, k), chat(question)
    whole = EngineRequest("whole", prompt, LONGEST, ignore_eos=True)
    answer = truth_of("embedded").of(whole).token_ids
    requests = list(cut_in_every_way(prompt, answer, lengths))
    scheduler = engine.rank0.scheduler
    assert scheduler is not None
    with prefix_cache(plain), prefix_cache(engine):
        for one in (plain, engine):
            ends(one, [whole])  # all others find its prompt
        expected, before = ends(plain, requests), sum(scheduler.accepted_by_position)
        got = ends(engine, requests)
        assert got == expected
        accepted = sum(scheduler.accepted_by_position) - before
        assert accepted > sum(end.accepted_tokens for end in got.values()), "no batch was cut"
        assert {end.cached_tokens for end in got.values()} == {reachable(whole)}
        assert {end.prompt_tokens for end in got.values()} == {len(prompt)}
        reasons = {end.finish_reason for end in got.values()}
        assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
        goes_on = [
            EngineRequest(name, (*prompt, *end.token_ids, 7, 8), 4, ignore_eos=True)
            for name, end in got.items()
            if name.startswith("none")
        ]
        check(engine, truth_of("embedded"), goes_on)
    with prefix_cache(engine, states=0):
        assert ends(engine, requests) == {
            name: replace(end, cached_tokens=0) for name, end in expected.items()
        }


def log_probabilities(driver: Any, requests: Sequence[EngineRequest]) -> dict[str, Tensor]:
    """[tokens, vocab] of each request, from the logits that each token was sampled from."""
    rows: dict[str, list[Tensor]] = {request.request_id: [] for request in requests}
    for request in requests:
        driver.scheduler.add(request)
    while driver.scheduler.has_work:
        driver.runner.logits_log = []
        batches = iter(driver.step())
        (logits,), at = driver.runner.logits_log, 0
        for row in driver.plans[-1].rows:
            if row.flags & RowFlag.SAMPLE:
                batch = next(batches)
                new = logits[at : at + len(batch.token_ids)]
                rows[batch.request_id].append(new.log_softmax(dim=-1))
                at += row.count if row.flags & RowFlag.DRAFT else 1
        assert at == len(logits)
    driver.runner.logits_log = None
    return {name: torch.cat(parts) for name, parts in rows.items()}


@pytest.mark.parametrize(
    ("k", "people"),
    [(2, 2), *(pytest.param(k, 4, marks=pytest.mark.slow) for k in (1, 2, 3, 4))],
)
def test_log_probabilities_are_those_of_a_run_without_drafts(
    driver: Callable[..., Any], chat: Chat, embedded_model_dir: Path, k: int, people: int
) -> None:
    """Alone and plain; then all together with drafts, and once more from the cache."""
    prompts = [chat(COUNTING), random_prompt(3, 18), chat(RETRIEVAL), random_prompt(4, 33)]
    requests = [
        EngineRequest(f"{i} {p}", prompt, 10, p, ignore_eos=True)
        for i, prompt in enumerate(prompts[:people])
        for p in (GREEDY, FREE, FILTERS[3])
    ]
    alone = driver(0, embedded_model_dir)
    expected = {name: p for r in requests for name, p in log_probabilities(alone, [r]).items()}
    drafting = driver(k, embedded_model_dir, prefix_cache=True)
    for _ in range(2):
        got = log_probabilities(drafting, requests)
        assert sum(drafting.scheduler.accepted_by_position) > 0
        for name, true in expected.items():
            assert got[name].shape == true.shape == (10, true.shape[1])
            assert (got[name] - true).abs().max() < SPREAD, name
    assert drafting.scheduler.cache.cells.counts.restores > 0
