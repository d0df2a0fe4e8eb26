"""Log-probabilities over HTTP: whose are told, when, in which shape; echoed prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cluster.tokens import Tokenizer
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch, TokenLogprob

CHAT = {"model": "tiny-flash-next", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny-flash-next", "prompt": "Hi there"}
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
ByteIds = Callable[[bytes], tuple[int, ...]]
Sse = Callable[[str], list[Any]]


def values(ids: Sequence[int], first: int = 0) -> tuple[TokenLogprob, ...]:
    """Token i has -(i + 1) / 8 and two likely ones, itself and the next id."""
    return tuple(
        TokenLogprob(-(first + i + 1) / 8, ((token, -(first + i + 1) / 8), (token + 1, -9.0)))
        for i, token in enumerate(ids)
    )


def script(engine: Any, pieces: Sequence[Sequence[int]], end: int | None = None) -> None:
    """Each piece is a step; the log-probabilities are counted through."""

    def steps(request: EngineRequest) -> list[TokenBatch]:
        out, made = [], 0
        for at, piece in enumerate(pieces):
            is_last = at == len(pieces) - 1
            ids = (*piece, end) if is_last and end is not None else tuple(piece)
            reason = (
                (FinishReason.LENGTH if end is None else FinishReason.STOP) if is_last else None
            )
            told = values(ids, made) if request.logprobs >= 0 else ()
            prompt = ()
            if request.prompt_logprobs and not at:
                prompt = values(request.prompt_ids[1:], 100)
            out.append(
                TokenBatch(
                    request.request_id, ids, reason, prompt_tokens=len(request.prompt_ids),
                    logprobs=told, prompt_logprobs=prompt,
                )
            )  # fmt: skip
            made += len(ids)
        return out

    engine.script = steps


def streamed(client: TestClient, sse: Sse, url: str, body: dict[str, Any]) -> list[Any]:
    chunks = sse(client.post(url, json={**body, "stream": True}).text)
    assert chunks.pop() == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


def test_a_chat_tells_token_bytes_and_the_likely_ones(
    client: TestClient, engine: Any, byte_ids: ByteIds
) -> None:
    ids = byte_ids("H中".encode())
    script(engine, [ids])
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    choice = client.post(CHAT_URL, json=body).json()["choices"][0]
    assert choice["message"]["content"] == "H中"
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0x48], [0xE4], [0xB8], [0xAD]]
    assert [entry["logprob"] for entry in content] == [-0.125, -0.25, -0.375, -0.5]
    assert content[0]["token"] == "H"
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    assert content[0]["top_logprobs"][0] == {"token": "H", "logprob": -0.125, "bytes": [0x48]}
    assert engine.requests[0].logprobs == 2


def test_a_completion_tells_lists_of_one_item_a_token(
    client: TestClient, engine: Any, byte_ids: ByteIds
) -> None:
    script(engine, [byte_ids("a中b".encode())])
    told = client.post(TEXT_URL, json={**TEXT, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\xad", "b"]
    assert told["text_offset"] == [0, 1, 1, 1, 2]
    assert told["token_logprobs"] == [-(i + 1) / 8 for i in range(5)]
    assert [len(top) for top in told["top_logprobs"]] == [2] * 5
    assert told["top_logprobs"][0]["a"] == -0.125


def test_without_the_wish_nothing_is_told(
    client: TestClient, engine: Any, byte_ids: ByteIds
) -> None:
    script(engine, [byte_ids(b"ab")])
    for url, body in ((CHAT_URL, CHAT), (TEXT_URL, TEXT)):
        assert client.post(url, json=body).json()["choices"][0]["logprobs"] is None
    assert [request.logprobs for request in engine.requests] == [-1, -1]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", [None, "cd", "gh", "xyz", "fgq"])
def test_a_stream_tells_each_token_once_and_none_of_a_stop(
    client: TestClient, engine: Any, byte_ids: ByteIds, sse: Sse, size: int, stop: str | None,
    batches: Callable[..., Any],
) -> None:  # fmt: skip
    text = "ab中cd😀efg"
    script(engine, batches(byte_ids(text.encode()), size))
    more: dict[str, Any] = {"stop": stop} if stop else {}
    shown = text.partition(stop)[0] if stop else text
    for url, body in (
        (CHAT_URL, {**CHAT, "logprobs": True, **more}),
        (TEXT_URL, {**TEXT, "logprobs": 0, **more}),
    ):
        whole = client.post(url, json=body).json()["choices"][0]
        parts = streamed(client, sse, url, body)
        if url == CHAT_URL:
            expected = whole["logprobs"]["content"]
            told = [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
            data = b"".join(bytes(entry["bytes"]) for entry in told)
            assert data.decode() == shown
        else:
            expected = whole["logprobs"]["tokens"]
            told = [e for part in parts for e in part["logprobs"]["tokens"]]
            assert len(told) == len(shown.encode())
        assert told == expected
        sent = ""
        for part in parts:  # nobody is told of text that is not sent yet
            sent += part["delta"].get("content", "") if url == CHAT_URL else part["text"]
            entries = (part["logprobs"] or {}).get("content" if url == CHAT_URL else "tokens", [])
            assert not entries or sent
            if url == TEXT_URL and part["logprobs"]["text_offset"]:
                assert max(part["logprobs"]["text_offset"]) < max(1, len(sent))


def test_the_token_that_ended_the_answer_is_not_told(
    client: TestClient, engine: Any, byte_ids: ByteIds, card: Any
) -> None:
    script(engine, [byte_ids(b"ab")], end=card.eos_token_ids[0])
    answer = client.post(CHAT_URL, json={**CHAT, "logprobs": True}).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2
    assert answer["usage"]["completion_tokens"] == 3


def test_an_echoed_prompt_stands_before_the_answer(
    client: TestClient, engine: Any, byte_ids: ByteIds, tokenizer: Tokenizer, sse: Sse
) -> None:
    script(engine, [byte_ids(b"ab"), byte_ids(b"c")])
    body = {**TEXT, "echo": True, "logprobs": 1}
    choice = client.post(TEXT_URL, json=body).json()["choices"][0]
    prompt = tokenizer.encode("Hi there")
    told = choice["logprobs"]
    assert choice["text"] == "Hi thereabc"
    assert len(told["tokens"]) == len(prompt) + 3
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1] == -101 / 8
    assert told["text_offset"][-3:] == [8, 9, 10]
    assert "".join(told["tokens"]) == choice["text"]
    parts = streamed(client, sse, TEXT_URL, body)
    assert "".join(part["text"] for part in parts) == choice["text"]
    joined = {key: [x for part in parts for x in part["logprobs"][key]] for key in told}
    assert joined == told
    assert engine.requests[0].prompt_logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_needs_no_answer(
    client: TestClient, engine: Any, byte_ids: ByteIds, sse: Sse, stream: bool
) -> None:
    """What evaluation harnesses ask for: `max_tokens` 0 with `echo`."""
    script(engine, [byte_ids(b"a")])
    body = {**TEXT, "echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        parts = streamed(client, sse, TEXT_URL, body)
        text, tokens = "".join(p["text"] for p in parts), parts[0]["logprobs"]["tokens"]
    else:
        answer = client.post(TEXT_URL, json=body).json()
        assert answer["usage"]["completion_tokens"] == 0
        text, tokens = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]["tokens"]
    assert text == "Hi there"
    assert "".join(tokens) == "Hi there"
    assert engine.requests[0].max_tokens == 1


def test_an_impossible_token_is_told_with_the_least_figure(
    client: TestClient, engine: Any, byte_ids: ByteIds
) -> None:
    (token,) = byte_ids(b"a")
    batch = TokenBatch(
        "", (token,), FinishReason.LENGTH, logprobs=(TokenLogprob(-math.inf, ((3, -math.inf),)),)
    )
    engine.script = lambda request: [batch]
    answer = client.post(CHAT_URL, json={**CHAT, "logprobs": True, "top_logprobs": 1})
    entry = answer.json()["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT_URL, {**CHAT, "top_logprobs": 2}, "top_logprobs"),
        (CHAT_URL, {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT_URL, {**CHAT, "logprobs": 3}, "logprobs"),
        (CHAT_URL, {**CHAT, "echo": True}, "echo"),
        (TEXT_URL, {**TEXT, "logprobs": 21}, "logprobs"),
        (TEXT_URL, {**TEXT, "logprobs": True}, "logprobs"),
        (TEXT_URL, {**TEXT, "max_tokens": 0}, "max_tokens"),
        (TEXT_URL, {**TEXT, "echo": 1}, "echo"),
    ],
)
def test_bad_values_are_refused_by_name(
    client: TestClient, url: str, body: dict[str, Any], param: str
) -> None:
    answer = client.post(url, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
