"""One complete reading of this machine's chips for the doctor, who is in no hurry."""

from __future__ import annotations

import time
from contextlib import closing

from placement.errors import ConfigError
from rank_worker.device_sensors.dcmi_reader import NAME as DCMI
from rank_worker.device_sensors.node_lock import run_directory
from rank_worker.device_sensors.nvml import NvmlSource
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.device_sensors.smi import SmiSource
from rank_worker.device_sensors.source import Source, taken_now
from rank_worker.device_sensors.sources import find_sources

SOURCES = {"npu": (DCMI, SmiSource.name), "cuda": (NvmlSource.name,)}
LIMIT_S = 15.0  # an answer of npu-smi takes 0.1 to 0.5 s; a full one of two cards has about 20


def read_sensors(device: str) -> NodeReading | None:
    """Of the best source that answers. None where the machine has none that knows the device."""
    try:
        found = find_sources(run_directory())
    except (OSError, ConfigError) as error:
        return taken_now(None, error=str(error))
    errors = []
    for source in (one for one in found if one.name in SOURCES.get(device, ())):
        with closing(source):
            reading = _complete(source)
        if reading.chips:
            return reading
        errors.append(reading.error or f"{source.name} found no chip")
    return taken_now(None, error="; also: ".join(errors)) if errors else None


def _complete(source: Source) -> NodeReading:
    """Every read of npu-smi adds the answer of one query: the last one has them all."""
    end_s = time.monotonic() + LIMIT_S
    reading = source.read()
    # A map of all, three queries a card and three a chip, as far as the time goes.
    more = 3 * len(reading.cards) + 3 * len(reading.chips) if source.name == SmiSource.name else 0
    for _ in range(more):
        newer = source.read() if time.monotonic() < end_s else None
        if newer is None or not newer.chips:
            break
        reading = newer
    return reading
