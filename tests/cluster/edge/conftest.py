"""An engine that follows a script, and clients for it: the HTTP edge without Ray and ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cluster.client import EngineState, EngineStatus, NotServing
from cluster.ingress import EdgeSettings, make_app
from cluster.model_card import ModelCard, load_model_card
from cluster.tokens import Tokenizer
from rank_worker.messages import EngineRequest, FinishReason, RankSnapshot, TokenBatch

Step = tuple[int, ...] | TokenBatch | Exception | asyncio.Event
Script = Callable[[EngineRequest], Sequence[Step]]


class ScriptedEngine:
    """Keeps the engine's contract (stop ids, max_tokens, aborts on close); the tokens are given.

    A step of the script is ids of one batch, a whole batch, an exception, or an event to wait for.
    """

    def __init__(self) -> None:
        self.script: Script = lambda request: ()
        self.state = EngineStatus(EngineState.SERVING, ready=True)
        self.requests: list[EngineRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.http: list[tuple[str, int]] = []
        self.waiting = asyncio.Event()  # set when a script waits

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenBatch]:
        self.requests.append(request)
        self.running.add(request.request_id)
        complete = False
        try:
            made = 0
            for step in self.script(request):
                if isinstance(step, Exception):
                    complete = True
                    raise step
                if isinstance(step, asyncio.Event):
                    self.waiting.set()
                    await step.wait()
                    continue
                batch = step if isinstance(step, TokenBatch) else self._batch(request, step, made)
                made += len(batch.token_ids)
                complete = batch.finish_reason is not None
                await asyncio.sleep(0)  # each batch is a step of its own
                yield batch
                if complete:
                    return
        finally:
            self.running.discard(request.request_id)
            if not complete and request.request_id not in self.stopped:
                self.aborted.append(request.request_id)

    def _batch(self, request: EngineRequest, ids: Sequence[int], made: int) -> TokenBatch:
        reason = None
        for at, token_id in enumerate(ids):
            if token_id in request.stop_token_ids:
                ids, reason = ids[: at + 1], FinishReason.STOP
                break
        if made + len(ids) >= request.max_tokens and not (
            reason is FinishReason.STOP and made + len(ids) == request.max_tokens
        ):
            ids, reason = ids[: request.max_tokens - made], FinishReason.LENGTH
        prompt_tokens = len(request.prompt_ids)
        return TokenBatch(
            request.request_id, tuple(ids), reason, prompt_tokens=prompt_tokens, cached_tokens=3
        )

    async def stop_reached(self, request_id: str) -> None:
        self.stopped.append(request_id)

    async def status(self) -> EngineStatus:
        return self.state

    async def snapshots(self) -> tuple[RankSnapshot, ...]:
        return (RankSnapshot(rank=0, epoch=1, time_s=0.0, step=5),)

    async def expert_counts(self) -> list[list[int]]:
        if not self.state.ready:
            raise NotServing("the engine is starting: loading")
        return [[1, 2], [3, 4]]

    async def metrics_text(self) -> bytes:
        return b"# HELP nrank_up x\n"

    async def record_http(self, endpoint: str, code: int) -> None:
        self.http.append((endpoint, code))


class AsgiCall:
    """One request driven by hand: what was sent so far can be awaited, the client can leave."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        raw = json.dumps(body).encode()
        self._inbox.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self._sent = asyncio.Condition()
        self.reading = asyncio.Event()  # cleared: the client has stopped taking data
        self.reading.set()
        self.status: int | None = None
        self.text = ""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self._task = asyncio.create_task(app(scope, self._inbox.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        async with self._sent:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            self.text += message.get("body", b"").decode()
            self._sent.notify_all()
        await self.reading.wait()

    async def until(self, seen: Callable[[AsgiCall], bool]) -> None:
        async with self._sent:
            await asyncio.wait_for(self._sent.wait_for(lambda: seen(self)), 10)

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    def cancel(self) -> None:
        self._task.cancel()

    async def done(self) -> None:
        await asyncio.wait_for(asyncio.wait({self._task}), 10)


@pytest.fixture(scope="session")
def tokenizer(embedded_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(embedded_model_dir)


@pytest.fixture(scope="session")
def card(embedded_model_dir: Path) -> ModelCard:
    return load_model_card(embedded_model_dir, "tiny-flash-next", 1_700_000_000, 256)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def app(engine: ScriptedEngine, card: ModelCard, tokenizer: Tokenizer) -> FastAPI:
    return make_app(engine, card, tokenizer, EdgeSettings(max_body_bytes=20_000))


@pytest.fixture
def impatient_app(engine: ScriptedEngine, card: ModelCard, tokenizer: Tokenizer) -> FastAPI:
    """Sends a comment line almost at once while it waits."""
    return make_app(engine, card, tokenizer, EdgeSettings(comment_interval_s=0.01))


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="session")
def call() -> type[AsgiCall]:
    return AsgiCall


@pytest.fixture(scope="session")
def byte_ids(tokenizer: Tokenizer) -> Callable[[bytes], tuple[int, ...]]:
    """One token a byte: text cut at every byte, valid or not."""
    of_byte = {piece: index for index, piece in enumerate(tokenizer.vocabulary.token_bytes)}
    return lambda data: tuple(of_byte[bytes([byte])] for byte in data)


@pytest.fixture(scope="session")
def batches() -> Callable[[Sequence[int], int], list[tuple[int, ...]]]:
    """Ids dealt out over batches of the given size."""
    return lambda ids, size: [tuple(ids[at : at + size]) for at in range(0, len(ids), size)]


@pytest.fixture(scope="session")
def sse() -> Callable[[str], list[Any]]:
    """The data of a stream in order: parsed objects, and the word [DONE]; comments are left out."""

    def parse(text: str) -> list[Any]:
        events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
        data = [event.removeprefix("data: ") for event in events]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    return parse
