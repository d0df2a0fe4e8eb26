"""Drafts as clients and operators see them: usage details of an answer, counters of the gang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.completion import Choice, usage
from cluster.engine_metrics import EngineMetrics
from cluster.model_card import ModelCard
from cluster.streams import merge
from cluster.tokens import Tokenizer
from cluster.validate import ValidRequest, valid_completion
from rank_worker.messages import FinishReason, RankSnapshot, TokenBatch

NAME = "nrank_spec_decode_accepted_tokens_per_pos_total"


def totals(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
    """Value by name and position label, of the families of speculative decoding."""
    return {
        (sample.name, sample.labels.get("position", "")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if "spec_decode" in sample.name
    }


def snapshot(rank: int = 0, epoch: int = 1, **figures: Any) -> RankSnapshot:
    return RankSnapshot(rank, epoch, 1e12, 5, **figures)


def test_counters_are_rank_zeros_and_survive_a_restart() -> None:
    metrics = EngineMetrics("m", 2, clock=lambda: 1e12)
    first = snapshot(draft_rounds=10, draft_tokens=20, accepted_by_position=(7, 4))
    metrics.update_snapshots([first, replace(first, rank=1)])
    metrics.update_snapshots([replace(first, step=6, draft_rounds=12, draft_tokens=24)])
    again = snapshot(epoch=2, draft_rounds=1, draft_tokens=2, accepted_by_position=(1, 1))
    metrics.update_snapshots([again])
    assert totals(metrics) == {
        ("nrank_spec_decode_drafts_total", ""): 13,
        ("nrank_spec_decode_draft_tokens_total", ""): 26,
        ("nrank_spec_decode_accepted_tokens_total", ""): 13,
        (NAME, "0"): 8,
        (NAME, "1"): 5,
    }


def test_a_gang_without_drafts_shows_zeros_and_no_position() -> None:
    metrics = EngineMetrics("m", 1, clock=lambda: 1e12)
    metrics.update_snapshots([snapshot()])
    found = totals(metrics)
    assert set(found.values()) == {0}
    assert NAME not in {name for name, _ in found}


@pytest.fixture
def valid(card: ModelCard, tokenizer: Tokenizer) -> ValidRequest:
    return valid_completion({"model": card.id, "prompt": "Say", "stop": ["9"]}, card, tokenizer)


@pytest.fixture
def choice(valid: ValidRequest, tokenizer: Tokenizer) -> Choice:
    return Choice(0, valid, tokenizer.vocabulary)


def batch(tokenizer: Tokenizer, text: str, drafts: int, accepted: int, **more: Any) -> TokenBatch:
    ids = tuple(tokenizer.encode(text))
    return TokenBatch("r", ids, draft_tokens=drafts, accepted_tokens=accepted, **more)


def test_usage_tells_the_totals_of_the_last_batch(
    choice: Choice, valid: ValidRequest, tokenizer: Tokenizer
) -> None:
    """Totals of merged batches are the later ones, not their sum."""
    one = batch(tokenizer, "Hello", 0, 0)
    two = merge(batch(tokenizer, " you", 2, 1), batch(tokenizer, " there", 6, 4))
    last = replace(batch(tokenizer, "!", 8, 4), finish_reason=FinishReason.STOP)
    for part in (one, two, last):
        choice.push(part)
    details = usage(valid, [choice])["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 4
    assert details["rejected_prediction_tokens"] == 4


def test_drafts_behind_a_stop_string_count_as_rejected(
    choice: Choice, valid: ValidRequest, tokenizer: Tokenizer
) -> None:
    choice.push(batch(tokenizer, "9 8 7", 4, 4))
    told = usage(valid, [choice])
    assert choice.stopped_by_string
    details = told["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == told["completion_tokens"] < 4
    assert sum(details.values()) == 4
