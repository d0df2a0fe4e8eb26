"""A request that takes too long ends with an error, wherever it is, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.client import NotServing
from placement.errors import ErrorKind
from rank_worker.messages import FinishReason

LIMIT_S = 0.15


def test_a_request_that_waits_too_long_is_refused_and_taken_back(desk, drive):
    async def body():
        async with desk(request_timeout_s=LIMIT_S) as table:
            await table.serving()
            table.script.gang.go.clear()
            with pytest.raises(NotServing, match=r"request_timeout_s=0\.15: 0 tokens") as caught:
                await table.collect(table.request())
            assert caught.value.kind is ErrorKind.DEADLINE
            await table.until(lambda: table.script.gang.aborts)
            assert table.coordinator.admitted == 0
            table.script.gang.go.set()
            assert len(await table.tokens(table.request("next"))) == 5

    drive(body())


def test_a_stream_that_takes_too_long_ends_with_an_error_after_its_tokens(desk, drive):
    async def body():
        async with desk(request_timeout_s=LIMIT_S) as table:
            await table.serving()
            begun_s = time.monotonic()
            stream = table.coordinator.generate(table.request(max_tokens=900))
            batches = [await anext(stream)]
            table.script.gang.go.clear()
            batches += [batch async for batch in stream]
            table.script.gang.go.set()
            took_s = time.monotonic() - begun_s
            last = batches[-1]
            assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, "deadline")
            tokens = [token for batch in batches for token in batch.token_ids]
            assert tokens == list(range(100, 100 + len(tokens)))
            assert tokens
            assert took_s >= LIMIT_S
            await table.until(lambda: table.script.gang.aborts and not table.script.gang.running)
            assert table.coordinator.admitted == 0

    drive(body())


def test_requests_in_time_are_left_alone(desk, drive):
    async def body():
        async with desk(request_timeout_s=20.0) as table:
            await table.serving()
            results = await asyncio.gather(
                *(table.tokens(table.request(first=10 * i)) for i in range(4))
            )
            assert [len(tokens) for tokens in results] == [5] * 4
            assert table.script.gang.aborts == []

    drive(body())


def test_a_stream_that_always_has_tokens_ends_at_its_deadline(desk, drive):
    """A reader slower than the engine finds a batch each time, so that no wait can time out."""

    async def body():
        async with desk(request_timeout_s=LIMIT_S) as table:
            await table.serving()
            gang = table.script.gang
            gang.go.clear()

            async def feed() -> None:
                while True:
                    gang.take_step()
                    await asyncio.sleep(0.005)

            feeding, begun_s, batches = asyncio.create_task(feed()), time.monotonic(), []
            async for batch in table.coordinator.generate(table.request(max_tokens=900)):
                batches.append(batch)
                await asyncio.sleep(0.03)
                if time.monotonic() - begun_s > 5:
                    break
            feeding.cancel()
            gang.go.set()
            assert batches[-1].error_kind == "deadline"

    drive(body())
