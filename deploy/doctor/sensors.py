"""One complete reading of this machine's chips for the doctor, who is in no hurry."""

from __future__ import annotations

import time

from placement.errors import ConfigError
from rank_worker.device_sensors.node_lock import run_directory
from rank_worker.device_sensors.nvml import NvmlSource, open_nvml
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.device_sensors.smi import SmiSource
from rank_worker.device_sensors.smi_program import SmiProgram, find_program
from rank_worker.device_sensors.source import taken_now

LIMIT_S = 15.0  # an answer takes 0.1 to 0.5 s; a full one of two cards has about 20


def read_sensors(device: str) -> NodeReading | None:
    """None where the machine has no tool that knows the device's chips."""
    if device == "cuda":
        return _read_once(open_nvml())
    program = find_program() if device == "npu" else None
    if program is None:
        return None
    try:
        source = SmiSource(SmiProgram(program, run_directory()))
    except (OSError, ConfigError) as error:
        return taken_now(SmiSource.name, error=str(error))
    return _complete(source)


def _read_once(source: NvmlSource | None) -> NodeReading | None:
    if source is None:
        return None
    try:
        return source.read()
    finally:
        source.close()


def _complete(source: SmiSource) -> NodeReading:
    """Every read adds the answer of one query: the last one has them all."""
    end_s = time.monotonic() + LIMIT_S
    reading = source.read()
    # A map of all, three queries a card and three a chip, as far as the time goes.
    for _ in range(3 * len(reading.cards) + 3 * len(reading.chips)):
        if time.monotonic() > end_s:
            break
        newer = source.read()
        if newer.error is not None:
            return newer
        reading = newer
    return reading
