"""Death, silence and restart: in every phase, for every rank, with streams open or not."""

from __future__ import annotations

import asyncio

import pytest

from cluster import gang
from cluster.client import EngineState, NotServing
from cluster.gang import RankDied
from placement.errors import ErrorKind, PeerError, RankError

PLACES = [(phase, rank) for phase in ("place", "assign", "open", "load", "run") for rank in (0, 1)]
RUNNING = 'nrank_requests_running{model_name="fake"}'
PLACES.append(("listen", 0))  # the only rank with a part in this phase


@pytest.fixture(autouse=True)
def _scripted_peers_settle_soon(monkeypatch):
    monkeypatch.setattr(gang, "SETTLE_S", 0.1)


@pytest.mark.parametrize(("phase", "rank"), PLACES)
def test_a_death_in_any_phase_ends_the_gang_and_starts_the_next(desk, drive, phase, rank):
    async def body():
        table = desk()
        table.script.faults[1, phase, rank] = RankDied(f"rank {rank} died: SIGKILL", rank=rank)
        async with table:
            await table.serving()
            status = await table.coordinator.status()
            assert (status.epoch, status.restarts, status.reason) == (2, 1, "")
            assert table.script.gangs[0].killed.is_set()
            assert len(await table.tokens(table.request())) == 5

    drive(body())


@pytest.mark.parametrize("phase", ["assign", "open", "load"])
def test_a_phase_that_ends_late_names_the_missing_ranks_and_the_setting(desk, drive, phase):
    async def body():
        table = desk(ranks=3, start_timeout_s=0.1, load_timeout_s=0.1, limit=0)
        table.script.hangs.add((1, phase, 1))
        async with table:
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            reason = (await table.coordinator.status()).reason
            assert "rank(s) 1 (2 of 3 done" in reason
            assert "timeout_s=0.1" in reason

    drive(body())


def test_a_rendezvous_failure_also_names_who_never_arrived(desk, drive):
    async def body():
        table = desk(ranks=3, limit=0)
        table.script.faults[1, "open", 0] = RankError("rendezvous on port 4711 timed out", rank=0)
        table.script.hangs.add((1, "open", 2))
        async with table:
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            reason = (await table.coordinator.status()).reason
            assert "rank 0 failed: rendezvous on port 4711 timed out" in reason
            assert "no answer from rank(s) 2" in reason

    drive(body())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_death_ends_running_streams_with_an_error_and_queued_ones_with_503(
    desk, drive, rank
):
    async def body():
        async with desk() as table:
            await table.serving()
            running = [table.coordinator.generate(table.request(f"r{i}", 900)) for i in range(4)]
            for stream in running:
                await anext(stream)
            table.script.gang.go.clear()
            queued = asyncio.ensure_future(table.collect(table.request("queued")))
            await table.until(lambda: len(table.script.gang.waiting) == 1)
            table.script.gang.ranks[rank].die("killed by signal 9 (pid 4711)")
            told = f"rank {rank} failed (phase run); retry later"
            for stream in running:
                last = [batch async for batch in stream][-1]
                assert last.error_kind == ErrorKind.RANK_FAILURE
                assert last.error_message == told
            with pytest.raises(NotServing) as caught:
                await queued
            assert caught.value.kind is ErrorKind.RANK_FAILURE
            assert str(caught.value) == told
            assert "pid 4711" in (await table.coordinator.status()).last_failure.message
            assert table.coordinator.admitted == 0
            await table.until(lambda: len(table.script.gangs) == 2)
            await table.serving()
            assert len(await table.tokens(table.request())) == 5

    drive(body())


def test_a_gang_that_has_ended_runs_nothing_in_the_metrics(desk, drive):
    """For good, too: with no restart left nobody would ever tell another figure."""

    async def body():
        async with desk(limit=0) as table:
            await table.serving()
            stream = table.coordinator.generate(table.request("r", 900))
            await anext(stream)

            async def is_idle() -> bool:
                text = (await table.coordinator.metrics_text()).decode()
                return f"{RUNNING} 0.0" in text.splitlines()

            for _ in range(500):
                if not await is_idle():
                    break
                await asyncio.sleep(0.01)
            assert not await is_idle()
            table.script.gang.ranks[1].die("killed by signal 9")
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            assert await is_idle()
            await stream.aclose()

    drive(body())


def test_the_dead_rank_is_named_although_its_peer_fails_first(desk, drive):
    async def body():
        async with desk(limit=0) as table:
            await table.serving()
            ranks = table.script.gang.ranks
            ranks[0].fail(RankError("connection closed by peer", rank=0))
            await asyncio.sleep(0)
            ranks[1].die("killed by signal 9")
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            assert "rank 1 died" in (await table.coordinator.status()).reason

    drive(body())


