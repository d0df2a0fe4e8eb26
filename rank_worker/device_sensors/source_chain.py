"""Several sources in order of preference: the first that answers, with back-off for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rank_worker.device_sensors.reading import NodeReading
from rank_worker.device_sensors.source import Source, taken_now

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 15.0
NO_SOURCE = (
    "no sensors: neither libdcmi.so nor npu-smi nor an NVIDIA driver with nvidia-ml-py is here; "
    "install the driver, in a container mount /usr/local/dcmi and npu-smi"
)


@dataclass
class _Entry:
    source: Source
    retry_s: float = FIRST_RETRY_S
    due_s: float = 0.0
    error: str | None = None


class SourceChain:
    """read() asks the sources that are due, best first. One that fails rests for 1, 2, 4 .. 15 s.

    A reading with chips is an answer even where it has an error too.
    """

    def __init__(
        self, sources: Sequence[Source], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries = [_Entry(source) for source in sources]
        self._clock = clock

    def read(self) -> NodeReading:
        for entry in self._entries:
            if self._clock() < entry.due_s:
                continue
            reading = entry.source.read()
            if reading.chips:
                entry.retry_s, entry.error = FIRST_RETRY_S, None
                return reading
            entry.error = reading.error or f"{entry.source.name} found no chip"
            entry.due_s = self._clock() + entry.retry_s
            entry.retry_s = min(2 * entry.retry_s, LAST_RETRY_S)
        errors = [entry.error for entry in self._entries if entry.error]
        return taken_now(None, error="; also: ".join(errors) or NO_SOURCE)

    def close(self) -> None:
        for entry in self._entries:
            entry.source.close()
