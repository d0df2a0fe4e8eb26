"""Streams: order of chunks, the same text as whole answers, errors and comments on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cluster.client import NotServing
from cluster.tokens import Tokenizer
from placement.errors import ErrorKind
from rank_worker.messages import FinishReason, TokenBatch

MODEL = "tiny-flash-next"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi"}
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"

Sse = Callable[[str], list[Any]]
ANSWER = (
    "<think>\nhm, 中 é\n</think>\n\nSo: 👍🏽 and STOPPED </x> ünd ST".encode() + b"\xe4!\xf0\x9f"
)


def joined(events: Sequence[Any], index: int = 0) -> dict[str, str]:
    """Text of one choice by field, its finish reason with it."""
    out: dict[str, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert "finish" not in out, "a chunk after the finish reason"
            parts = choice.get("delta", {"text": choice.get("text")})
            for key, text in parts.items():
                if key != "role":
                    out[key] = out.get(key, "") + text
            if choice["finish_reason"]:
                out["finish"] = choice["finish_reason"]
    return out


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "stop", [None, ["STOP"], ["</x>", "zzz"], ["é\n"], ["</think>"], ["\ufffd!"]]
)
def test_a_stream_says_what_the_whole_answer_says(
    client: TestClient,
    engine: Any,
    byte_ids: Callable[[bytes], tuple[int, ...]],
    batches: Callable[..., list[tuple[int, ...]]],
    sse: Sse,
    size: int,
    stop: list[str] | None,
) -> None:
    engine.script = lambda request: batches([*byte_ids(ANSWER), 4089], size)
    whole = client.post(CHAT_URL, json={**CHAT, "stop": stop}).json()
    body = {**CHAT, "stop": stop, "stream": True, "stream_options": {"include_usage": True}}
    events = sse(client.post(CHAT_URL, json=body).text)
    message = whole["choices"][0]["message"]
    got = joined(events)
    assert got["content"] == message["content"]
    assert got.get("reasoning") == got.get("reasoning_content") == message.get("reasoning")
    assert got["finish"] == whole["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["usage"] == whole["usage"]
    engine.script = lambda request: [[*byte_ids(ANSWER), 4089]]
    assert client.post(CHAT_URL, json={**CHAT, "stop": stop}).json()["usage"] == whole["usage"]
    assert engine.aborted == []


def test_chunks_come_in_openais_order(
    client: TestClient, engine: Any, tokenizer: Tokenizer, sse: Sse
) -> None:
    ids = tokenizer.encode("<think>why</think>because 👍🏽<|im_end|>")
    engine.script = lambda request: [(token,) for token in ids]
    response = client.post(CHAT_URL, json={**CHAT, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"]
    *chunks, done = sse(response.text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    kinds = ["reasoning" if "reasoning" in delta else "content" for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"reasoning", "content"}
    assert not any("reasoning" in delta and "content" in delta for delta in deltas)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    same = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
    assert len(same) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert "\ufffd" not in response.text


@pytest.mark.parametrize("url", [CHAT_URL, TEXT_URL])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_comes_once_and_only_when_asked(
    client: TestClient, engine: Any, sse: Sse, url: str, n: int
) -> None:
    engine.script = lambda request: [(65,), (66,), (4089,)]
    base = {**(CHAT if url == CHAT_URL else TEXT), "n": n, "stream": True}
    whole = client.post(url, json={**base, "stream": False}).json()["usage"]
    events = sse(client.post(url, json={**base, "stream_options": {"include_usage": True}}).text)
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole
    assert whole["completion_tokens"] == 3 * n
    assert all(event["usage"] is None for event in events[:-2])
    for options in (None, {"include_usage": False}, {}):
        plain = sse(client.post(url, json={**base, "stream_options": options}).text)
        assert all(event["choices"] and "usage" not in event for event in plain[:-1])


def test_choices_stream_side_by_side(
    client: TestClient, engine: Any, tokenizer: Tokenizer, sse: Sse
) -> None:
    def script(request: Any) -> list[tuple[int, ...]]:
        words = f"answer {request.sampling.choice} STOP more"
        return [(token,) for token in tokenizer.encode(words)] + [(4089,)]

    engine.script = script
    body = {**CHAT, "n": 3, "stream": True, "stop": " STOP"}
    events = sse(client.post(CHAT_URL, json=body).text)
    for index in range(3):
        assert joined(events, index) == {"content": f"answer {index}", "finish": "stop"}
    order = [event["choices"][0]["index"] for event in events[:-1]]
    assert order != sorted(order)
    assert len(engine.stopped) == 3
    assert (engine.aborted, engine.running) == ([], set())


def test_a_late_error_is_the_last_event(client: TestClient, engine: Any, sse: Sse) -> None:
    failed = {
        "message": "rank 1 died",
        "type": "server_error",
        "param": None,
        "code": "rank_failure",
    }
    late: list[Any] = [
        NotServing("rank 1 died", ErrorKind.RANK_FAILURE),
        TokenBatch(
            "x",
            (),
            FinishReason.ERROR,
            error_kind="rank_failure",
            error_message="rank 1 died",
        ),
    ]
    for error in late:
        engine.script = lambda request, error=error: [(65,), error]
        response = client.post(CHAT_URL, json={**CHAT, "stream": True})
        assert response.status_code == 200
        events = sse(response.text)
        assert events[-1] == {"error": failed}
        assert "[DONE]" not in events
        assert not engine.running


def test_an_unexpected_fault_tells_no_details(client: TestClient, engine: Any, sse: Sse) -> None:
    engine.script = lambda request: [(65,), ZeroDivisionError("secret")]
    events = sse(client.post(TEXT_URL, json={**TEXT, "stream": True}).text)
    assert events[-1]["error"]["code"] == "server_error"
    assert "secret" not in str(events)


def test_comments_keep_a_waiting_stream_alive(
    impatient_app: FastAPI, engine: Any, call: Any, sse: Sse
) -> None:
    async def scenario() -> str:
        first, second = asyncio.Event(), asyncio.Event()
        engine.script = lambda request: [first, (65,), second, (66,), (4089,)]
        running = call(impatient_app, CHAT_URL, {**CHAT, "stream": True})
        await running.until(lambda seen: seen.text.count(": waiting") == 2)
        assert running.status == 200
        assert "data:" not in running.text
        first.set()
        await running.until(lambda seen: '"content":"' in seen.text)
        seen_before = running.text.count(": waiting")
        await running.until(lambda seen: seen.text.count(": waiting") > seen_before)
        second.set()
        await running.done()
        return str(running.text)

    events = sse(asyncio.run(scenario()))
    assert joined(events)["finish"] == "stop"
    assert events[-1] == "[DONE]"


def test_an_error_after_the_first_comment_comes_as_an_event(
    impatient_app: FastAPI, engine: Any, call: Any, sse: Sse
) -> None:
    async def scenario() -> str:
        gate = asyncio.Event()
        engine.script = lambda request: [gate, NotServing("gone", ErrorKind.RANK_FAILURE)]
        running = call(impatient_app, CHAT_URL, {**CHAT, "stream": True})
        await running.until(lambda seen: ": waiting" in seen.text)
        gate.set()
        await running.done()
        return str(running.text)

    (event,) = sse(asyncio.run(scenario()))
    assert event["error"]["code"] == "rank_failure"
