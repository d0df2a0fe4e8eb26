"""Fields that can't be honoured are refused by name; tokens before an error are not lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from placement.errors import ErrorKind
from rank_worker.messages import FinishReason, TokenBatch

MODEL = "tiny-flash-next"
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": "hi"})


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (TEXT, "max_completion_tokens", 5),
        (TEXT, "messages", []),
        (TEXT, "chat_template_kwargs", {"enable_thinking": False}),
        (TEXT, "reasoning_effort", "low"),
        (TEXT, "top_logprobs", 1),
        (CHAT, "prompt", "x"),
        (CHAT, "echo", True),
        (CHAT, "chat_template", "{{ messages }}"),
        (CHAT, "documents", [{"text": "x"}]),
        (CHAT, "logits_processors", ["x"]),
        (CHAT, "reasoning", {"effort": "low"}),
    ],
)
def test_a_field_that_would_change_the_answer_is_not_ignored(
    client: TestClient, route: tuple[str, dict[str, Any]], field: str, value: Any
) -> None:
    url, body = route
    answer = client.post(url, json={"model": MODEL, **body, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("url", "body"),
    [
        CHAT,
        TEXT,
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
@pytest.mark.parametrize(
    ("field", "remedy"), [("no_such_field", "remove it"), ("modell", "did you mean model?")]
)
def test_a_field_that_nobody_knows_is_refused_by_name(
    client: TestClient, url: str, body: dict[str, Any], field: str, remedy: str
) -> None:
    answer = client.post(url, json={"model": MODEL, **body, field: 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, "unknown_parameter")
    assert error["message"].endswith(remedy)


def test_an_unknown_stream_option_is_refused_by_name(client: TestClient) -> None:
    url, body = TEXT
    options = {"include_usage": True, "include_obfuscation": False, "include_usge": True}
    body = {"model": MODEL, **body, "stream": True, "stream_options": options}
    error = client.post(url, json=body).json()["error"]
    assert error["param"] == "stream_options.include_usge"


def test_tokens_that_came_with_an_error_are_sent_before_it(
    client: TestClient, engine: Any, byte_ids: Any, sse: Any
) -> None:
    failed = TokenBatch(
        "", byte_ids(b"bc"), FinishReason.ERROR,
        error_kind=ErrorKind.RANK_FAILURE.value, error_message="rank 1 died",
    )  # fmt: skip
    engine.script = lambda request: [byte_ids(b"a"), failed]
    url, body = TEXT
    *chunks, last = sse(client.post(url, json={"model": MODEL, **body, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert last["error"]["code"] == "rank_failure"


def status_of_call(client: TestClient, arguments: Any) -> int:
    """Of a chat with a tool call that has these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    return client.post(CHAT[0], json={"model": MODEL, "messages": messages}).status_code


def test_deeply_nested_arguments_are_refused(client: TestClient) -> None:
    arguments: Any = "x"
    for _ in range(930):
        arguments = [arguments]
    assert status_of_call(client, arguments) < 500


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a":' * 5000])
def test_arguments_nested_too_deeply_for_a_parser_stay_text(
    client: TestClient, arguments: str
) -> None:
    assert status_of_call(client, arguments) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m" * 10_000},
        {"prompt": [10**4000]},
        {"stream": True, "stream_options": {"x" * 10_000: 1}},
        {"\ud800": 1},
        {"\n\x07": 1},
    ],
)
def test_what_a_client_sent_is_quoted_in_one_short_line(
    client: TestClient, fields: dict[str, Any]
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", **fields})
    answer = client.post(TEXT[0], content=body)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    for text in (error["message"], error["param"]):
        assert text.isprintable()
        assert len(text) < 1100
    if "model" in fields:
        assert error["message"].endswith(f"this server has {MODEL!r}")
