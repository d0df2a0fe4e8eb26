"""A source of readings, and how it says that it has none."""

from __future__ import annotations

import time
from typing import Protocol

from placement.errors import NrankError
from rank_worker.device_sensors.reading import CardReading, ChipReading, NodeReading


class SensorError(NrankError):
    """A query that gave no answer; the message is one line with its remedy."""


class Source(Protocol):
    """read() returns within a few seconds whatever the driver does, and never raises."""

    name: str

    def read(self) -> NodeReading: ...

    def close(self) -> None: ...


def taken_now(
    source: str | None,
    chips: tuple[ChipReading, ...] = (),
    cards: tuple[CardReading, ...] = (),
    error: str | None = None,
) -> NodeReading:
    """A reading with the time of this moment; its error is cut to one line of 500 characters."""
    line = None if error is None else " ".join(error.split())[:500]
    return NodeReading(time.monotonic(), time.time(), source, chips, cards, line)
