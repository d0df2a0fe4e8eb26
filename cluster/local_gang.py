"""Ranks as threads of this process: the form for one rank, for benchmarks and for tests.

Same handles and same life as the Ray form. A thread can't be killed: kill() asks the loops to
stop and reports the ranks that don't.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.gang import RankHandle
from cluster.rank_factory import RankEngine, RankFactory, make_rank
from cluster.rank_orders import RankOrders
from placement.config import EngineConfig
from placement.errors import RankError
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.guard_word import Order
from rank_worker.messages import (
    EngineRequest,
    LoadProgress,
    RankIdentity,
    RankSnapshot,
    TokenBatch,
)

T = TypeVar("T")


class ThreadRank:
    """A rank whose loop has a thread of its own; control calls and outputs have others."""

    def __init__(self, config: EngineConfig, index: int, factory: RankFactory) -> None:
        self._config = config
        self._factory = factory
        self._engine: RankEngine | None = None
        self._running: asyncio.Future[None] | None = None
        self._orders = RankOrders()
        self._main = ThreadPoolExecutor(1, thread_name_prefix=f"rank-{index}")
        self._control = ThreadPoolExecutor(4, thread_name_prefix=f"rank-{index}-control")
        self._out = ThreadPoolExecutor(1, thread_name_prefix=f"rank-{index}-out")
        self.identity = RankIdentity(os.getpid(), platform.node(), index, "127.0.0.1")

    @property
    def engine(self) -> RankEngine:
        assert self._engine is not None, "a rank is assigned before it is used"
        return self._engine

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    async def assign(self, rank: int, world_size: int) -> None:
        make = self._factory
        self._engine = await self._in(self._main, lambda: make(self._config, rank, world_size))
        self._orders.attach(self._engine)

    async def listen(self) -> int:
        return await self._in(self._main, lambda: self.engine.listen())

    async def open(self, port: int) -> None:
        await self._in(self._main, lambda: self.engine.open(port))

    async def load(self) -> None:
        await self._in(self._main, lambda: self.engine.load())

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._running = loop.run_in_executor(self._main, self.engine.run)
        await asyncio.shield(self._running)

    async def stop(self) -> None:
        await self._in(self._control, lambda: self.engine.stop())

    async def obey(self, order: Order) -> None:
        await self._in(self._control, lambda: self._orders.obey(order))

    async def reading(self) -> NodeReading | None:
        return await self._in(self._control, self._orders.reading)

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        await self._in(self._control, lambda: self.engine.submit(requests))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._in(self._control, lambda: self.engine.abort(request_ids))

    async def poll_outputs(self, timeout_s: float) -> tuple[TokenBatch, ...]:
        return await self._in(self._out, lambda: self.engine.poll_outputs(timeout_s))

    async def snapshot(self) -> RankSnapshot:
        return await self._in(self._control, lambda: self.engine.snapshot())

    async def progress(self) -> LoadProgress:
        return await self._in(self._control, lambda: self.engine.progress())

    async def expert_counts(self) -> list[list[int]]:
        return await self._in(self._control, lambda: self.engine.expert_counts())

    async def end(self, timeout_s: float) -> bool:
        """Waits for the loop to end; False when it did not within `timeout_s`."""
        if self._running is not None:
            done, _ = await asyncio.wait({self._running}, timeout=timeout_s)
            if not done:
                return False
            self._running.exception()  # told to run()'s caller already; mark it as seen
        self._orders.close()
        for pool in (self._main, self._control, self._out):
            pool.shutdown(wait=False)
        return True


class LocalLauncher:
    """Launcher of ThreadRanks; `factory` makes the engine of a rank."""

    def __init__(self, config: EngineConfig, factory: RankFactory = make_rank) -> None:
        self._config = config
        self._factory = factory
        self._ranks: tuple[ThreadRank, ...] = ()

    async def place(self) -> tuple[RankHandle, ...]:
        self._ranks = tuple(
            ThreadRank(self._config, index, self._factory) for index in range(self._config.ranks)
        )
        return self._ranks

    async def kill(self) -> None:
        ranks, self._ranks = self._ranks, ()
        await asyncio.gather(*(rank.stop() for rank in ranks if rank.is_running))
        timeout_s = self._config.step_timeout_s
        ended = await asyncio.gather(*(rank.end(timeout_s) for rank in ranks))
        stuck = [str(index) for index, done in enumerate(ended) if not done]
        if stuck:
            raise RankError(
                f"rank(s) {', '.join(stuck)} did not stop within {timeout_s:g} s; "
                "a thread can't be killed: end this process"
            )
