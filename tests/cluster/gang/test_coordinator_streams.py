"""Requests through the coordinator: order, batching, cancellation, no trace left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from placement.errors import ErrorKind


def test_tokens_arrive_in_order_and_the_callers_name_comes_back(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            batches = await table.collect(table.request("mine", max_tokens=7))
            tokens = [token for batch in batches for token in batch.token_ids]
            assert tokens == list(range(100, 107))
            assert {batch.request_id for batch in batches} == {"mine"}
            assert [bool(batch.finish_reason) for batch in batches] == [False] * (
                len(batches) - 1
            ) + [True]

    drive(body())


def test_parallel_streams_do_not_mix_and_run_within_the_bound(desk, drive):
    async def body():
        async with desk(max_queue_requests=30) as table:
            await table.serving()
            requests = [table.request("same", 20, first=1000 * i) for i in range(20)]
            results = await asyncio.gather(*(table.tokens(request) for request in requests))
            for i, tokens in enumerate(results):
                assert tokens == list(range(1000 * i, 1000 * i + 20))
            assert table.script.gang.max_running == 4

    drive(body())


def test_a_slow_reader_gets_what_it_missed_as_one_batch(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            stream = table.coordinator.generate(table.request(max_tokens=50))
            first = await anext(stream)
            await table.until(lambda: not table.script.gang.running)
            await table.until(lambda: not table.script.gang.outputs)
            rest = [batch async for batch in stream]
            assert len(rest) <= 2
            tokens = list(first.token_ids) + [t for batch in rest for t in batch.token_ids]
            assert tokens == list(range(100, 150))

    drive(body())


def test_closing_a_running_stream_aborts_it_once(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            stream = table.coordinator.generate(table.request(max_tokens=900))
            await anext(stream)
            await stream.aclose()
            await table.until(lambda: len(table.script.gang.aborts) == 1)
            assert table.coordinator.admitted == 0
            assert not table.script.gang.running

    drive(body())


def test_a_finished_stream_sends_no_abort(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            await table.tokens(table.request())
            running = table.coordinator.generate(table.request(max_tokens=900))
            await anext(running)
            await running.aclose()
            await table.until(lambda: bool(table.script.gang.aborts))
            assert len(table.script.gang.aborts) == 1

    drive(body())


def test_a_request_cancelled_before_it_was_sent_never_reaches_a_rank(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            await table.coordinator.hold("by hand")
            task = asyncio.ensure_future(table.tokens(table.request("never")))
            await table.until(lambda: table.coordinator.admitted == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await table.coordinator.resume()
            await table.tokens(table.request("after"))
            names = list(table.script.gang.requests)
            assert not any("never" in name for name in names)
            assert not table.script.gang.aborts

    drive(body())


def test_a_hundred_random_cancels_leave_no_trace_and_the_next_request_is_served(desk, drive):
    async def one(table, name, rng):
        stream = table.coordinator.generate(table.request(name, max_tokens=40))
        batches = rng.choice([0, 1, 2, 5, 100])
        steps = rng.randrange(30)

        async def read():
            for _ in range(batches):
                if (await anext(stream)).finish_reason is not None:
                    return

        task = asyncio.ensure_future(read())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async def body():
        rng = random.Random(7)
        async with desk(max_queue_requests=200) as table:
            await table.serving()
            await asyncio.gather(*(one(table, f"c{i}", rng) for i in range(100)))
            assert table.coordinator.admitted == 0
            gang = table.script.gang
            await table.until(lambda: not gang.running and not gang.waiting)
            assert await table.tokens(table.request("last")) == list(range(100, 105))
            await table.until(lambda: table.coordinator._session.snapshots[0].running == 0)
            status = await table.coordinator.status()
            assert (status.running, status.waiting) == (0, 0)

    drive(body())


def test_invalid_requests_take_no_place(desk, drive):
    async def body():
        async with desk(max_queue_requests=0) as table:
            await table.serving()
            for _ in range(50):
                with pytest.raises(Exception, match="context"):
                    await table.collect(table.request(max_tokens=5000))
            assert len(await table.tokens(table.request())) == 5

    drive(body())


def test_an_error_batch_of_the_engine_passes_through(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            gang = table.script.gang
            gang.go.clear()
            stream = table.coordinator.generate(table.request("bad"))
            reader = asyncio.ensure_future(anext(stream))
            await table.until(lambda: any("bad" in r.request_id for r in gang.waiting))
            name = gang.waiting[0].request_id
            table.coordinator._streams.named("bad")[0].fail(ErrorKind.NON_FINITE, "logits")
            batch = await reader
            assert (batch.error_kind, batch.error_message) == ("non_finite", "logits")
            await stream.aclose()
            gang.go.set()
            await table.until(lambda: name in gang.aborts)

    drive(body())


def series(text: bytes) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


def test_metrics_tell_success_stop_abort_refusal_and_restart_apart(desk, drive):
    async def body():
        async with desk(max_queue_requests=0) as table:
            await table.serving()
            await table.tokens(table.request("done"))
            for name, stop in (("stopped", True), ("left", False)):
                stream = table.coordinator.generate(table.request(name, 900))
                await anext(stream)
                if stop:
                    await table.coordinator.stop_reached(name)
                await stream.aclose()
            with pytest.raises(Exception, match="context"):
                await table.collect(table.request(max_tokens=5000))
            await table.coordinator.record_http("/v1/completions", 200)
            table.script.gang.ranks[1].die()
            await table.until(lambda: len(table.script.gangs) == 2)
            await table.serving()
            found = series(await table.coordinator.metrics_text())
            model = 'model_name="fake"'
            success = "nrank_request_success_total"
            assert found[f'{success}{{finish_reason="length",{model}}}'] == 1
            assert found[f'{success}{{finish_reason="stop",{model}}}'] == 1
            aborted = "nrank_requests_aborted_total"
            assert found[f'{aborted}{{{model},reason="cancelled"}}'] == 1
            rejected = "nrank_requests_rejected_total"
            assert found[f'{rejected}{{reason="context_length"}}'] == 1
            assert found['nrank_engine_state{state="serving"}'] == 1
            assert found['nrank_rank_restarts_total{rank="1",reason="run"}'] == 1
            assert found[f"nrank_time_to_first_token_seconds_count{{{model}}}"] == 3
            http = 'nrank_requests_total{code="200",endpoint="/v1/completions",' + model + "}"
            assert found[http] == 1

    drive(body())
