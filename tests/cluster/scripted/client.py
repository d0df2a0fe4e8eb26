"""A client that reads answers and streams as strictly as the strictest one would.

Owns the check of every response: status, one JSON object an event, the order of chunks. Knows
nothing of what the text should be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.cluster.scripted.gated_server import LIMIT_S, MODEL, GatedServer

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"

Body = dict[str, Any]


@dataclass
class Reply:
    """One choice, of a whole answer or joined from chunks."""

    content: str = ""
    reasoning: str = ""
    finish: str | None = None

    @property
    def text(self) -> str:
        """All of it, in the order in which it is sent."""
        return self.reasoning + self.content


@dataclass
class Answer:
    """What has been read of one response."""

    choices: list[Reply]
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False


class Client:
    """Bodies name no model. Chats have `messages`; whether to stream is for the method to say."""

    def __init__(self, server: GatedServer) -> None:
        self._server = server

    def ask(self, *bodies: Body) -> list[Answer]:
        """Answers to bodies that are sent side by side."""

        async def all_of() -> list[Answer]:
            async with self._http() as http:
                return list(await asyncio.gather(*(_ask(http, body) for body in bodies)))

        return self._server.run(all_of())

    def ask_both_ways(self, *bodies: Body) -> list[tuple[Answer, Answer]]:
        """Each body's whole answer and stream."""
        answers = self.ask(*({**body, "stream": way} for body in bodies for way in (False, True)))
        return list(zip(answers[::2], answers[1::2], strict=True))

    async def read(self, body: Body) -> AsyncIterator[Answer]:
        """A stream's answer as it grows, whenever the socket brings something. For the loop."""
        async with self._http() as http:
            async for answer in _read(http, {**body, "stream": True}):
                yield answer

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._server.url,
            timeout=LIMIT_S,
            trust_env=False,
            verify=False,  # plain HTTP: reading certificates takes longer than an answer
            limits=httpx.Limits(max_connections=None),
        )


async def _ask(http: httpx.AsyncClient, body: Body) -> Answer:
    if body["stream"]:
        return [answer async for answer in _read(http, body)][-1]
    response = await http.post(_url(body), json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    whole = response.json()
    replies = [_reply(choice, choice.get("message", choice)) for choice in whole["choices"]]
    return Answer(replies, whole["usage"], is_done=True)


async def _read(http: httpx.AsyncClient, body: Body) -> AsyncIterator[Answer]:
    answer = Answer([Reply() for _ in range(body.get("n", 1))])
    body = {"model": MODEL, "stream_options": {"include_usage": True}, **body}
    rest = b""
    async with http.stream("POST", _url(body), json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for part in response.aiter_bytes():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                _take(answer, event)
            yield answer
    assert not rest, "the stream ended inside an event"
    assert answer.is_done, "the stream ended without [DONE]"


def _url(body: Body) -> str:
    return CHAT_URL if "messages" in body else TEXT_URL


def _reply(choice: dict[str, Any], parts: dict[str, Any]) -> Reply:
    """A choice, or what a chunk adds to one; `parts` holds its text."""
    assert parts.get("reasoning") == parts.get("reasoning_content")
    content = parts.get("content", parts.get("text", ""))
    return Reply(content, parts.get("reasoning", ""), choice["finish_reason"])


def _take(answer: Answer, event: bytes) -> None:
    assert event.startswith(b"data: ")
    assert len(event.decode().splitlines()) == 1
    assert not answer.is_done, "an event after [DONE]"
    if event == b"data: [DONE]":
        answer.is_done = True
        return
    chunk = json.loads(event.removeprefix(b"data: "))
    assert "error" not in chunk, chunk
    assert not answer.usage, "a chunk after the usage"
    if not chunk["choices"]:
        answer.usage = chunk["usage"]
    for choice in chunk["choices"]:
        _grow(answer.choices[choice["index"]], _reply(choice, choice.get("delta", choice)))


def _grow(reply: Reply, new: Reply) -> None:
    assert reply.finish is None, "a chunk after the finish reason"
    assert not (new.reasoning and (new.content or reply.content)), "reasoning behind content"
    reply.reasoning += new.reasoning
    reply.content += new.content
    reply.finish = new.finish
