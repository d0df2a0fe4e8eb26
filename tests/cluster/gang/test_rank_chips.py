"""What /status says of a rank's chip, and of a rank that nobody has heard of yet."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cluster import heat_watch
from cluster.rank_status import rank_status
from cluster.thermal_guard import HeatLimits
from placement.plan import RankPlan
from rank_worker.device_sensors.reading import ChipReading, NodeReading
from rank_worker.messages import LoadProgress, RankIdentity

HOT, COOL = ChipReading(7, 0, 1, temperature_celsius=70.0), ChipReading(7, 1, 0)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(heat_watch, "INTERVAL_S", 0.01)


def reading(*chips: ChipReading) -> NodeReading:
    return NodeReading(time.monotonic(), time.time(), "npu-smi", chips)


def test_a_rank_has_the_chip_that_it_runs_on(desk, drive):
    async def body():
        async with desk(heat=HeatLimits(silence_s=1000.0)) as table:
            table.script.reading = reading(HOT, COOL)  # not in the order of ranks
            await table.serving()
            await table.until(lambda: table.coordinator._reading is not None)
            assert [r.chip for r in (await table.coordinator.status()).ranks] == [COOL, HOT]
            other = table.script.gang.ranks[1]
            other.identity = replace(other.identity, node="another")
            assert [r.chip for r in (await table.coordinator.status()).ranks] == [COOL, None]
            table.script.reading = old = replace(reading(HOT), monotonic_s=time.monotonic() - 6)
            await table.until(lambda: table.coordinator._reading is old)
            assert [r.chip for r in (await table.coordinator.status()).ranks] == [None, None]

    drive(body())


def test_of_a_rank_that_loads_no_heartbeat_is_told():
    plan = RankPlan(None, 100, {"dense": 30, "kv_pages": 40})
    who, progress = RankIdentity(1, "node", 0, "a"), LoadProgress(0, "loading", 10, 30, 1.0)
    status = rank_status(who, progress, None, None, plan, None)
    assert (status.heartbeat_age_s, status.chip) == (None, None)
    assert (status.usable_bytes, status.planned_bytes, status.measured_bytes) == (100, 70, 10)
