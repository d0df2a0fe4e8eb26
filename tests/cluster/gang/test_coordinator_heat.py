"""The coordinator under scripted sensors and by hand: who rests, who is told, what is counted."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster import heat_watch
from cluster.client import EngineState, NotServing
from cluster.thermal_guard import HeatLimits
from placement.errors import ErrorKind
from rank_worker.device_sensors.reading import CardReading, ChipReading, NodeReading
from rank_worker.guard_word import Order


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat_watch, "INTERVAL_S", 0.01)
    monkeypatch.setattr(heat_watch, "ANSWER_S", 0.05)


def heat(*celsius: float) -> NodeReading:
    chips = tuple(
        ChipReading(7, chip, chip, temperature_celsius=value, health="ok")
        for chip, value in enumerate(celsius)
    )
    return NodeReading(time.monotonic(), time.time(), "npu-smi", chips, (CardReading(7, 72.5),))


class Reader:
    """A stream that is read on and on."""

    def __init__(self, table, name: str) -> None:
        self.tokens: list[int] = []
        self.errors: list[str] = []
        self.task = asyncio.ensure_future(self.read(table, table.request(name, max_tokens=400)))

    async def read(self, table, request) -> None:
        async for batch in table.coordinator.generate(request):
            self.tokens += batch.token_ids
            if batch.error_kind is not None:
                self.errors.append(batch.error_kind)


async def start(table) -> list[Reader]:
    table.script.reading = heat(70, 60)
    await table.serving()
    readers = [Reader(table, f"r{index}") for index in range(4)]
    await table.until(lambda: all(len(reader.tokens) > 3 for reader in readers))
    return readers


async def is_state(table, state: EngineState) -> None:
    await table.until(lambda: table.coordinator.state is state)
    if state in (EngineState.HOLD, EngineState.CUT):
        told = [rank.orders[-1:] for rank in table.script.gang.ranks]
        want = [Order.HOLD if state is EngineState.HOLD else Order.CUT]
        while told != [want, want]:
            await asyncio.sleep(0.001)
            told = [rank.orders[-1:] for rank in table.script.gang.ranks]


def held(table, text: bytes, cause: str) -> float:
    name = f'nrank_hold_seconds_total{{cause="{cause}"}} '.encode()
    return next((float(x.split()[1]) for x in text.splitlines() if x.startswith(name)), 0.0)


def test_heat_holds_all_streams_and_they_go_on_where_they_were(desk, drive):
    async def body():
        async with desk(heat=HeatLimits(), step_timeout_s=0.2) as table:
            readers = await start(table)
            table.script.reading = heat(88, 60)
            await table.until(lambda: table.script.gang.ranks[1].orders[-1:] == [Order.PACE])
            began_s = time.monotonic()
            table.script.reading = heat(95, 60)
            await is_state(table, EngineState.HOLD)
            status = await table.coordinator.status()
            assert (status.ready, status.heat.order, status.heat.cause) == (False, "hold", "heat")
            assert status.reason == "chip 7.0 (rank 0) reached 95 °C, hold_celsius=94"
            step = table.script.gang.step
            await asyncio.sleep(0.5)  # longer than step_timeout_s: nobody is late while held
            assert table.script.gang.step - step <= 1, "the one in flight"
            assert all(len(reader.tokens) < 400 for reader in readers)
            table.script.reading = heat(84, 60)
            await is_state(table, EngineState.SERVING)
            ended_s = time.monotonic()
            await asyncio.gather(*(reader.task for reader in readers))
            assert [reader.tokens for reader in readers] == [list(range(100, 500))] * 4
            text = await table.coordinator.metrics_text()
            assert 0.5 < held(table, text, "heat") <= ended_s - began_s
            assert held(table, text, "heat") == pytest.approx(
                (await table.coordinator.status()).heat.held_s["heat"]
            )
            assert b'nrank_chip_temperature_celsius{card="7",chip="0",rank="0"} 84.0' in text
            assert b'nrank_card_power_watts{card="7"} 72.5' in text
            assert b'nrank_heat_order{order="run"} 1.0' in text
            assert len(table.script.gangs) == 1

    drive(body())


@pytest.mark.parametrize("stays", [False, True])
def test_a_cut_ends_streams_with_an_error_and_keeps_the_ranks(desk, drive, stays):
    async def body():
        async with desk(heat=HeatLimits(stay_down_after_cut=stays)) as table:
            readers = await start(table)
            for celsius, state in ((95, EngineState.HOLD), (97, EngineState.CUT)):
                table.script.reading = heat(60, celsius)
                await is_state(table, state)
            await asyncio.gather(*(reader.task for reader in readers))
            assert [reader.errors for reader in readers] == [[ErrorKind.HELD]] * 4
            with pytest.raises(NotServing, match=r"7.1 \(rank 1\) reached 97 °C, cut") as caught:
                await table.tokens(table.request())
            assert caught.value.kind is ErrorKind.HELD
            table.script.reading = heat(60, 84)
            if stays:
                asked = table.script.count("reading")
                await table.until(lambda: table.script.count("reading") > asked + 3)
                assert table.coordinator.state is EngineState.CUT
                await table.coordinator.resume()
            await is_state(table, EngineState.SERVING)
            assert len(await table.tokens(table.request("after"))) == 5
            assert len(table.script.gangs) == 1

    drive(body())


@pytest.mark.parametrize("how", ["none", "error", "hang"])
def test_silent_sensors_hold_after_their_time(desk, drive, how):
    async def body():
        async with desk(heat=HeatLimits(silence_s=0.2)) as table:
            readers = await start(table)
            if how == "error":
                table.script.reading = NodeReading(
                    time.monotonic(), time.time(), None, error="npu-smi: no answer within 5 s"
                )
            elif how == "hang":
                table.script.hangs.add((1, "reading", 0))
            else:
                table.script.reading = None
            await is_state(table, EngineState.HOLD)
            status = await table.coordinator.status()
            assert (status.heat.cause, status.heat.silent_ranks) == ("silence", (0, 1))
            assert (how == "error") == ("no answer within 5 s" in status.reason)
            text = await table.coordinator.metrics_text()
            assert b"nrank_sensor_silent_ranks 2.0" in text
            table.script.hangs.clear()
            table.script.reading = heat(70, 70)
            await is_state(table, EngineState.SERVING)
            await asyncio.gather(*(reader.task for reader in readers))
            assert [reader.tokens for reader in readers] == [list(range(100, 500))] * 4

    drive(body())


def test_a_hold_by_hand_is_never_undone_by_the_guard_nor_the_reverse(desk, drive):
    async def body():
        async with desk(heat=HeatLimits()) as table:
            readers = await start(table)
            await table.coordinator.hold("fans are cleaned")
            await is_state(table, EngineState.HOLD)
            assert (await table.coordinator.status()).reason == "fans are cleaned"
            table.script.reading = heat(95, 60)
            await table.until(lambda: table.coordinator._holds.cause == "heat")
            table.script.reading = heat(60, 60)
            await table.until(lambda: table.coordinator._holds.cause == "hand")
            assert table.coordinator.state is EngineState.HOLD
            table.script.reading = heat(95, 60)
            await table.until(lambda: table.coordinator._holds.cause == "heat")
            await table.coordinator.resume()
            await asyncio.sleep(0.05)
            assert table.coordinator.state is EngineState.HOLD, "it is still hot"
            table.script.reading = heat(60, 60)
            await asyncio.gather(*(reader.task for reader in readers))
            assert [reader.tokens for reader in readers] == [list(range(100, 500))] * 4

    drive(body())


def test_a_new_gang_is_told_the_order_that_holds(desk, drive):
    async def body():
        async with desk(heat=HeatLimits()) as table:
            readers = await start(table)
            table.script.reading = heat(95, 60)
            await is_state(table, EngineState.HOLD)
            table.script.gang.ranks[1].die()
            await table.until(lambda: len(table.script.gangs) == 2)
            gang = table.script.gangs[1]
            await table.until(lambda: all(rank.orders == [Order.HOLD] for rank in gang.ranks))
            table.script.reading = heat(60, 60)
            await table.serving()
            await asyncio.gather(*(reader.task for reader in readers))
            assert [reader.errors for reader in readers] == [[ErrorKind.RANK_FAILURE]] * 4

    drive(body())


@pytest.mark.parametrize(("phase", "celsius"), [("load", 90), ("load", 99), ("run", 99)])
def test_a_start_that_is_slowed_or_held_is_not_late(desk, drive, phase, celsius):
    """A load that rests, or a first step that waits; paced loads take longer, too."""

    async def body():
        limits = {"start_timeout_s": 0.6, "load_timeout_s": 0.6, "step_timeout_s": 0.3}
        table = desk(heat=HeatLimits(), limit=0, **limits)
        table.script.reading = heat(celsius, 60)
        if phase == "load":
            table.script.hangs |= {(1, "load", 0), (1, "load", 1)}
        async with table:
            await table.until(lambda: table.coordinator._holds.order > Order.RUN)
            await asyncio.sleep(1.5)
            status = await table.coordinator.status()
            assert ("chip 7.0 (rank 0) reached" in status.reason) == (celsius == 99)
            assert ("chip 7.0 (rank 0) reached" in status.public_reason) == (celsius == 99)
            table.script.release()
            table.script.reading = heat(60, 60)
            await table.serving()
            assert len(table.script.gangs) == 1

    drive(body())


def test_a_load_that_is_late_without_heat_fails_as_before(desk, drive):
    async def body():
        table = desk(heat=HeatLimits(), limit=0, load_timeout_s=0.2)
        table.script.reading = heat(60, 60)
        table.script.hangs.add((1, "load", 1))
        async with table:
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            assert "load_timeout_s=0.2" in (await table.coordinator.status()).reason

    drive(body())


def test_sensors_that_fail_leave_the_age_of_the_last_reading(desk, drive):
    async def body():
        async with desk(heat=HeatLimits()) as table:
            await start(table)
            await table.until(lambda: table.coordinator._reading is not None)
            table.script.reading = NodeReading(
                time.monotonic(), time.time(), None, error="npu-smi: no answer"
            )
            asked = table.script.count("reading")
            await table.until(lambda: table.script.count("reading") > asked + 20)
            told = (await table.coordinator.status()).heat
            assert (told.sensor_source, told.sensor_error) == ("npu-smi", "npu-smi: no answer")
            assert told.sensor_age_s > 0.1
            text = await table.coordinator.metrics_text()
            (age,) = [x for x in text.splitlines() if x.startswith(b"nrank_sensor_age_seconds ")]
            assert float(age.split()[1]) > 0.1

    drive(body())


def test_without_sensors_a_hand_holds_and_no_rank_is_asked_for_a_reading(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            reader = Reader(table, "r")
            await table.until(lambda: len(reader.tokens) > 3)
            await table.coordinator.hold("by hand")
            await is_state(table, EngineState.HOLD)
            await table.coordinator.resume()
            await reader.task
            assert len(reader.tokens) == 400
            assert not table.script.count("reading")
            assert b"nrank_sensor" not in b"".join(
                x for x in (await table.coordinator.metrics_text()).splitlines()
                if not x.startswith(b"#")
            )  # fmt: skip

    drive(body())
