"""The end: drain, stop in every phase, nothing left running."""

from __future__ import annotations

import asyncio

import pytest

from cluster.client import EngineState, NotServing
from placement.errors import ErrorKind


def test_drain_finishes_what_was_admitted_and_refuses_the_rest(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            table.script.gang.go.clear()
            readers = [
                asyncio.ensure_future(table.tokens(table.request(f"r{i}"))) for i in range(6)
            ]
            await table.until(lambda: table.coordinator.admitted == 6)
            drain = asyncio.ensure_future(table.coordinator.drain(20))
            await table.until(lambda: table.coordinator.state is EngineState.DRAINING)
            with pytest.raises(NotServing) as caught:
                await table.collect(table.request())
            assert caught.value.kind is ErrorKind.DRAINING
            table.script.gang.go.set()
            assert [len(t) for t in await asyncio.gather(*readers)] == [5] * 6
            assert await drain
            await table.coordinator.close()
            gang = table.script.gang
            assert gang.stopped.is_set()
            assert gang.killed.is_set()
            assert len(table.script.gangs) == 1

    drive(body())


def test_drain_past_its_time_ends_streams_with_an_error(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            stream = table.coordinator.generate(table.request(max_tokens=900))
            await anext(stream)
            table.script.gang.go.clear()
            reader = asyncio.ensure_future(_all(stream))
            assert not await table.coordinator.drain(0.05)
            last = (await reader)[-1]
            assert last.error_kind == ErrorKind.DRAINING
            assert "drain_timeout_s=0.05" in last.error_message
            table.script.gang.go.set()

    drive(body())


async def _all(stream):
    return [batch async for batch in stream]


@pytest.mark.parametrize("phase", ["place", "assign", "listen", "open", "load", "run"])
def test_close_during_a_start_phase_kills_what_was_begun(desk, drive, phase):
    async def body():
        table = desk()
        table.script.hangs.add((1, phase, 0))
        async with table:
            await table.until(lambda: (1, phase, 0) in table.script.reached)
            await table.coordinator.close()
            assert table.script.gang.killed.is_set()
            assert len(table.script.gangs) == 1

    drive(body())


def test_close_during_back_off_starts_nothing_more(desk, drive):
    async def body():
        async with desk(backoff_s=30.0) as table:
            await table.serving()
            table.script.gang.ranks[0].die()
            await table.until(lambda: table.coordinator._supervisor.phase == "restarting")
            await table.coordinator.close()
            assert len(table.script.gangs) == 1

    drive(body())


def test_close_with_open_streams_ends_them(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            stream = table.coordinator.generate(table.request(max_tokens=900))
            await anext(stream)
            table.script.gang.go.clear()
            reader = asyncio.ensure_future(_all(stream))
            await asyncio.sleep(0)
            table.script.gang.go.set()
            await table.coordinator.close()
            assert (await reader)[-1].finish_reason is not None

    drive(body())


def test_a_leader_that_does_not_stop_is_killed(desk, drive):
    async def body():
        table = desk(step_timeout_s=0.2)
        table.script.hangs.add((1, "stop", 0))
        async with table:
            await table.serving()
            await table.coordinator.close()
            assert table.script.gang.killed.is_set()

    drive(body())
