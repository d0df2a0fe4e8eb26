"""The socket between ingress and coordinator, both ends real: answers, refusals, ends, silence."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import channel as channel_module
from cluster import channel_server
from cluster.channel import Channel
from cluster.channel_server import ChannelServer
from cluster.channel_wire import LENGTH, Abort, Ask, ChannelAddress, frame
from cluster.client import NotServing
from placement.errors import ClientError, ErrorKind
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch

HOST = "127.0.0.1"
WAIT_S = 20.0

Drive = Callable[[Coroutine[Any, Any, None]], None]


class Engine:
    """Answers with the ids 0, 1, ...; each one waits for `go` where it is cleared."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.error: BaseException | None = None
        self.running: set[str] = set()
        self.closed: list[str] = []
        self.stopped: list[str] = []
        self.asked: list[EngineRequest] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenBatch, None]:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        name = request.request_id
        self.running.add(name)
        try:
            for index in range(request.max_tokens):
                await self.go.wait()
                await asyncio.sleep(0)
                last = index + 1 == request.max_tokens
                yield TokenBatch(name, (index,), FinishReason.LENGTH if last else None)
        finally:
            self.running.discard(name)
            self.closed.append(name)

    async def stop_reached(self, request_id: str) -> None:
        self.stopped.append(request_id)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def read(channel: Channel, request: EngineRequest) -> list[TokenBatch]:
    async with asyncio.timeout(WAIT_S):
        return [batch async for batch in channel.generate(request)]


def ids(batches: list[TokenBatch]) -> list[int]:
    return [token for batch in batches for token in batch.token_ids]


@pytest.fixture
def drive_channel(drive: Drive) -> Callable[..., None]:
    """Runs `body(engine, server, address, channel)` with both ends on one loop."""

    def run(body: Callable[..., Coroutine[Any, Any, None]], lease_s: float = 30.0) -> None:
        async def whole() -> None:
            engine = Engine()
            server = ChannelServer(engine, lease_s)  # type: ignore[arg-type]
            address = await server.start(HOST)
            channel = await Channel.connect(address)
            try:
                await body(engine, server, address, channel)
            finally:
                channel.close()
                server.close()

        drive(whole())

    return run


def test_many_answers_share_the_socket_and_each_is_whole(drive_channel: Any) -> None:
    """Equal request ids do not mix: an id is the caller's, and may be used twice."""

    async def body(engine: Engine, _server: Any, _address: Any, channel: Channel) -> None:
        requests = [EngineRequest(f"r{i // 2}", (1, i), 1 + 7 * i) for i in range(40)]
        found = await asyncio.gather(*(read(channel, request) for request in requests))
        for request, batches in zip(requests, found, strict=True):
            assert ids(batches) == list(range(request.max_tokens))
            assert {batch.request_id for batch in batches} == {request.request_id}
            assert batches[-1].finish_reason is FinishReason.LENGTH
        assert {r.prompt_ids for r in engine.asked} == {r.prompt_ids for r in requests}
        assert not engine.running

    drive_channel(body)


@pytest.mark.parametrize(
    "error",
    [
        ClientError("too long", ErrorKind.CONTEXT_LENGTH, "max_tokens", "code"),
        NotServing("full", ErrorKind.QUEUE_FULL, 1.5),
    ],
)
def test_a_refusal_arrives_as_it_was_raised(drive_channel: Any, error: Any) -> None:
    async def body(engine: Engine, _server: Any, _address: Any, channel: Channel) -> None:
        engine.error = error
        with pytest.raises(type(error)) as caught:
            await read(channel, EngineRequest("r", (1,), 3))
        assert str(caught.value) == str(error)
        assert {**vars(caught.value)} == {**vars(error)}
        engine.error = None
        assert ids(await read(channel, EngineRequest("r", (1,), 3))) == [0, 1, 2]

    drive_channel(body)


