"""One HTTP request's answer as it is generated: batches in, text out, waits bounded.

Owns the loop over all choices and its pacing (an event, or nothing for a while). Knows nothing
of HTTP framing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum, auto

from cluster.client import EngineClient
from cluster.completion import Choice
from cluster.fanout import Fanout
from cluster.reasoning import Delta
from cluster.tokens import Vocabulary
from cluster.validate import ValidRequest


@dataclass(frozen=True)
class AnswerEvent:
    """New text of one choice, or nothing but its end. `choice` keeps growing afterwards."""

    choice: Choice
    deltas: tuple[Delta, ...]
    finished: bool


class Answer:
    """All choices of one request. `events()` drives them; the choices hold what came so far."""

    def __init__(
        self,
        engine: EngineClient,
        request: ValidRequest,
        vocabulary: Vocabulary,
        request_id: str,
        arrival_s: float,
    ) -> None:
        self._engine = engine
        self._engine_requests = [
            request.engine_request(request_id, index, arrival_s)
            for index in range(request.num_choices)
        ]
        self.request = request
        self.choices = [Choice(index, request, vocabulary) for index in range(request.num_choices)]

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Until every choice is finished. Closing aborts the rest; engine errors pass through."""
        async with Fanout(self._engine, self._engine_requests) as fanout:
            while any(choice.finish_reason is None for choice in self.choices):
                index, batch = await fanout.next()
                choice = self.choices[index]
                if choice.finish_reason is not None:
                    continue  # a batch that was under way when the stop string matched
                deltas = choice.push(batch)
                if choice.stopped_by_string and batch.finish_reason is None:
                    await fanout.stop(index)
                yield AnswerEvent(choice, tuple(deltas), choice.finish_reason is not None)

    async def complete(self) -> None:
        """Run to the end. Raises what the engine raised for any choice."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass


class Pace(Enum):
    """What `PacedEvents.next` tells when there is no event."""

    WAITING = auto()
    ENDED = auto()


class PacedEvents:
    """Events of an answer, and a sign of life each `interval_s` of wall clock without one."""

    def __init__(self, answer: Answer, interval_s: float) -> None:
        self._events = answer.events()
        self._interval_s = interval_s
        self._pending: asyncio.Task[AnswerEvent | Pace] | None = None

    async def next(self) -> AnswerEvent | Pace:
        """The next event, WAITING after one interval, or ENDED. Engine errors are raised here."""
        if self._pending is None:
            self._pending = asyncio.create_task(self._advance())
        await asyncio.wait({self._pending}, timeout=self._interval_s)
        if not self._pending.done():
            return Pace.WAITING
        finished, self._pending = self._pending, None
        return finished.result()

    async def close(self) -> None:
        """Abort what still runs. Safe to call at any time, also twice."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait({self._pending})
            self._pending = None
        await self._events.aclose()

    async def _advance(self) -> AnswerEvent | Pace:
        return await anext(self._events, Pace.ENDED)
