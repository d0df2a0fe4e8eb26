"""Records to build ledgers of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deploy.gpqa.ledger import Contents
from deploy.gpqa.records import Answer, Failure, Header, Record, Session

HEADER = Header(
    run_id="r1",
    created_at=1.0,
    dataset_sha256="d" * 64,
    questions=4,
    preset="aisbench",
    preset_sha256="p",
    extractor=1,
    model="m",
    plan_id="plan",
    server_revision="rev",
    seed=1,
    max_tokens=100,
    temperature=0.0,
    top_p=None,
    top_k=None,
)
SESSION = Session(100.0, "http://h:1", 4, "abc", "conf")
ANSWER = Answer(
    id="q1",
    question_sha256="s",
    domain="Physics",
    order="BCDA",
    key="D",
    prompt_sha256="t",
    attempts=1,
    started_at=100.0,
    ended_at=110.0,
    waited_s=0.0,
    held_s=0.0,
    ttft_s=1.0,
    prompt_tokens=20,
    completion_tokens=100,
    reasoning_tokens=0,
    accepted_tokens=0,
    rejected_tokens=0,
    finish_reason="stop",
    response_id="c",
    strict="D",
    robust="D",
    reasoning="",
    text="two\nlines \u2028 Answer: D",
)
FAILURE = Failure("q2", "s2", "Biology", 111.0, 3, "HTTP 500", "detail")


def answer(record_id: str, letter: str | None = "D", **more: Any) -> Answer:
    return replace(ANSWER, id=record_id, strict=letter, robust=letter, **more)


def contents(*records: Record, questions: int = 4, **header: Any) -> Contents:
    return Contents(replace(HEADER, questions=questions, **header), (SESSION, *records))