def test_a_failed_rank_is_a_dead_gang(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            stream = table.coordinator.generate(table.request(max_tokens=900))
            await anext(stream)
            table.script.gang.go.clear()
            table.script.gang.ranks[1].fail(RankError("decisions differ", rank=1, step=64))
            last = [batch async for batch in stream][-1]
            assert last.error_kind == ErrorKind.RANK_FAILURE
            assert "decisions differ" in (await table.coordinator.status()).last_failure.message
            await table.until(lambda: len(table.script.gangs) == 2)
            assert table.script.gangs[0].killed.is_set()

    drive(body())


def test_a_step_that_never_ends_with_work_queued_is_a_dead_gang(desk, drive):
    async def body():
        async with desk(step_timeout_s=0.2) as table:
            await table.serving()
            stream = table.coordinator.generate(table.request(max_tokens=900))
            await anext(stream)
            table.script.gang.go.clear()
            last = [batch async for batch in stream][-1]
            assert last.error_kind == ErrorKind.RANK_FAILURE
            message = (await table.coordinator.status()).last_failure.message
            assert "has not ended" in message
            assert "step_timeout_s=0.2" in message
            await table.until(lambda: len(table.script.gangs) == 2)

    drive(body())


def test_a_silent_rank_is_found_although_the_gang_is_idle(desk, drive):
    async def body():
        async with desk(step_timeout_s=0.2) as table:
            await table.serving()
            table.script.gang.ranks[1].silent = True
            await table.until(lambda: len(table.script.gangs) == 2)
            assert table.script.gangs[0].killed.is_set()

    drive(body())


def test_a_loop_that_ends_unasked_is_a_failure(desk, drive):
    async def body():
        async with desk(limit=0) as table:
            await table.serving()
            table.script.gang.ranks[1].ended.set()
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            assert "rank 1 ended its loop unasked" in (await table.coordinator.status()).reason

    drive(body())


def test_requests_during_a_restart_are_refused_with_a_time_to_retry(desk, drive):
    async def body():
        async with desk(backoff_s=30.0) as table:
            await table.serving()
            table.script.gang.ranks[0].die("pid 4711")
            await table.until(lambda: table.coordinator.state is EngineState.RESTARTING)
            with pytest.raises(NotServing) as caught:
                await table.collect(table.request())
            assert caught.value.kind is ErrorKind.NOT_READY
            assert caught.value.retry_after_s
            assert str(caught.value) == "the engine is restarting: rank 0 failed (phase run)"
            await table.until(lambda: table.coordinator._supervisor.phase == "restarting")
            status = await table.coordinator.status()
            assert (status.epoch, status.restarts) == (1, 1), "the one under way counts"
            assert "pid 4711" in status.reason
            assert status.public_reason == "rank 0 failed (phase run)"

    drive(body())


def test_who_waited_for_a_peer_is_not_blamed(desk, drive):
    async def body():
        async with desk(limit=0, ranks=3) as table:
            await table.serving()
            ranks = table.script.gang.ranks
            for rank in (0, 1):
                ranks[rank].fail(PeerError(f"rank {rank}: no answer", rank=rank, phase="plan"))
            await asyncio.sleep(0)
            ranks[2].fail(RankError("out of memory", rank=2, phase="step"))
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            assert (await table.coordinator.status()).last_failure.rank == 2

    drive(body())


@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_the_rank_that_keeps_its_peers_waiting_is_blamed(desk, drive, stuck):
    async def body():
        async with desk(limit=0, ranks=3) as table:
            await table.serving()
            gang = table.script.gang
            table.script.entered = {rank: 7 - (rank == stuck) for rank in range(3)}
            session = table.coordinator._session
            await table.until(lambda: [s.entered for s in session.snapshots].count(7) == 2)
            teller = 1 if stuck == 0 else 0
            gang.ranks[teller].fail(PeerError("no answer in phase plan", rank=teller, phase="plan"))
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            failure = (await table.coordinator.status()).last_failure
            assert (failure.rank, failure.phase) == (stuck, "plan")
            assert failure.message.startswith(f"rank {stuck} keeps its peers waiting: no answer")

    drive(body())


def test_a_fault_of_ours_ends_the_streams_and_is_told_to_serve(desk, drive):
    """Serve then replaces the process: nothing here can be trusted to go on."""

    async def body():
        table = desk()
        table.coordinator.start()
        await table.serving()
        stream = table.coordinator.generate(table.request(max_tokens=900))
        await anext(stream)
        table.coordinator._metrics.update_snapshots = lambda _: {}["a bug"]
        last = [batch async for batch in stream][-1]
        assert last.error_message == "the coordinator failed and is replaced; retry later"
        async with asyncio.timeout(20):
            await table.script.gang.killed.wait()
            await asyncio.wait({table.coordinator._supervisor._task})
        with pytest.raises(KeyError, match="a bug"):
            table.coordinator.check_alive()
        with pytest.raises(NotServing, match="the coordinator failed and is replaced"):
            await table.collect(table.request())
        assert "KeyError" in (await table.coordinator.status()).reason

    drive(body())


def test_back_off_doubles_up_to_its_bound():
    from cluster.supervisor import BACKOFF_CAP_S, RestartPolicy

    policy = RestartPolicy(backoff_s=1.5)
    assert [policy.delay_s(n) for n in (1, 2, 3)] == [1.5, 3.0, 6.0]
    assert policy.delay_s(20) == BACKOFF_CAP_S
