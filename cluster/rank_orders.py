"""What a rank is told and tells before its engine exists: the guard's order, the node's sensors.

One in the process of each rank, whichever form that has. The sensors are opened when first asked.
"""

from __future__ import annotations

import threading

from cluster.rank_factory import RankEngine
from placement.errors import ConfigError
from rank_worker.device_sensors.poller import SensorPoller
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.device_sensors.source import taken_now
from rank_worker.device_sensors.sources import open_poller
from rank_worker.guard_word import Order


class RankOrders:
    """Thread-safe; every method returns at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order = Order.RUN
        self._engine: RankEngine | None = None
        self._sensors: SensorPoller | None = None

    def attach(self, engine: RankEngine) -> None:
        """The engine gets the order that holds, and those that follow."""
        with self._lock:
            self._engine = engine
            engine.obey(self._order)

    def obey(self, order: Order) -> None:
        with self._lock:
            self._order = order
            if self._engine is not None:
                self._engine.obey(order)

    def reading(self) -> NodeReading | None:
        """None while no sensor has answered; a reading without chips says why there are none."""
        with self._lock:
            if self._sensors is None:
                try:
                    self._sensors = open_poller()
                except (ConfigError, OSError) as error:
                    return taken_now(None, error=str(error))
            return self._sensors.latest()

    def close(self) -> None:
        with self._lock:
            if self._sensors is not None:
                self._sensors.close()
                self._sensors = None
