"""Asks a question until there is an answer: attempts that failed, and waits for the server.

An attempt that failed is made again with the same seed, `retries` times. A server that takes
nothing now (429, 503, no connection) is waited for, which costs no attempt; one that stays away
for too long ends the run, since no other question would fare better.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from deploy.gpqa.endpoint import AttemptFailed, Away, Cause, Endpoint, Refused, Reply
from deploy.gpqa.extract import full_text, robust, strict
from deploy.gpqa.presets import Prompt
from deploy.gpqa.records import Answer, Failure, Header
from deploy.gpqa.server_facts import ServerFailure

# Of a queue that is full or a server that is held: a card cools for minutes, a person may be away.
LONG_WAIT_S = 6 * 3600.0
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class Patience:
    """`away_s`: how long a server may not be there before the run ends."""

    retries: int
    away_s: float

    def limit_s(self, cause: Cause) -> float:
        return self.away_s if cause is Cause.GONE else LONG_WAIT_S


@dataclass
class _Waits:
    """Of one question, in seconds by cause."""

    all_s: Counter[Cause] = field(default_factory=Counter)
    in_a_row_s: Counter[Cause] = field(default_factory=Counter)
    pauses: int = 0

    def add(self, cause: Cause, spent_s: float) -> None:
        self.all_s[cause] += spent_s  # type: ignore[assignment]  # Counter adds any number
        self.in_a_row_s[cause] += spent_s  # type: ignore[assignment]
        self.pauses += 1

    def taken(self) -> None:
        self.in_a_row_s.clear()
        self.pauses = 0


class Asker:
    """Of one run; any number of questions at once."""

    def __init__(
        self,
        endpoint: Endpoint,
        header: Header,
        patience: Patience,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._endpoint, self._header, self._patience = endpoint, header, patience
        self._sleep = sleep

    async def ask(self, prompt: Prompt) -> Answer | Failure:
        """Raises ServerFailure when the run has to end."""
        waits = _Waits()
        for attempt in range(1, self._patience.retries + 2):
            try:
                reply = await self._taken(prompt, waits)
            except Refused as error:
                if error.is_for_all:
                    url = self._endpoint.base_url
                    raise ServerFailure(f"{url} takes no question: {error.reason}") from None
                return _failure(prompt, attempt, error)
            except AttemptFailed as error:
                failure = _failure(prompt, attempt, error)
                if attempt <= self._patience.retries:
                    await self._sleep(_pause_s(attempt))
                continue
            return _answer(prompt, reply, attempt, waits)
        return failure

    async def _taken(self, prompt: Prompt, waits: _Waits) -> Reply:
        """One attempt, once the server takes it."""
        while True:
            try:
                reply = await self._endpoint.ask(self._header, prompt.text)
            except Away as away:
                await self._wait(away, waits)
            except AttemptFailed:
                waits.taken()
                raise
            else:
                return reply

    async def _wait(self, away: Away, waits: _Waits) -> None:
        limit_s = self._patience.limit_s(away.cause)
        if waits.in_a_row_s[away.cause] >= limit_s:
            raise ServerFailure(
                f"{self._endpoint.base_url} took no question for {limit_s:g} s ({away.reason}); "
                f"resume with the same command when it serves again"
            )
        began_s = time.monotonic()
        await self._sleep(_pause_s(waits.pauses + 1) if away.pause_s is None else away.pause_s)
        waits.add(away.cause, time.monotonic() - began_s)


def _pause_s(count: int) -> float:
    """Before the next try after `count` that failed: 1, 2, 4 ... 30 s."""
    return min(FIRST_PAUSE_S * 2.0 ** min(count - 1, 10), LAST_PAUSE_S)


def _failure(prompt: Prompt, attempts: int, error: AttemptFailed) -> Failure:
    question = prompt.question
    return Failure(
        id=question.id,
        question_sha256=question.sha256,
        domain=question.domain,
        ended_at=time.time(),
        attempts=attempts,
        reason=error.reason,
        detail=error.detail,
    )


def _answer(prompt: Prompt, reply: Reply, attempts: int, waits: _Waits) -> Answer:
    question, text = prompt.question, full_text(reply.reasoning, reply.content)
    return Answer(
        id=question.id,
        question_sha256=question.sha256,
        domain=question.domain,
        order=prompt.order,
        key=prompt.key,
        prompt_sha256=prompt.sha256,
        attempts=attempts,
        started_at=reply.started_at,
        ended_at=reply.ended_at,
        waited_s=sum(waits.all_s.values(), 0.0),
        held_s=float(waits.all_s[Cause.HELD]),
        ttft_s=reply.ttft_s,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        reasoning_tokens=reply.reasoning_tokens,
        accepted_tokens=reply.accepted_tokens,
        rejected_tokens=reply.rejected_tokens,
        finish_reason=reply.finish_reason,
        response_id=reply.id,
        strict=strict(text),
        robust=robust(text),
        reasoning=reply.reasoning,
        text=reply.content,
    )
