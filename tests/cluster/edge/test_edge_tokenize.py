"""/tokenize and /detokenize: what a prompt becomes, and back."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from cluster.client import EngineState, EngineStatus
from cluster.model_card import ModelCard
from cluster.tokens import Tokenizer

MODEL = "tiny-flash-next"
MESSAGES = [{"role": "user", "content": "hi 中😀"}]


def test_a_text_goes_there_and_back(client: TestClient, tokenizer: Tokenizer) -> None:
    text = "Hello 中😀 <|im_end|>"
    told = client.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert told["tokens"] == list(tokenizer.encode(text))
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 256
    back = client.post("/detokenize", json={"model": MODEL, "tokens": told["tokens"]}).json()
    assert back == {"prompt": text}


def test_a_chat_is_what_the_chat_route_would_run(
    client: TestClient, engine: Any, tokenizer: Tokenizer
) -> None:
    engine.script = lambda request: [(1,)]
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        told = client.post("/tokenize", json={"model": MODEL, "messages": MESSAGES, **more}).json()
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, **more}
        client.post("/v1/chat/completions", json=body)
        assert tuple(told["tokens"]) == engine.requests[-1].prompt_ids


def test_strings_of_tokens_are_told_when_asked_for(client: TestClient) -> None:
    body = {"model": MODEL, "prompt": "ab", "return_token_strs": True}
    told = client.post("/tokenize", json=body).json()
    assert "".join(told["token_strs"]) == "ab"
    assert "token_strs" not in client.post("/tokenize", json={"model": MODEL, "prompt": "a"}).json()


def test_both_answer_while_the_engine_does_not(client: TestClient, engine: Any) -> None:
    engine.state = EngineStatus(EngineState.STARTING, ready=False, reason="loading")
    assert client.post("/tokenize", json={"model": MODEL, "prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": 3}, "prompt"),
        ("/tokenize", {"model": MODEL, "messages": []}, "messages"),
        ("/detokenize", {"model": MODEL}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": "a"}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [10**9]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, "tokens"),
    ],
)
def test_bad_bodies_are_refused_by_name(
    client: TestClient, card: ModelCard, url: str, body: dict[str, Any], param: str
) -> None:
    answer = client.post(url, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
