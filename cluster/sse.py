"""Server-sent events: an answer's events as `data:` lines, and the response that sends them.

Owns framing, comment lines and what happens when the client leaves. Knows nothing of validation
or of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.answers import Answer, AnswerEvent, Pace, PacedEvents
from cluster.completion import AnswerFormat, Choice, usage
from cluster.http_errors import http_error, log_server_error

T = TypeVar("T")

COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
# No line ends for SSE, but for clients that cut decoded text into lines.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
SSE_HEADERS: Mapping[str, str] = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`; cancels it and raises ClientDisconnect when the client leaves first.

    The request body must have been read: `receive` then waits for the disconnect only.
    """
    running = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientDisconnect
    finally:
        running.cancel()
        gone.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An answer's lines in order: role, text, finish reasons, usage when asked for, [DONE]."""

    def __init__(
        self, answer: Answer, events: PacedEvents, style: AnswerFormat, request_id: str
    ) -> None:
        self._answer = answer
        self._events = events
        self._style = style
        self._request_id = request_id
        self._opened: set[int] = set()

    async def lines(self, first: AnswerEvent | Pace) -> AsyncGenerator[bytes, None]:
        """`first` is what was seen before the headers. A late error is the last line."""
        event = first
        try:
            while event is not Pace.ENDED:
                yield COMMENT if isinstance(event, Pace) else self._lines_of(event)
                event = await self._events.next()
            if self._answer.request.include_usage:
                yield _data(self._style.usage(usage(self._answer.request, self._answer.choices)))
            yield DONE
        except Exception as error:  # the status is sent: the client can only learn it here
            log_server_error(error, self._request_id)
            yield _data(http_error(error).body())

    async def close(self) -> None:
        """Abort what still runs. The lines' own end can't do it: they may never have started."""
        await self._events.close()

    def _lines_of(self, event: AnswerEvent) -> bytes:
        chunks = self._opening(event.choice)
        chunks += [self._style.delta(event.choice, delta) for delta in event.deltas]
        if event.finished:
            chunks.append(self._style.closing(event.choice))
        return b"".join(map(self._chunk, chunks))

    def _opening(self, choice: Choice) -> list[dict[str, Any]]:
        if choice.index in self._opened:
            return []
        self._opened.add(choice.index)
        return self._style.opening(choice)

    def _chunk(self, chunk: dict[str, Any]) -> bytes:
        if self._answer.request.include_usage:
            chunk = {**chunk, "usage": None}
        return _data(chunk)


class SseResponse(Response):
    """Sends lines as they come and stops their generator the moment the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, stream: EventStream, first: AnswerEvent | Pace) -> None:
        self.status_code = 200
        self.background = None
        self._stream = stream
        self._lines = stream.lines(first)
        self.init_headers(SSE_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await until_disconnect(receive, self._send(send))
        finally:
            await self._lines.aclose()
            await self._stream.close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for line in self._lines:
            if not line:  # an event that only held text back
                continue
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _data(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    text = text.translate(_LINE_ENDS)
    return b"data: " + text.encode("utf-8") + b"\n\n"
