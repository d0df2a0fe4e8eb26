"""The HTTP application: OpenAI routes, health, readiness, metrics and status.

Owns the routes and their order of work (read, check, tokenise, generate, answer). A plain FastAPI
app over an EngineClient; knows nothing of Ray, ranks or metric names.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from cluster.admin_gate import AdminGate
from cluster.admin_routes import AdminRoutes
from cluster.answers import Answer, PacedEvents
from cluster.client import EngineClient, EngineState, EngineStatus, NotServing
from cluster.completion import AnswerFormat, ChatFormat, TextFormat, usage
from cluster.http_errors import install_error_handlers
from cluster.http_trace import HttpTrace
from cluster.model_card import ModelCard
from cluster.protocol import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    HoldBody,
    TokenizeBody,
)
from cluster.request_body import read_body
from cluster.sse import EventStream, SseResponse, until_disconnect
from cluster.status_page import StatusPage, wants_page
from cluster.tokenize_routes import detokenize, tokenize
from cluster.tokens import Tokenizer
from cluster.validate import (
    ValidRequest,
    parse_json,
    unknown_model,
    valid_chat,
    valid_completion,
)

_LOG = logging.getLogger("nrank.edge")

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHORT_BODY_BYTES = 2048  # tokenised in less time than another thread needs to begin

_REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": {"description": "OpenAI error envelope"}}

Convert = Callable[[dict[str, Any], ModelCard, Tokenizer], dict[str, Any]]
Validate = Callable[[dict[str, Any], ModelCard, Tokenizer], ValidRequest]


@dataclass(frozen=True)
class EdgeSettings:
    comment_interval_s: float = 15.0  # SSE comment lines while nothing else is sent
    max_body_bytes: int = 8 * 1024 * 1024
    max_choices: int = MAX_CHOICES  # answers of one request
    tells_request_id: bool = True  # in x-request-id; False: the proxy in front does
    admin: AdminGate = field(default_factory=AdminGate)


def make_app(
    engine: EngineClient,
    model: ModelCard,
    tokenizer: Tokenizer,
    settings: EdgeSettings | None = None,
) -> FastAPI:
    """The application that serves `model` from `engine`."""
    app = FastAPI(title="nrank", docs_url=None, redoc_url=None)
    settings = settings or EdgeSettings()
    model = dataclasses.replace(model, max_choices=settings.max_choices)
    routes = _Routes(engine, model, tokenizer, settings)
    admin = AdminRoutes(engine, settings.admin)
    app.post("/v1/chat/completions", openapi_extra=_body_doc(ChatBody))(routes.chat)
    app.post("/v1/completions", openapi_extra=_body_doc(CompletionBody))(routes.completions)
    app.post("/tokenize", openapi_extra=_body_doc(TokenizeBody))(routes.tokenize)
    app.post("/detokenize", openapi_extra=_body_doc(DetokenizeBody))(routes.detokenize)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{model_id:path}", responses=_REFUSALS)(routes.model)
    app.get("/health")(routes.health)
    app.get("/ready")(routes.ready)
    app.get("/status")(routes.status)
    app.get("/status/experts")(routes.experts)
    app.get("/metrics")(routes.metrics)
    app.post("/admin/hold", openapi_extra=_body_doc(HoldBody))(admin.hold)
    app.post("/admin/resume")(admin.resume)
    install_error_handlers(app)
    app.add_middleware(HttpTrace, engine=engine, tells_id=settings.tells_request_id)
    return app


class _Routes:
    """One method a route."""

    def __init__(
        self, engine: EngineClient, card: ModelCard, tokenizer: Tokenizer, settings: EdgeSettings
    ) -> None:
        self._engine = engine
        self._card = card
        self._tokenizer = tokenizer
        self._settings = settings
        self._page = StatusPage()

    async def chat(self, request: Request) -> Response:
        style = ChatFormat(f"chatcmpl-{uuid.uuid4().hex}", self._card.id, int(time.time()))
        return await self._generate(request, valid_chat, style)

    async def completions(self, request: Request) -> Response:
        style = TextFormat(f"cmpl-{uuid.uuid4().hex}", self._card.id, int(time.time()))
        return await self._generate(request, valid_completion, style)

    async def tokenize(self, request: Request) -> Response:
        return await self._convert(request, tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._convert(request, detokenize)

    async def _convert(self, request: Request, convert: Convert) -> Response:
        raw = parse_json(await read_body(request, self._settings.max_body_bytes))
        answer = await asyncio.to_thread(convert, raw, self._card, self._tokenizer)
        return JSONResponse(answer)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [await self._model_entry()]})

    async def model(self, model_id: str) -> Response:
        if model_id != self._card.id:
            raise unknown_model(model_id, self._card)
        return JSONResponse(await self._model_entry())

    async def health(self) -> Response:
        """Liveness: only a gang that won't be restarted any more is unhealthy."""
        status = await self._status()
        failed = status.state is EngineState.FAILED
        body = {"status": "failed" if failed else "ok", "state": status.state}
        return JSONResponse(body, status_code=500 if failed else 200)

    async def ready(self) -> Response:
        """Readiness: a step was committed by every rank since the last start."""
        status = await self._status()
        body = {"ready": status.ready, "state": status.state, "reason": status.public_reason}
        if status.ready:
            return JSONResponse(body)
        return JSONResponse(body, status_code=503, headers={"Retry-After": "5"})

    async def status(self, request: Request) -> Response:
        """JSON, or the page for a browser."""
        status = await self._status()
        try:
            snapshots = await self._engine.snapshots()
        except NotServing:
            snapshots = ()
        if wants_page(request.headers.get("accept", "")):
            response: Response = self._page.response(status, snapshots)
        else:
            told = [dataclasses.asdict(item) for item in snapshots]
            response = JSONResponse({**dataclasses.asdict(status), "snapshots": told})
        response.headers["Vary"] = "Accept"
        return response

    async def experts(self) -> Response:
        """Tokens routed to each expert of each layer: what `nrank plan --counts` balances by."""
        return JSONResponse({"layers": await self._engine.expert_counts()})

    async def metrics(self) -> Response:
        return Response(await self._engine.metrics_text(), media_type=METRICS_TYPE)

    async def _generate(
        self, request: Request, validate: Validate, style: AnswerFormat
    ) -> Response:
        body = await read_body(request, self._settings.max_body_bytes)
        raw = parse_json(body)
        if len(body) <= SHORT_BODY_BYTES:
            valid = validate(raw, self._card, self._tokenizer)
        else:
            valid = await asyncio.to_thread(validate, raw, self._card, self._tokenizer)
        _log_request(request, style.id, valid)
        answer = Answer(self._engine, valid, self._tokenizer.vocabulary, style.id, time.time())
        if valid.stream:
            return await self._stream(request, answer, style)
        await until_disconnect(request.receive, answer.complete())
        return JSONResponse(style.whole(answer.choices, usage(valid, answer.choices)))

    async def _stream(self, request: Request, answer: Answer, style: AnswerFormat) -> Response:
        """Wait for the first event before the headers, so that a refusal keeps its status.

        After one comment interval without an event the headers go out, to keep proxies patient.
        """
        events = PacedEvents(answer, self._settings.comment_interval_s)
        try:
            first = await until_disconnect(request.receive, events.next())
        except BaseException:
            await events.close()
            raise
        return SseResponse(EventStream(answer, events, style, style.id), first)

    async def _status(self) -> EngineStatus:
        """The engine's status; one that can't answer now is a gang that isn't there yet."""
        try:
            return await self._engine.status()
        except NotServing as error:
            told = str(error)
            return EngineStatus(EngineState.STARTING, False, reason=told, public_reason=told)

    async def _model_entry(self) -> dict[str, Any]:
        """OpenAI's four keys, vLLM's `max_model_len`, and the three meanings of "context"."""
        entry: dict[str, Any] = {
            "id": self._card.id,
            "object": "model",
            "created": self._card.created_s,
            "owned_by": self._card.owned_by,
            "max_model_len": self._card.context_tokens,
        }
        status = await self._status()
        entry["context"] = {
            "configured_tokens": status.configured_tokens or self._card.context_tokens,
            "allocated_tokens": status.allocated_tokens,
            "certified_tokens": status.certified_tokens,
        }
        if status.certified_warning:
            entry["context"]["warning"] = status.certified_warning
        return entry


def _log_request(request: Request, answer_id: str, valid: ValidRequest) -> None:
    """The seed stands here and nowhere in the answer: with it the answer can be made again."""
    _LOG.info(
        "request %s answer %s: %d prompt tokens, %d choices, temperature %s, seed %d",
        request.state.request_id,
        answer_id,
        sum(len(prompt.token_ids) for prompt in valid.prompts),
        valid.num_choices,
        valid.sampling.temperature,
        valid.sampling.seed,
    )


def _body_doc(body: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI entry of a body that the route reads itself, for one envelope of all errors."""
    schema = body.model_json_schema(mode="validation")
    definitions = schema.pop("$defs", {})
    for name, member in schema["properties"].items():
        for option in member.get("anyOf", ()):
            if "$ref" in option:
                schema["properties"][name] = definitions[option["$ref"].rsplit("/", 1)[-1]]
    content = {"application/json": {"schema": schema}}
    required = bool(schema.get("required"))
    return {"requestBody": {"required": required, "content": content}}
