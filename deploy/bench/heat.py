"""How hot the chips of a gang got while it was measured, where they have sensors.

Where there is none, nothing is told: an absent temperature is None, never 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rank_worker.device_sensors.poller import SensorPoller
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.device_sensors.sources import open_poller

LOOK_S = 0.5  # readings come once a second
Celsius = Callable[[], float | None]


class ChipHeat:
    """take() gives the greatest temperature of the chips 0..num_chips-1 since the last take()."""

    def __init__(self, num_chips: int) -> None:
        self._chips = range(num_chips)
        self._lock = threading.Lock()
        self._greatest: float | None = None

    def look(self, reading: NodeReading | None) -> None:
        if reading is None:
            return
        chips = reading.by_rank(self._chips).values()
        with self._lock:
            seen = [self._greatest, *(chip.temperature_celsius for chip in chips)]
            self._greatest = max((value for value in seen if value is not None), default=None)

    def take(self) -> float | None:
        with self._lock:
            found, self._greatest = self._greatest, None
        return found


@contextmanager
def chip_heat(
    device: str, num_chips: int, sensors: Callable[[], SensorPoller] = open_poller
) -> Iterator[Celsius]:
    """A take() that is kept up to date while inside. Rank r runs on chip r; a CPU has no sensor.

    ConfigError or OSError when the node's processes can't meet.
    """
    heat = ChipHeat(num_chips)
    if device == "cpu":
        yield heat.take
        return
    poller, over = sensors(), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            heat.look(poller.latest())

    thread = threading.Thread(target=watch, name="bench-heat", daemon=True)
    thread.start()
    try:
        yield heat.take
    finally:
        over.set()
        thread.join()
        poller.close()


def no_sensor() -> float | None:
    """A take() that never knows."""
    return None


def celsius_text(celsius: float | None) -> str:
    return "no sensor" if celsius is None else f"{celsius:.0f} °C"