def test_a_fault_of_the_coordinator_is_told_without_its_text(
    drive_channel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(engine: Engine, _server: Any, _address: Any, channel: Channel) -> None:
        engine.error = RuntimeError("secret")
        with pytest.raises(NotServing, match="the coordinator failed; see its log"):
            await read(channel, EngineRequest("r", (1,), 3))

    drive_channel(body)
    assert "secret" in caplog.text


def test_an_answer_that_can_not_be_sent_ends_the_connection(
    drive_channel: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its reader, and all others of that ingress, would wait for ever."""

    def frame(_: object) -> bytes:
        raise pickle.PicklingError("on purpose")

    async def body(engine: Engine, _server: Any, _address: Any, channel: Channel) -> None:
        monkeypatch.setattr(channel_server, "frame", frame)
        with pytest.raises(NotServing, match="coordinator of the gang is gone"):
            await read(channel, EngineRequest("r", (1,), 3))
        await until(lambda: not engine.running)

    drive_channel(body)
    assert "an answer could not be sent" in caplog.text


def test_closing_an_answer_aborts_only_that(drive_channel: Any) -> None:
    async def body(engine: Engine, _server: Any, _address: Any, channel: Channel) -> None:
        first = channel.generate(EngineRequest("gone", (1,), 10_000_000))
        assert (await anext(first)).token_ids
        other = asyncio.ensure_future(read(channel, EngineRequest("stays", (1,), 300)))
        await until(lambda: "stays" in engine.running)
        await first.aclose()
        await until(lambda: "gone" in engine.closed)
        assert ids(await other) == list(range(300))
        channel.stop_reached("stays")
        await until(lambda: engine.stopped == ["stays"])

    drive_channel(body)


def test_a_request_that_is_aborted_before_it_began_leaves_nothing(
    drive_channel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(engine: Engine, _server: Any, address: ChannelAddress, _channel: Any) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        asks = [Ask(number, EngineRequest("gone", (1,), 9)) for number in range(5)]
        pairs = [frame(ask) + frame(Abort(ask.number)) for ask in asks]
        writer.write(address.key + b"".join(pairs))
        async with asyncio.timeout(WAIT_S):
            await reader.read()  # until the silence has lasted too long
        assert not engine.asked

    drive_channel(body, lease_s=0.2)
    assert set(re.findall(r"its (\d+) requests", caplog.text)) == {"0"}


def test_a_slow_reader_holds_nobody_back_and_loses_nothing(drive_channel: Any) -> None:
    async def body(engine: Engine, _server: Any, _address: Any, channel: Channel) -> None:
        slow = channel.generate(EngineRequest("slow", (1,), 5000))
        batches = [await anext(slow)]
        assert ids(await read(channel, EngineRequest("fast", (1,), 2000))) == list(range(2000))
        await until(lambda: "slow" in engine.closed)
        batches += [batch async for batch in slow]
        assert ids(batches) == list(range(5000))
        assert len(batches) < 20  # what waited is one batch

    drive_channel(body)


def test_a_lost_coordinator_is_an_error_before_and_after_the_first_token(
    drive_channel: Any,
) -> None:
    async def body(engine: Engine, server: Any, address: Any, channel: Channel) -> None:
        begun = channel.generate(EngineRequest("begun", (1,), 1000))
        assert (await anext(begun)).token_ids == (0,)
        engine.go.clear()
        waits = asyncio.ensure_future(read(channel, EngineRequest("waits", (1,), 3)))
        await until(lambda: "waits" in engine.running)
        server.close()
        with pytest.raises(NotServing, match="coordinator of the gang is gone"):
            await waits
        rest = [batch async for batch in begun]
        assert rest[-1].finish_reason is FinishReason.ERROR
        assert rest[-1].error_kind == ErrorKind.RANK_FAILURE.value
        assert channel.is_lost
        with pytest.raises(NotServing, match="coordinator of the gang is gone"):
            await read(channel, EngineRequest("late", (1,), 3))
        await until(lambda: not engine.running)
        with pytest.raises(ConnectionRefusedError):
            await Channel.connect(address)

    drive_channel(body)


def test_an_ingress_that_goes_loses_its_requests(drive_channel: Any) -> None:
    async def body(engine: Engine, _server: Any, address: Any, channel: Channel) -> None:
        other = await Channel.connect(address)
        answers = [
            c.generate(EngineRequest(n, (1,), 10**7)) for c, n in ((channel, "a"), (other, "b"))
        ]
        for answer in answers:
            await anext(answer)
        other.close()
        await until(lambda: engine.closed == ["b"])
        assert (await anext(answers[0])).finish_reason is None

    drive_channel(body)


def test_a_silent_ingress_loses_its_requests_one_that_renews_keeps_them(
    drive_channel: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process keeps its socket open, and says nothing."""
    monkeypatch.setattr(channel_module, "RENEW_S", 0.05)

    async def body(engine: Engine, _server: Any, address: Any, channel: Channel) -> None:
        silent = await Channel.connect(address)
        engine.go.clear()
        waits = [
            asyncio.ensure_future(read(c, EngineRequest(n, (1,), 5)))
            for c, n in ((channel, "renews"), (silent, "silent"))
        ]
        await until(lambda: len(engine.running) == 2)
        silent._tasks[1].cancel()
        await until(lambda: engine.closed == ["silent"])
        engine.go.set()
        assert ids(await waits[0]) == [0, 1, 2, 3, 4]
        with pytest.raises(NotServing):
            await waits[1]

    drive_channel(body, lease_s=0.5)
    assert "has been silent for 0.5 s: its 1 requests are taken back" in caplog.text


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("key", [b"", b"short", bytes(32)])
def test_without_the_key_nothing_is_read(drive_channel: Any, tmp_path: Path, key: bytes) -> None:
    mark = tmp_path / "unpickled"

    async def body(engine: Engine, _server: Any, address: ChannelAddress, _: Channel) -> None:
        assert len(address.key) == 32
        reader, writer = await asyncio.open_connection(HOST, address.port)
        data = pickle.dumps(Bomb(mark))
        writer.write(key + LENGTH.pack(len(data)) + data + bytes(100))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises((EOFError, OSError)):
                await reader.readexactly(1)
        assert not mark.exists()
        stranger = await Channel.connect(replace(address, key=key.ljust(32, b"x")))
        with pytest.raises(NotServing):
            await read(stranger, EngineRequest("r", (1,), 1))
        assert not engine.asked

    drive_channel(body)
