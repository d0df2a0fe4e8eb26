"""A client that leaves, in every phase: the engine's request is aborted, nothing keeps running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI

MODEL = "tiny-flash-next"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
URL = "/v1/chat/completions"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """One event loop a scenario; no task may be left when it ends."""

    async def checked() -> None:
        await scenario()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others

    asyncio.run(checked())


@pytest.mark.parametrize("leave", ["disconnect", "cancel"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token(
    app: FastAPI, engine: Any, call: Any, stream: bool, n: int, leave: str
) -> None:
    async def scenario() -> None:
        engine.script = lambda request: [asyncio.Event()]
        running = call(app, URL, {**CHAT, "stream": stream, "n": n})
        await engine.waiting.wait()
        getattr(running, leave)()
        await running.done()
        assert running.status in (None, 499)
        assert "data:" not in running.text

    run(scenario)
    assert len(engine.aborted) == n
    assert not engine.running
    assert engine.http == [(URL, 499)]


@pytest.mark.parametrize("leave", ["disconnect", "cancel"])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_in_the_middle_of_a_stream(
    app: FastAPI, engine: Any, call: Any, n: int, leave: str
) -> None:
    async def scenario() -> None:
        engine.script = lambda request: [(65,), (66,), asyncio.Event()]
        running = call(app, URL, {**CHAT, "stream": True, "n": n})
        await running.until(lambda seen: seen.text.count('"content":"') >= 2 * n)
        await engine.waiting.wait()
        getattr(running, leave)()
        await running.done()
        assert "[DONE]" not in running.text

    run(scenario)
    assert len(engine.aborted) == n
    assert not engine.running


def test_leaving_in_the_middle_of_a_whole_answer(app: FastAPI, engine: Any, call: Any) -> None:
    async def scenario() -> None:
        engine.script = lambda request: [(65,), asyncio.Event()]
        running = call(app, URL, CHAT)
        await engine.waiting.wait()
        running.disconnect()
        await running.done()

    run(scenario)
    assert len(engine.aborted) == 1


def test_leaving_while_comments_are_sent(impatient_app: FastAPI, engine: Any, call: Any) -> None:
    async def scenario() -> None:
        engine.script = lambda request: [asyncio.Event()]
        running = call(impatient_app, URL, {**CHAT, "stream": True})
        await running.until(lambda seen: ": waiting" in seen.text)
        running.disconnect()
        await running.done()

    run(scenario)
    assert len(engine.aborted) == 1


def test_a_finished_choice_is_not_aborted_when_the_client_leaves_the_rest(
    app: FastAPI, engine: Any, call: Any, byte_ids: Callable[[bytes], tuple[int, ...]]
) -> None:
    async def scenario() -> None:
        def script(request: Any) -> list[Any]:
            if request.sampling.choice == 0:
                return [byte_ids(b"ab#c"), asyncio.Event()]
            return [byte_ids(b"x"), asyncio.Event()]

        engine.script = script
        running = call(app, URL, {**CHAT, "stream": True, "n": 2, "stop": "#"})
        await running.until(lambda seen: '"finish_reason":"stop"' in seen.text)
        await running.until(lambda seen: '"content":"x"' in seen.text)
        running.disconnect()
        await running.done()

    run(scenario)
    first, second = (request.request_id for request in engine.requests)
    assert engine.stopped == [first]
    assert engine.aborted == [second]
    assert not engine.running


def test_a_slow_reader_holds_the_engine_back(app: FastAPI, engine: Any, call: Any) -> None:
    """Batches wait in a bounded queue; what isn't read isn't taken from the engine."""
    taken = 0

    def script(request: Any) -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield (65,)

    async def scenario() -> None:
        engine.script = script
        running = call(app, URL, {**CHAT, "stream": True, "max_tokens": 200})
        running.reading.clear()
        await running.until(lambda seen: seen.status == 200)
        for _ in range(500):  # turns of the loop, not time
            await asyncio.sleep(0)
        assert taken <= 12
        running.disconnect()
        await running.done()

    run(scenario)
    assert len(engine.aborted) == 1
