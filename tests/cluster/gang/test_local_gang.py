"""The real engine as a thread of this process, under the same coordinator."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cluster.coordinator import Coordinator, CoordinatorSettings
from cluster.local_gang import LocalLauncher
from placement.config import EngineConfig
from placement.models.registry import load_model_spec
from placement.plan import make_plan
from rank_worker.messages import EngineRequest


@pytest.fixture
def local(embedded_model_dir):
    """A coordinator of one real rank over the embedded model."""
    config = EngineConfig(str(embedded_model_dir), context_tokens=512, max_sequences=2)
    plan = make_plan(config, *load_model_spec(config.model_dir))
    settings = CoordinatorSettings(snapshot_interval_s=0.02, model_id="embedded")
    return Coordinator(config, plan, lambda: LocalLauncher(config), settings)


async def serving(coordinator):
    async with asyncio.timeout(60):
        while coordinator.state.value != "serving":
            coordinator.check_alive()
            await asyncio.sleep(0.01)


async def tokens(coordinator, request):
    return [t async for batch in coordinator.generate(request) for t in batch.token_ids]


def test_answers_are_the_references_and_the_rank_stops_when_closed(local, drive, golden):
    case = golden("embedded").cases[63]

    async def body():
        local.start()
        await serving(local)
        request = EngineRequest("g", case.prompt_ids, len(case.token_ids), ignore_eos=True)
        both = await asyncio.gather(tokens(local, request), tokens(local, request))
        for ids in both:
            assert len(ids) == len(case.token_ids)
            case.check_ids(ids)
        await local.close()
        assert not await local.snapshots()

    drive(body())


def test_cancelled_requests_free_slots_and_pages(local, drive):
    async def body():
        local.start()
        await serving(local)
        for i in range(6):
            stream = local.generate(EngineRequest(f"c{i}", (1, 2, 3), 400, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
        async with asyncio.timeout(30):
            while True:
                leader = (await local.snapshots())[0]
                if (leader.running, leader.slots_used, leader.pages_used) == (0, 0, 0):
                    break
                await asyncio.sleep(0.01)
        await local.close()

    drive(body())


def test_a_rank_that_can_not_load_is_a_fatal_failure(drive, tmp_path, embedded_model_dir, caplog):
    async def body():
        good = EngineConfig(str(embedded_model_dir), context_tokens=512)
        plan = make_plan(good, *load_model_spec(good.model_dir))
        broken = EngineConfig(str(tmp_path / "nothing"), context_tokens=512)
        coordinator = Coordinator(
            broken, plan, lambda: LocalLauncher(broken), CoordinatorSettings()
        )
        caplog.set_level(logging.CRITICAL)
        coordinator.start()
        async with asyncio.timeout(60):
            while True:
                if coordinator.fatal is not None:
                    break
                await asyncio.sleep(0.01)
        assert "nothing" in str(coordinator.fatal)
        await coordinator.close()

    drive(body())
