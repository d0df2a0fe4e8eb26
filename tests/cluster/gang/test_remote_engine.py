"""The ingress's client of a coordinator behind a handle: it connects once, and again when lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster import ray_coordinator
from cluster.channel import Channel
from cluster.channel_server import ChannelServer
from cluster.client import NotServing
from cluster.ray_coordinator import RemoteEngine
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch

ASK_S = 0.3
REQUESTS = 30


class Engine:
    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenBatch, None]:
        yield TokenBatch(request.request_id, (7,), FinishReason.LENGTH)


class Coordinator:
    """Behind a handle: `channel` is asked for as Serve's handles are called."""

    def __init__(self) -> None:
        self.asked = 0
        self.server: ChannelServer | None = None
        self.error: Exception | None = None
        self.channel = SimpleNamespace(remote=self._channel)

    async def _channel(self) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if self.server is None:
            await asyncio.Event().wait()
        assert self.server is not None
        return self.server.address

    async def live(self) -> None:
        self.server = ChannelServer(Engine())  # type: ignore[arg-type]
        await self.server.start("127.0.0.1")


async def ask_all(engine: RemoteEngine) -> list[Any]:
    async def ask(index: int) -> list[int]:
        request = EngineRequest(f"r{index}", (1,), 1)
        return [token async for batch in engine.generate(request) for token in batch.token_ids]

    return await asyncio.gather(*map(ask, range(REQUESTS)), return_exceptions=True)


async def lost(channel: Channel | None) -> None:
    async with asyncio.timeout(20):
        while True:
            if channel is None or channel.is_lost:
                return
            await asyncio.sleep(0.001)


def test_requests_at_the_same_time_share_one_connection(drive: Callable[..., None]) -> None:
    async def body() -> None:
        coordinator = Coordinator()
        engine = RemoteEngine(coordinator)  # type: ignore[arg-type]
        await coordinator.live()
        assert await ask_all(engine) == [[7]] * REQUESTS
        assert coordinator.asked == 1
        assert coordinator.server is not None
        coordinator.server.close()
        await coordinator.live()
        await lost(engine._channel)
        assert await ask_all(engine) == [[7]] * REQUESTS
        assert coordinator.asked == 2

    drive(body())


def test_a_connection_outlives_the_request_that_waited_for_it(drive: Callable[..., None]) -> None:
    async def body() -> None:
        coordinator = Coordinator()
        engine = RemoteEngine(coordinator)  # type: ignore[arg-type]
        await coordinator.live()
        first = asyncio.ensure_future(anext(engine.generate(EngineRequest("r", (1,), 1))))
        await asyncio.sleep(0)  # it waits for the connection
        first.cancel()
        assert engine._connecting is not None
        await engine._connecting
        assert await ask_all(engine) == [[7]] * REQUESTS
        assert coordinator.asked == 1

    drive(body())


@pytest.mark.parametrize("error", [None, RayActorError()])
def test_a_coordinator_that_is_away_costs_all_who_wait_one_wait(
    drive: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(ray_coordinator, "ASK_S", ASK_S)

    async def body() -> None:
        coordinator = Coordinator()
        coordinator.error = error
        engine = RemoteEngine(coordinator)  # type: ignore[arg-type]
        begun_s = time.monotonic()
        found = await ask_all(engine)
        assert {type(one) for one in found} == {NotServing}
        assert time.monotonic() - begun_s < 10 * ASK_S
        coordinator.error = None
        await coordinator.live()
        assert await ask_all(engine) == [[7]] * REQUESTS

    drive(body())
