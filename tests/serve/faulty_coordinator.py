"""A real coordinator that carries out an order which a rank hands on in the middle of its work."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from cluster.coordinator import CoordinatorSettings
from cluster.ray_coordinator import CoordinatorReplica
from placement.config import EngineConfig
from tests.serve.faulty_rank import SLOW_S, SLOW_STEPS, STUCK_S, FaultyFactory, handed_on

LOOK_S = 0.01


def stand_still(seconds: float) -> None:
    """The loop does; the process and its other threads go on."""
    time.sleep(seconds)


class FaultyCoordinator(CoordinatorReplica):
    async def __init__(  # type: ignore[misc]  # Serve awaits a constructor
        self,
        config: EngineConfig,
        settings: CoordinatorSettings,
        resource: str,
        factory: FaultyFactory,
    ) -> None:
        await super().__init__(config, settings, resource, factory)
        self._order = handed_on(factory.path)
        self._obeying = asyncio.create_task(self._obey())

    async def _obey(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                act = json.loads(self._order.read_text())["act"]
                self._order.unlink()
            except FileNotFoundError:
                continue
            if act == "raise":
                self._fail()
            elif act == "stuck":
                stand_still(STUCK_S)
            else:
                for _ in range(SLOW_STEPS):
                    stand_still(SLOW_S)
                    await asyncio.sleep(LOOK_S)

    def _fail(self) -> None:
        """Whatever ranks tell next, a fault of ours comes of it."""

        def fault(_: Any) -> None:
            raise ValueError("on purpose")

        metrics: Any = self._coordinator._metrics
        metrics.update_snapshots = metrics.observe_batch = fault
        gang = self._coordinator._supervisor.gang
        if gang is not None and gang._watch is not None:
            gang._watch._on_progress = fault
