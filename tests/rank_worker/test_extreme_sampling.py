"""Sampling figures at the ends of their ranges are the same figures on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest, FinishReason, SamplingParams

PROMPT = tuple(range(10, 40))
EXTREMES: tuple[dict[str, Any], ...] = (
    {"temperature": 1e-300},
    {"temperature": 1e-42},
    {"temperature": 1e-6},
    {"temperature": 1.0, "top_p": 0.9999999999},
    {"temperature": 1.0, "top_p": 1e-300},
    {"temperature": 1.0, "min_p": 1e-300},
    {"temperature": 1.0, "top_k": 2**31},
    {"temperature": 1.0, "top_k": 2**63},
    {"temperature": 2.0, "top_k": 1, "seed": 2**64 - 1},
)


def test_two_ranks_take_every_figure_alike(engine_of: Callable[..., Engine]) -> None:
    answers = []
    for ranks in (1, 2):
        requests = [
            EngineRequest(f"r{i}", PROMPT, 6, SamplingParams(**figures), ignore_eos=True)
            for i, figures in enumerate(EXTREMES)
        ]
        results = engine_of("random-8", ranks).generate(requests)
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        answers.append([result.token_ids for result in results])
    assert answers[0] == answers[1]
    greedy = answers[0][0]
    assert answers[0][1] == answers[0][2] == greedy, "next to no temperature is none"
