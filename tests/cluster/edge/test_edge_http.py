"""Whole answers, models, health and the error envelope, over the real routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cluster.client import EngineState, EngineStatus, NotServing, RankStatus
from cluster.ingress import EdgeSettings, make_app
from cluster.model_card import ModelCard
from cluster.tokens import Tokenizer
from placement.errors import ClientError, ErrorKind, RankError
from rank_worker.messages import FinishReason, TokenBatch
from rank_worker.start_report import RankBytes, StartReport

MODEL = "tiny-flash-next"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi"}
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"


def check_envelope(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert "\n" not in error["message"]
    return dict(error)


def test_a_chat_answer_has_the_openai_shape(
    client: TestClient, engine: Any, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("<think>\nLet me see\n</think>\n\nHello!<|im_end|>")
    engine.script = lambda request: [ids]
    body = client.post(CHAT_URL, json=CHAT).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello!",
        "reasoning": "Let me see",
        "reasoning_content": "Let me see",
    }
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = body["usage"]
    assert usage["completion_tokens"] == len(ids)
    assert usage["prompt_tokens"] == len(engine.requests[0].prompt_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    reasoning_ids = tokenizer.encode("<think>\nLet me see\n</think>")
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": len(reasoning_ids),
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert client.post(CHAT_URL, json=CHAT).json()["id"] != body["id"]


def test_without_thinking_there_is_no_reasoning_field(
    client: TestClient, engine: Any, tokenizer: Tokenizer
) -> None:
    engine.script = lambda request: [tokenizer.encode("Plain <think> no </think>.<|im_end|>")]
    body = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    message = client.post(CHAT_URL, json=body).json()["choices"][0]["message"]
    assert set(message) == {"role", "content"}
    assert message["content"] == "Plain  no ."


@pytest.mark.parametrize("answer", ["<think>a</think>b</think>c<think>", "b</think>c<think>"])
def test_a_stray_thinking_tag_never_shows(
    client: TestClient, engine: Any, tokenizer: Tokenizer, answer: str
) -> None:
    engine.script = lambda request: [tokenizer.encode(f"{answer}<|im_end|>")]
    assert client.post(CHAT_URL, json=CHAT).json()["choices"][0]["message"]["content"] == "bc"


def test_a_cut_inside_reasoning_is_length_with_empty_content(
    client: TestClient, engine: Any, tokenizer: Tokenizer
) -> None:
    engine.script = lambda request: [tokenizer.encode("<think>a long thought that goes on")]
    body = client.post(CHAT_URL, json={**CHAT, "max_completion_tokens": 4}).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning"]
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_completions_answer_every_prompt_and_choice_in_order(
    client: TestClient, engine: Any, tokenizer: Tokenizer
) -> None:
    def script(request: Any) -> list[Sequence[int]]:
        prompt = tokenizer.decode(request.prompt_ids)
        return [tokenizer.encode(f"{prompt}-{request.sampling.choice}<|im_end|>")]

    engine.script = script
    body = client.post(TEXT_URL, json={**TEXT, "prompt": ["x", "y"], "n": 2}).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert [choice["text"] for choice in body["choices"]] == ["x-0", "x-1", "y-0", "y-1"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2
    made = sum(len(tokenizer.encode(f"{p}-{c}")) + 1 for p in "xy" for c in "01")
    assert body["usage"]["completion_tokens"] == made
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


def test_a_stop_string_ends_the_answer_where_it_completes(
    client: TestClient, engine: Any, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("One. Two. Three. Four")
    engine.script = lambda request: [(token,) for token in ids]
    body = client.post(TEXT_URL, json={**TEXT, "stop": [" Th", "Four"]}).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("One. Two.", "stop")
    used = next(n for n in range(len(ids)) if " Th" in tokenizer.decode(ids[:n]))
    assert body["usage"]["completion_tokens"] == used
    assert engine.stopped == [engine.requests[0].request_id]
    assert (engine.aborted, engine.running) == ([], set())


def test_tokens_after_a_stop_in_one_batch_are_not_counted(
    client: TestClient, engine: Any, byte_ids: Callable[[bytes], tuple[int, ...]]
) -> None:
    engine.script = lambda request: [byte_ids(b"ab##cdef"), byte_ids(b"more")]
    body = client.post(TEXT_URL, json={**TEXT, "stop": "##"}).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 4


def test_held_text_is_delivered_when_the_answer_ends(
    client: TestClient, engine: Any, byte_ids: Callable[[bytes], tuple[int, ...]]
) -> None:
    engine.script = lambda request: [byte_ids(b"the EN"), (4089,)]
    body = client.post(TEXT_URL, json={**TEXT, "stop": "END"}).json()
    assert body["choices"][0]["text"] == "the EN"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_an_answer_that_ends_inside_a_character_shows_one_replacement(
    client: TestClient, engine: Any, byte_ids: Callable[[bytes], tuple[int, ...]]
) -> None:
    engine.script = lambda request: [byte_ids(b"a\xe4b\xf0\x9f"), (4089,)]
    body = client.post(TEXT_URL, json=TEXT).json()
    assert body["choices"][0]["text"] == "a\ufffdb\ufffd"


def test_ignored_end_tokens_and_named_ones(
    client: TestClient, engine: Any, byte_ids: Callable[[bytes], tuple[int, ...]]
) -> None:
    engine.script = lambda request: [(*byte_ids(b"a"), 4089, *byte_ids(b"bcd"))]
    extra = {"ignore_eos": True, "stop_token_ids": list(byte_ids(b"c"))}
    body = client.post(TEXT_URL, json={**TEXT, **extra}).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 4
    shown = client.post(TEXT_URL, json={**TEXT, **extra, "skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "a<|im_end|>b"


def test_models_tell_the_three_contexts(client: TestClient, engine: Any) -> None:
    engine.state = EngineStatus(
        EngineState.SERVING, True, configured_tokens=256, allocated_tokens=128, certified_tokens=64
    )
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (entry,) = listed["data"]
    assert {key: entry[key] for key in ("id", "object", "created", "owned_by")} == {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "nrank",
    }
    assert entry["max_model_len"] == 256
    contexts = {"configured_tokens": 256, "allocated_tokens": 128, "certified_tokens": 64}
    assert entry["context"] == contexts
    assert client.get(f"/v1/models/{MODEL}").json() == entry
    check_envelope(client.get("/v1/models/a/b"), 404, "model_not_found")


def test_evidence_that_certifies_nothing_is_told_with_the_contexts(
    client: TestClient, engine: Any
) -> None:
    engine.state = EngineStatus(EngineState.SERVING, True, certified_warning="plan_id was a, is b")
    (entry,) = client.get("/v1/models").json()["data"]
    assert entry["context"]["certified_tokens"] == 0
    assert entry["context"]["warning"] == "plan_id was a, is b"
    assert client.get("/status").json()["certified_warning"] == "plan_id was a, is b"


def test_expert_counts_are_told_while_the_gang_serves(client: TestClient, engine: Any) -> None:
    assert client.get("/status/experts").json() == {"layers": [[1, 2], [3, 4]]}
    engine.state = EngineStatus(EngineState.STARTING, ready=False)
    check_envelope(client.get("/status/experts"), 503, "not_ready")


def test_status_is_json_with_the_report_of_the_start(client: TestClient, engine: Any) -> None:
    report = StartReport(0.001, 0.004, 1, (RankBytes(0, 10, 11), RankBytes(1, 20, 21)))
    ranks = (RankStatus(0, "running", planned_rows={"dense": 10}, measured_rows={"dense": 11}),)
    engine.state = EngineStatus(EngineState.SERVING, True, start=report, ranks=ranks)
    status = client.get("/status").json()
    assert status["start"]["ranks"][1] == {"rank": 1, "planned_bytes": 20, "measured_bytes": 21}
    assert status["start"]["measured_step_s"] == 0.004
    assert status["ranks"][0]["measured_rows"] == {"dense": 11}
    assert status["slowest_rank"] == -1


HEALTH = {
    EngineState.STARTING: (200, 503),
    EngineState.SERVING: (200, 200),
    EngineState.HOLD: (200, 503),
    EngineState.CUT: (200, 503),
    EngineState.DRAINING: (200, 503),
    EngineState.RESTARTING: (200, 503),
    EngineState.FAILED: (500, 503),
}


@pytest.mark.parametrize("state", EngineState)
def test_health_and_readiness_of_each_state(
    client: TestClient, engine: Any, state: EngineState
) -> None:
    engine.state = EngineStatus(
        state, ready=state is EngineState.SERVING, reason="pid 7", public_reason="why"
    )
    health, ready = client.get("/health"), client.get("/ready")
    assert (health.status_code, ready.status_code) == HEALTH[state]
    assert health.json()["state"] == ready.json()["state"] == state
    assert ("retry-after" in ready.headers) == (ready.status_code == 503)
    assert ready.json()["reason"] == "why"
    assert client.get("/status").json()["reason"] == "pid 7"


def test_an_engine_that_cannot_answer_is_alive_but_not_ready(
    client: TestClient, engine: Any
) -> None:
    async def status() -> EngineStatus:
        raise NotServing("no coordinator yet")

    engine.status = status
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 503
    assert client.get("/ready").json()["reason"] == "no coordinator yet"


def test_metrics_text_is_the_engines(client: TestClient) -> None:
    response = client.get("/metrics")
    assert response.text == "# HELP nrank_up x\n"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


KINDS = {
    ErrorKind.QUEUE_FULL: (429, "queue_full", "rate_limit_error"),
    ErrorKind.NOT_READY: (503, "not_ready", "server_error"),
    ErrorKind.DRAINING: (503, "draining", "server_error"),
    ErrorKind.HELD: (503, "held", "server_error"),
    ErrorKind.RANK_FAILURE: (503, "rank_failure", "server_error"),
    ErrorKind.NON_FINITE: (500, "non_finite", "server_error"),
    ErrorKind.DEADLINE: (504, "deadline", "server_error"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_before_the_first_token_has_its_status(
    client: TestClient, engine: Any, kind: ErrorKind, stream: bool
) -> None:
    status, code, error_type = KINDS[kind]
    engine.script = lambda request: [NotServing("queue is full", kind, retry_after_s=2.5)]
    response = client.post(CHAT_URL, json={**CHAT, "stream": stream})
    assert check_envelope(response, status, code)["type"] == error_type
    retryable = status in (429, 503)
    assert response.headers.get("retry-after") == ("3" if retryable else None)
    assert response.headers.get("x-should-retry") == ("true" if retryable else None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_own_refusals_and_faults(client: TestClient, engine: Any, stream: bool) -> None:
    body = {**TEXT, "stream": stream}
    engine.script = lambda request: [ClientError("too long", ErrorKind.CONTEXT_LENGTH, "prompt")]
    error = check_envelope(client.post(TEXT_URL, json=body), 400, "context_length_exceeded")
    assert error["param"] == "prompt"
    for fault in (RankError("secret: pid 7", rank=1), ZeroDivisionError("secret")):
        engine.script = lambda request, fault=fault: [fault]
        error = check_envelope(client.post(TEXT_URL, json=body), 500, "server_error")
        assert "secret" not in error["message"]
    assert engine.http == [(TEXT_URL, 400), (TEXT_URL, 500), (TEXT_URL, 500)]


def test_one_refused_choice_refuses_the_request_and_aborts_the_rest(
    client: TestClient, engine: Any, tokenizer: Tokenizer
) -> None:
    def script(request: Any) -> list[Any]:
        if request.sampling.choice == 2:
            return [NotServing("full", ErrorKind.QUEUE_FULL)]
        return [tokenizer.encode("a")] * 50

    engine.script = script
    check_envelope(client.post(CHAT_URL, json={**CHAT, "n": 3}), 429, "queue_full")
    assert len(engine.aborted) == 2
    assert not engine.running


def test_an_error_after_tokens_fails_the_whole_answer(client: TestClient, engine: Any) -> None:
    engine.script = lambda request: [
        (65,),
        TokenBatch(
            request.request_id,
            (),
            FinishReason.ERROR,
            error_kind="non_finite",
            error_message="row 3 is NaN",
        ),
    ]
    error = check_envelope(client.post(TEXT_URL, json=TEXT), 500, "non_finite")
    assert error["message"] == "row 3 is NaN"
    engine.script = lambda request: [(65,)]  # ends without a finish reason
    check_envelope(client.post(TEXT_URL, json=TEXT), 503, "rank_failure")


def test_bodies_paths_and_methods_out_of_bounds(client: TestClient, engine: Any) -> None:
    check_envelope(client.post(CHAT_URL, content=b"{"), 400, "invalid_json")
    check_envelope(client.post(CHAT_URL, json={**CHAT, "n": 0}), 400, "invalid_value")
    check_envelope(client.post(CHAT_URL, json={**CHAT, "model": "x"}), 404, "model_not_found")
    big = {**TEXT, "prompt": "x" * 20_000}
    error = check_envelope(client.post(TEXT_URL, json=big), 413, "payload_too_large")
    assert "20000 bytes" in error["message"]
    pieces = iter([b"x" * 15_000, b"x" * 15_000])
    check_envelope(client.post(TEXT_URL, content=pieces), 413, "payload_too_large")
    check_envelope(client.get("/nowhere"), 404, "not_found")
    response = client.get(CHAT_URL)
    check_envelope(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert not engine.requests
    assert engine.http[-2:] == [("other", 404), (CHAT_URL, 405)]


def test_request_ids_are_echoed_when_sane(client: TestClient, engine: Any) -> None:
    engine.script = lambda request: [(65,), (4089,)]
    given = client.post(TEXT_URL, json=TEXT, headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    first, second = (client.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second
    long = client.get("/health", headers={"x-request-id": "x" * 500})
    assert long.headers["x-request-id"] != "x" * 500
    refused = client.post(CHAT_URL, content=b"{", headers={"x-request-id": "abc-2"})
    assert refused.headers["x-request-id"] == "abc-2"
    engine.script = lambda request: [ZeroDivisionError()]
    failed = client.post(TEXT_URL, json=TEXT, headers={"x-request-id": "abc-3"})
    assert failed.headers["x-request-id"] == "abc-3"


def test_behind_a_proxy_that_tells_request_ids_no_answer_has_a_second_one(
    engine: Any, card: ModelCard, tokenizer: Tokenizer
) -> None:
    app = make_app(engine, card, tokenizer, EdgeSettings(tells_request_id=False))
    client = TestClient(app, raise_server_exceptions=False)
    engine.script = lambda request: [ZeroDivisionError()]
    for answer in (client.post(TEXT_URL, json=TEXT), client.get("/nowhere"), client.get("/health")):
        assert "x-request-id" not in answer.headers


def test_probes_are_not_counted_as_requests(client: TestClient, engine: Any) -> None:
    for path in ("/health", "/ready", "/status", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 200
    assert engine.http == []
    client.get("/v1/models")
    client.get(f"/v1/models/{MODEL}")
    assert engine.http == [("/v1/models", 200), ("/v1/models/{model_id:path}", 200)]


def test_the_openapi_page_describes_the_bodies(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for path, field in ((CHAT_URL, "messages"), (TEXT_URL, "prompt")):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert field in content["application/json"]["schema"]["properties"]
    assert "$ref" not in str(document)
