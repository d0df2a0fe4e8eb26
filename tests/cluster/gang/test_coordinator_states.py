"""The state table: what /health and /ready will say, and what a new request meets."""

from __future__ import annotations

import asyncio

import pytest

from cluster.client import EngineState, NotServing
from cluster.thermal_guard import Verdict
from placement.errors import CheckpointError, ClientError, ErrorKind, RankError
from rank_worker.guard_word import Order


async def refused(desk) -> NotServing:
    with pytest.raises(NotServing) as caught:
        await desk.collect(desk.request())
    return caught.value


def test_starting_refuses_until_every_rank_has_committed_a_step(desk, drive):
    async def body():
        table = desk()
        table.script.hangs.add((1, "load", 1))
        async with table:
            await table.until(lambda: (1, "load", 1) in table.script.reached)
            status = await table.coordinator.status()
            assert (status.state, status.ready) == (EngineState.STARTING, False)
            assert [rank.phase for rank in status.ranks] == ["loading", "loading"]
            assert (await refused(table)).kind is ErrorKind.NOT_READY

    drive(body())


def test_serving_is_ready_and_tells_plan_and_ranks(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            await table.until(lambda: len(table.coordinator._session.snapshots) == 2)
            status = await table.coordinator.status()
            assert status.ready
            assert (status.plan_id, status.epoch, status.restarts) == ("plan-1", 1, 0)
            assert [rank.physical_chip for rank in status.ranks] == [0, 1]
            assert min(rank.step for rank in status.ranks) >= 1

    drive(body())


def test_a_gang_whose_follower_commits_no_step_never_becomes_ready(desk, drive):
    async def body():
        table = desk(start_timeout_s=0.2, limit=0)
        table.script.stepless.add(1)
        async with table:
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            assert "not committed by rank(s) 1 within" in (await table.coordinator.status()).reason

    drive(body())


def test_queue_full_is_429_and_the_engine_stays_ready(desk, drive):
    async def body():
        async with desk(max_queue_requests=2) as table:
            await table.serving()
            table.script.gang.go.clear()
            readers = [
                asyncio.ensure_future(table.tokens(table.request(f"r{i}"))) for i in range(6)
            ]
            await table.until(lambda: table.coordinator.admitted == 6)
            error = await refused(table)
            assert error.kind is ErrorKind.QUEUE_FULL
            assert error.retry_after_s
            assert "6" in str(error)
            assert (await table.coordinator.status()).ready
            table.script.gang.go.set()
            assert [len(t) for t in await asyncio.gather(*readers)] == [5] * 6

    drive(body())


def test_hold_queues_to_the_bound_then_refuses_and_resume_runs_what_waited(desk, drive):
    async def body():
        async with desk(max_queue_requests=1) as table:
            await table.serving()
            await table.coordinator.hold("by hand")
            readers = [
                asyncio.ensure_future(table.tokens(table.request(f"r{i}"))) for i in range(5)
            ]
            await table.until(lambda: table.coordinator.admitted == 5)
            status = await table.coordinator.status()
            assert (status.state, status.ready) == (EngineState.HOLD, False)
            assert status.reason == "by hand"
            assert (await refused(table)).kind is ErrorKind.HELD
            assert not table.script.gang.running
            await table.coordinator.resume()
            assert [len(t) for t in await asyncio.gather(*readers)] == [5] * 5

    drive(body())


def test_cut_ends_streams_with_an_error_frees_the_ranks_and_refuses(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            stream = table.coordinator.generate(table.request(max_tokens=900))
            assert (await anext(stream)).finish_reason is None
            table.coordinator.observe_heat(None, Verdict(Order.CUT, "hot", "heat"), (0, 1))
            batches = [batch async for batch in stream]
            assert batches[-1].error_kind == ErrorKind.HELD
            assert (await refused(table)).kind is ErrorKind.HELD
            await table.until(lambda: not table.script.gang.running)
            table.coordinator.observe_heat(None, Verdict(), (0, 1))
            assert len(await table.tokens(table.request())) == 5

    drive(body())


def test_restart_cap_is_final_and_says_why(desk, drive):
    async def body():
        table = desk(limit=2)
        for life in (1, 2, 3):
            table.script.faults[life, "load", 1] = RankError("chip 1 is broken")
        async with table:
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            status = await table.coordinator.status()
            assert (len(table.script.gangs), status.restarts, status.ready) == (3, 2, False)
            assert "chip 1 is broken" in status.reason
            assert (await refused(table)).kind is ErrorKind.NOT_READY
            assert all(gang.killed.is_set() for gang in table.script.gangs)
            table.coordinator.check_alive()

    drive(body())


def test_a_broken_checkpoint_is_not_tried_again(desk, drive):
    async def body():
        table = desk(limit=5)
        table.script.faults[1, "load", 0] = CheckpointError("model.safetensors is cut short")
        async with table:
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            assert len(table.script.gangs) == 1
            assert isinstance(table.coordinator.fatal, CheckpointError)

    drive(body())


def test_steady_service_forgives_earlier_restarts(desk, drive):
    async def body():
        table = desk(limit=1, steady_s=0.0)
        async with table:
            for life in (1, 2, 3):
                await table.serving()
                assert len(table.script.gangs) == life
                table.script.gang.ranks[0].die()
                await table.until(lambda life=life: len(table.script.gangs) == life + 1)
            await table.serving()
            assert (await table.coordinator.status()).restarts == 3

    drive(body())


@pytest.mark.parametrize(("prompt", "max_tokens"), [((), 5), ((1,), 0)])
def test_an_empty_request_is_refused(desk, drive, prompt, max_tokens):
    async def body():
        async with desk() as table:
            await table.serving()
            request = table.request(max_tokens=max_tokens)
            with pytest.raises(ClientError):
                await table.collect(type(request)("r", prompt, max_tokens))

    drive(body())


def test_a_request_beyond_the_context_names_limit_and_value(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            with pytest.raises(ClientError, match=r"998.*1000") as caught:
                await table.collect(table.request(max_tokens=998))
            assert caught.value.kind is ErrorKind.CONTEXT_LENGTH
            assert table.coordinator.admitted == 0

    drive(body())
