"""A gang that loads: progress in status and metrics, the slow rank named, the report of a start."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.client import EngineState, EngineStatus, NotServing
from cluster.coordinator import Coordinator, CoordinatorSettings
from cluster.local_gang import LocalLauncher
from placement.config import EngineConfig
from placement.errors import ErrorKind, RankError
from placement.models.registry import load_model_spec
from placement.plan import make_plan
from rank_worker.messages import EngineRequest
from rank_worker.rank import Rank
from rank_worker.start_report import PrefixTier, RankBytes, StartReport

Drive = Callable[[Coroutine[Any, Any, None]], None]
MakeDesk = Callable[..., Any]


async def metric(table: Any, line: str) -> bool:
    return line in (await table.coordinator.metrics_text()).decode().splitlines()


def test_status_and_metrics_tell_how_far_each_rank_is(desk: MakeDesk, drive: Drive) -> None:
    async def body() -> None:
        table = desk()
        table.script.hangs |= {(1, "load", 0), (1, "load", 1)}
        table.script.loaded |= {0: 1500, 1: 500}
        async with table:
            await table.until(lambda: len(table.coordinator._loading()) == 2)
            status = await table.coordinator.status()
            assert status.slowest_rank == 1
            assert status.start is None
            found = [(r.weights_read_bytes, r.weights_planned_bytes) for r in status.ranks]
            assert found == [(1500, 2000), (500, 2000)]
            assert [r.load_seconds for r in status.ranks] == [1.0, 1.0]
            assert [r.measured_bytes for r in status.ranks] == [1500, 500]
            for rank, read in (("0", "1500.0"), ("1", "500.0")):
                assert await metric(table, f'nrank_weights_planned_bytes{{rank="{rank}"}} 2000.0')
                name = "nrank_weights_loaded_bytes_total"
                assert await metric(table, f'{name}{{rank="{rank}"}} {read}')
                assert await metric(table, f'nrank_weights_load_seconds{{rank="{rank}"}} 1.0')
            text = (await table.coordinator.metrics_text()).decode()
            assert "nrank_kv_pages_capacity{" not in text, "pools are not there yet"

    drive(body())


def test_bytes_of_a_load_are_counted_once(desk: MakeDesk, drive: Drive) -> None:
    """By progress while loading and by snapshots afterwards; a restart adds its own."""

    async def body() -> None:
        table = desk()
        async with table:
            await table.serving()
            total = 'nrank_weights_loaded_bytes_total{rank="1"} '
            assert await metric(table, total + "2000.0")
            assert await metric(table, 'nrank_weights_load_seconds{rank="1"} 4.0')
            assert (await table.coordinator.status()).slowest_rank == -1
            table.script.gang.ranks[1].die()
            await table.until(lambda: len(table.script.gangs) == 2)
            await table.serving()
            assert await metric(table, total + "4000.0")

    drive(body())


def test_a_load_timeout_names_the_slowest_rank_and_the_setting(
    desk: MakeDesk, drive: Drive
) -> None:
    """The fast rank is late as well: it waits for the slow one."""

    async def body() -> None:
        table = desk(load_timeout_s=0.05, limit=0)
        table.script.hangs |= {(1, "load", 0), (1, "load", 1)}
        table.script.loaded |= {0: 2000, 1: 500}
        async with table:
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            reason = (await table.coordinator.status()).reason
            assert "load_timeout_s=0.05" in reason
            assert "slowest is rank 1: 500 B of 2.0 KiB (25%)" in reason
            assert (await table.coordinator.status()).slowest_rank == -1

    drive(body())


def test_a_rank_that_fails_to_load_is_told_instead_of_the_slowest(
    desk: MakeDesk, drive: Drive
) -> None:
    async def body() -> None:
        table = desk(limit=0)
        table.script.faults[1, "load", 1] = RankError("chip 1 is broken")
        table.script.faults[1, "progress", 1] = RankError("chip 1 is broken")
        async with table:
            await table.until(lambda: table.coordinator.state is EngineState.FAILED)
            reason = (await table.coordinator.status()).reason
            assert "rank 1 failed: chip 1 is broken" in reason
            assert "slowest" not in reason

    drive(body())


def test_a_started_gang_tells_estimate_and_measurement(
    desk: MakeDesk, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nrank.coordinator")

    async def body() -> None:
        table = desk()
        async with table:
            await table.serving()
            status = await table.coordinator.status()
            start = status.start
            assert start.estimated_step_s == pytest.approx(0.003 * 2 / 3 + 0.001)
            assert (start.measured_step_s, start.slowest_rank) == (0.006, 1)
            assert [(r.planned_bytes, r.measured_bytes) for r in start.ranks] == [(4000, 4001)] * 2
            assert status.ranks[0].planned_rows == {
                "dense": 3000, "kv_pages": 1000, "workspace": 96,
            }  # fmt: skip
            assert status.ranks[0].measured_rows == {"dense": 3000, "kv_pages": 1001}
            table.script.gang.ranks[0].die()
            await table.until(lambda: not table.coordinator._supervisor.ready)
            assert (await table.coordinator.status()).start is None

    drive(body())
    (line,) = (r.getMessage() for r in caplog.records if "decode step" in r.getMessage())
    assert "at least 3 ms estimated, 6 ms measured" in line
    assert "rank 1 3.9 KiB and 3.9 KiB" in line


def test_reuse_and_drafts_have_a_line_each_once_they_are_known() -> None:
    ranks = (RankBytes(0, 10, 10), RankBytes(1, 10, 10))
    report = StartReport(
        0.001, 0.004, 1, ranks, "float32",
        {"device": PrefixTier(4, (2048, 1024)), "host": PrefixTier(16, (8192, 4096))}, 2,
        (3 << 20, 2 << 20),
    )  # fmt: skip
    step, prefix, drafts = report.lines()
    assert step.startswith("decode step: ")
    assert prefix == (
        "prefix cache: 4 states on the device (rank 0 2.0 KiB, rank 1 1.0 KiB), 16 states on the "
        "host (rank 0 8.0 KiB, rank 1 4.0 KiB), recurrent parts in float32"
    )
    assert drafts == (
        "multi-token prediction: 2 drafts a step, draft head rank 0 3.0 MiB, rank 1 2.0 MiB"
    )
    none = PrefixTier(0, (0, 0))
    off = replace(report, prefix_tiers={"device": none, "host": none}, drafts_per_step=0)
    assert off.lines()[1:] == ("prefix cache: off", "multi-token prediction: off")
    assert len(StartReport(0.001, 0.004, 1, ranks).lines()) == 1


def test_expert_counts_come_from_rank_0_of_the_gang_that_serves(
    desk: MakeDesk, drive: Drive
) -> None:
    async def body() -> None:
        table = desk()
        table.script.hangs.add((1, "load", 1))
        async with table:
            with pytest.raises(NotServing) as caught:
                await table.coordinator.expert_counts()
            assert caught.value.kind is ErrorKind.NOT_READY
            table.script.hangs.clear()
        async with desk() as table:
            await table.serving()
            counts = await table.coordinator.expert_counts()
            assert counts == [[table.script.gang.step, 2], [3, 4]]
            table.script.faults[1, "counts", 0] = RankError("rank 0 is busy dying")
            with pytest.raises(NotServing, match="does not tell its counts") as caught:
                await table.coordinator.expert_counts()
            assert caught.value.kind is ErrorKind.RANK_FAILURE

    drive(body())


class Brake:
    """Stops the load of a real rank after some bytes until it is released."""

    def __init__(self) -> None:
        self.left = 4 << 20
        self.released = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.left -= num_bytes
            stop = self.left < 0
        if stop:
            assert self.released.wait(60)


@pytest.fixture
def brake() -> Iterator[Brake]:
    made = Brake()
    yield made
    made.released.set()


def test_real_ranks_are_seen_loading_and_the_slow_one_is_named(
    embedded_model_dir: Path, drive: Drive, brake: Brake
) -> None:
    """Two ranks as threads, one of them braked; then counts of what was really routed."""
    config = EngineConfig(str(embedded_model_dir), ranks=2, context_tokens=512, max_sequences=2)
    spec, headers = load_model_spec(config.model_dir)

    def slow_second(config: EngineConfig, rank: int, world_size: int) -> Rank:
        made = Rank(config, rank, world_size)
        made.pace = brake if rank == 1 else None
        return made

    coordinator = Coordinator(
        config,
        make_plan(config, spec, headers),
        lambda: LocalLauncher(config, slow_second),
        CoordinatorSettings(snapshot_interval_s=0.02),
    )

    def second_is_last(status: EngineStatus) -> bool:
        return status.slowest_rank == 1 and all(r.weights_read_bytes for r in status.ranks)

    async def body() -> None:
        coordinator.start()
        async with asyncio.timeout(60):
            while not second_is_last(await coordinator.status()):
                coordinator.check_alive()
                await asyncio.sleep(0.01)
        second = (await coordinator.status()).ranks[1]
        assert 0 < second.weights_read_bytes < second.weights_planned_bytes
        brake.released.set()
        async with asyncio.timeout(60):
            while coordinator.state is not EngineState.SERVING:
                coordinator.check_alive()
                await asyncio.sleep(0.01)
        status = await coordinator.status()
        assert all(r.weights_read_bytes == r.weights_planned_bytes > 0 for r in status.ranks)
        before = await coordinator.expert_counts()
        request = EngineRequest("a", (1, 2, 3), 5, ignore_eos=True)
        assert [b async for b in coordinator.generate(request)]
        after = await coordinator.expert_counts()
        routed = [sum(new) - sum(old) for new, old in zip(after, before, strict=True)]
        assert routed == [(3 + 4) * layer.channel.top_k for layer in spec.layers]
        await coordinator.close()

    drive(body())
