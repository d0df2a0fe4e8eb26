"""The routes through OpenAI's own Python client: what it parses, what it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx2
import openai
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from cluster.client import NotServing
from cluster.tokens import Tokenizer
from placement.errors import ErrorKind

MODEL = "tiny-flash-next"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
T = TypeVar("T")
Ask = Callable[[Callable[[AsyncOpenAI], Awaitable[Any]]], Any]


@pytest.fixture
def ask(app: FastAPI) -> Ask:
    """Run a coroutine function with a client that talks to the app without a socket."""

    async def run(work: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport)
        base_url = "http://nrank.test/v1"
        async with AsyncOpenAI(
            api_key="none", base_url=base_url, http_client=http, max_retries=0
        ) as client:
            return await work(client)

    return lambda work: asyncio.run(run(work))


def test_answers_and_models_parse(ask: Ask, engine: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>hm</think>Hello<|im_end|>")
    engine.script = lambda request: [ids]

    async def work(client: AsyncOpenAI) -> tuple[Any, ...]:
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1)
        text = await client.completions.create(model=MODEL, prompt="hi", max_tokens=20)
        models = await client.models.list()
        return chat, text, models.data, await client.models.retrieve(MODEL)

    chat, text, models, model = ask(work)
    assert chat.choices[0].message.content == "Hello"
    assert chat.choices[0].message.reasoning == "hm"
    assert chat.usage.completion_tokens_details.reasoning_tokens == len(
        tokenizer.encode("<think>hm</think>")
    )
    assert chat.usage.prompt_tokens_details.cached_tokens == 3
    assert text.choices[0].finish_reason == "stop"
    assert models == [model]
    assert engine.requests[0].sampling.seed == 1


def test_a_stream_parses(ask: Ask, engine: Any, tokenizer: Tokenizer) -> None:
    engine.script = lambda request: [(token,) for token in tokenizer.encode("Hi 中<|im_end|>")]

    async def work(client: AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}},
        )
        return [chunk async for chunk in stream]

    *chunks, last = ask(work)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi 中"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert engine.requests[0].sampling.top_k == 5


@pytest.mark.parametrize(
    ("options", "raised", "code", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 9}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "unsupported_parameter", "logit_bias"),
        ({"max_tokens": 999}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
    ],
)
def test_refusals_are_the_clients_classes(
    ask: Ask, options: dict[str, Any], raised: type[Exception], code: str, param: str
) -> None:
    async def work(client: AsyncOpenAI) -> object:
        return await client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, **options}
        )

    with pytest.raises(raised) as caught:
        ask(work)
    assert (caught.value.code, caught.value.param) == (code, param)  # type: ignore[attr-defined]


def test_a_full_queue_is_a_rate_limit(ask: Ask, engine: Any) -> None:
    engine.script = lambda request: [NotServing("full", ErrorKind.QUEUE_FULL)]

    async def work(client: AsyncOpenAI) -> object:
        return await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

    with pytest.raises(openai.RateLimitError) as caught:
        ask(work)
    assert caught.value.response.headers["retry-after"] == "1"


def test_a_late_error_raises_in_the_stream(ask: Ask, engine: Any) -> None:
    engine.script = lambda request: [(65,), NotServing("rank 0 died", ErrorKind.RANK_FAILURE)]

    async def work(client: AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        return [chunk async for chunk in stream]

    with pytest.raises(openai.APIError, match="rank 0 died"):
        ask(work)
