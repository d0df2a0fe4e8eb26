"""Once a second: rank 0's sensors -> heat guard -> the coordinator, and orders -> every rank.

Owns the loop and what each gang was told. Knows no threshold and no stream. Ranks ask their own
node's sensors, since a coordinator may run on another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.gang import Gang, RankHandle
from cluster.thermal_guard import ThermalGuard, Verdict
from placement.errors import RankError
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.guard_word import Order

INTERVAL_S = 1.0
ANSWER_S = 2.0  # a rank that lives tells its reading and takes an order in this time


@dataclass(frozen=True)
class HeatListener:
    """Whom the watch asks and tells."""

    gang: Callable[[], Gang | None]
    order: Callable[[], Order]  # as it now holds, by hand and by the guard
    on_reading: Callable[[NodeReading | None, Verdict, Sequence[int]], None]


class HeatWatch:
    """run() never ends. Without a guard it only passes on what a hand orders."""

    def __init__(self, guard: ThermalGuard | None, listener: HeatListener) -> None:
        self._guard = guard
        self._listener = listener
        self._told: tuple[Gang, Order] | None = None
        self._looked_at: Gang | None = None
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """The order has changed: it is told at once."""
        self._wake.set()

    def release(self) -> None:
        """See ThermalGuard.release."""
        if self._guard is not None:
            self._guard.release()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            gang = self._listener.gang()
            ranks = gang.ranks if gang is not None else ()
            if ranks and self._guard is not None:
                if gang is not self._looked_at:
                    self._guard.new_gang()
                self._looked_at = gang
                await self._look(self._guard, ranks)
            if gang is not None and ranks:
                await self._tell(gang)
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look(self, guard: ThermalGuard, ranks: Sequence[RankHandle]) -> None:
        reading = None
        try:
            async with asyncio.timeout(ANSWER_S):
                reading = await ranks[0].reading()
        except (RankError, TimeoutError):
            pass  # no reading: the guard knows for how long
        devices = [rank.identity.physical_chip for rank in ranks]
        verdict = guard.observe(reading, devices, time.monotonic())
        self._listener.on_reading(reading, verdict, devices)

    async def _tell(self, gang: Gang) -> None:
        """Every rank of a new gang, and whenever the order changes."""
        order = self._listener.order()
        if self._told == (gang, order) or (self._told is None and order is Order.RUN):
            return
        calls = (rank.obey(order) for rank in gang.ranks)
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(*calls)
        except (RankError, TimeoutError):
            return  # told again in a second, unless the gang has ended meanwhile
        self._told = (gang, order)
