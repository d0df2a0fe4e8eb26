"""Log-probabilities equal those of the reference's logits, at any rank count, chunk and drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rank_worker.comm import LocalComm
from rank_worker.launch import Engine, GenerationResult
from rank_worker.logprobs import SCORE_TILE, LogprobReader
from rank_worker.messages import EngineRequest, SamplingParams

MODELS = ("embedded", "random-8")
BOUND = 1e-3
Engines = Callable[..., Engine]
Golden = Callable[[str], Any]


def ask(engine: Engine, case: Any, tokens: int = 12, top: int = 5, **more: Any) -> GenerationResult:
    request = EngineRequest(
        case.name, case.prompt_ids, tokens, ignore_eos=True, logprobs=top, **more
    )
    (result,) = engine.generate([request])
    return result


def reference(case: Any, position: int) -> np.ndarray:
    """Log-probabilities of the token after `position`, from the reference's logits."""
    logits = case.logits[position].astype(np.float64)
    return np.asarray(logits - np.logaddexp.reduce(logits))


@pytest.mark.parametrize(
    ("model", "ranks", "mtp", "reuse"),
    [
        *((model, 1, 0, False) for model in MODELS),
        (MODELS[-1], 2, 2, True),
        pytest.param(MODELS[0], 2, 2, True, marks=pytest.mark.slow),
        *(pytest.param(model, 3, 3, False, marks=pytest.mark.slow) for model in MODELS),
    ],
)
def test_they_are_those_of_the_reference(
    engine_of: Engines, golden: Golden, model: str, ranks: int, mtp: int, reuse: bool
) -> None:
    engine = engine_of(model, ranks, mtp=mtp, prefix_cache=reuse)
    checked = 0
    for length in (63, 64, 300, 300, 1100):
        case = golden(model).cases[length]
        result = ask(engine, case, prompt_logprobs=True)
        assert len(result.prompt_logprobs) == length - 1
        assert len(result.logprobs) == len(result.token_ids) == 12
        assert result.cached_tokens == 0
        for position in case.logits:
            index = position - length + 1
            if position < length - 1:
                told, token = result.prompt_logprobs[position], case.prompt_ids[position + 1]
            elif index < min(12, case.comparable()):
                told, token = result.logprobs[index], result.token_ids[index]
            else:
                continue
            expected = reference(case, position)
            assert abs(told.logprob - expected[token]) < BOUND
            best = np.argsort(-expected, kind="stable")[:5]
            assert np.allclose([value for _, value in told.top], expected[best], atol=BOUND)
            gaps = np.diff(np.sort(expected)[::-1][:6])
            if (np.abs(gaps) > BOUND).all():
                assert [token for token, _ in told.top] == best.tolist()
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize("mtp", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_drafts_and_reuse_change_none(engine_of: Engines, golden: Golden, mtp: int) -> None:
    plain = engine_of("embedded")
    drafting = engine_of("embedded", mtp=mtp, prefix_cache=True, mtp_auto=False)
    for length in (64, 300, 300):
        case = golden("embedded").cases[length]
        expected, found = (ask(engine, case, tokens=24) for engine in (plain, drafting))
        assert found.token_ids == expected.token_ids
        for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
            assert abs(mine.logprob - theirs.logprob) < BOUND
            assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
    assert found.cached_tokens > 0
    assert found.accepted_tokens > 0


@pytest.mark.parametrize("chunk", [7, SCORE_TILE + 1, 0])
def test_scores_of_a_prompt_do_not_depend_on_its_chunks(
    engine_of: Engines, golden: Golden, chunk: int
) -> None:
    engine = engine_of("embedded")
    case = golden("embedded").cases[300]
    whole = ask(engine, case, tokens=1, top=0, prompt_logprobs=True).prompt_logprobs
    scheduler = engine.rank0.scheduler
    assert scheduler is not None
    before = scheduler.limits
    scheduler.limits = replace(before, prefill_chunk_tokens=chunk, step_tokens=chunk or 2048)
    try:
        cut = ask(engine, case, tokens=1, top=0, prompt_logprobs=True).prompt_logprobs
    finally:
        scheduler.limits = before
    assert len(cut) == len(whole) == 299
    assert max(abs(a.logprob - b.logprob) for a, b in zip(cut, whole, strict=True)) < BOUND
    assert all(one.top == () for one in cut)


def test_only_who_asks_is_told_and_temperature_changes_none(
    engine_of: Engines, golden: Golden
) -> None:
    """The model's own: a sampled token has the log-probability that it has at temperature 1."""
    engine = engine_of("embedded", mtp=2)
    case = golden("embedded").cases[64]
    hot = SamplingParams(temperature=1.5, top_k=50, seed=3)
    asked = [
        EngineRequest("none", case.prompt_ids, 9),
        EngineRequest("hot", case.prompt_ids, 9, hot, ignore_eos=True, logprobs=2),
        EngineRequest("own", case.prompt_ids, 9, ignore_eos=True, logprobs=0),
    ]
    none, found, own = engine.generate(asked)
    assert none.logprobs == none.prompt_logprobs == ()
    assert [len(one.top) for one in found.logprobs] == [2] * 9
    assert [len(one.top) for one in own.logprobs] == [0] * 9
    first = reference(case, 63)
    assert abs(found.logprobs[0].logprob - first[found.token_ids[0]]) < BOUND


def test_prompts_scored_under_preemption_are_whole(
    driver: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> None:
    """A pool for one and a half: the second request loses its pages and is scored again."""
    one = driver(0, context_tokens=128, kv_pool_tokens=160, step_tokens=16)
    prompts = [tuple((7 * i * i + k) % 400 for i in range(70)) for k in (1, 2)]
    told: dict[str, Any] = {}
    for name, prompt in zip("ab", prompts, strict=True):
        one.scheduler.add(
            EngineRequest(name, prompt, 40, ignore_eos=True, logprobs=0, prompt_logprobs=True)
        )
    while one.scheduler.has_work:
        plan = one.scheduler.schedule()
        sampled = one.runner.execute(plan)
        for batch in one.scheduler.update(sampled.tolist(), logprobs=sampled.read_logprobs()):
            entry = told.setdefault(batch.request_id, ([], []))
            entry[0].extend(batch.prompt_logprobs)
            entry[1].extend(batch.logprobs)
    assert one.scheduler.num_preemptions > 0
    assert [(len(told[n][0]), len(told[n][1])) for n in "ab"] == [(69, 40)] * 2


@pytest.mark.parametrize("top", [0, 1, 7, 20])
def test_the_reader_is_exact_and_ties_stand_by_id(top: int) -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))
    logits[2] = 1.0
    targets = torch.tensor([0, 10, 4, 3, 2])
    read = LogprobReader(LocalComm(), 0).read(logits, targets, top)
    expected = torch.log_softmax(logits.double(), 1)
    assert torch.allclose(
        read[:, 0].double(), expected.gather(1, targets[:, None])[:, 0], atol=1e-6
    )
    ids, values = read[:, 1 : 1 + top].long(), read[:, 1 + top :]
    known = min(top, 11)
    order = expected.argsort(dim=1, descending=True, stable=True)[:, :known]
    assert torch.equal(ids[:, :known], order)
    assert (ids[:, known:] == -1).all()
    assert torch.allclose(values[:, :known].double(), expected.gather(1, order), atol=1e-6)
