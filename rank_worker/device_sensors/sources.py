"""The sources that this machine has, and the poller over them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rank_worker.device_sensors.dcmi import DcmiSource, find_library
from rank_worker.device_sensors.node_lock import run_directory
from rank_worker.device_sensors.nvml import open_nvml
from rank_worker.device_sensors.poller import SensorPoller
from rank_worker.device_sensors.smi import SmiSource
from rank_worker.device_sensors.smi_program import SmiProgram, find_program
from rank_worker.device_sensors.source import Source


def open_poller() -> SensorPoller:
    """The poller of this process, beside those of other gangs of the user on this node.

    ConfigError or OSError when they can't meet in /tmp/nrank-UID.
    """
    directory = run_directory()
    meeting = directory / f"sensors-{_what_is_here()}"
    meeting.mkdir(mode=0o700, exist_ok=True)
    return SensorPoller(find_sources(directory), meeting)


def _what_is_here() -> str:
    """Whoever finds other programs or libraries reads other sensors and doesn't meet us."""
    text = f"{find_library()}|{find_program()}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find_sources(directory: Path) -> list[Source]:
    """Best first: libdcmi.so tells most and costs least. None is asked yet."""
    found: list[Source] = []
    if library := find_library():
        found.append(DcmiSource(library))
    if program := find_program():
        found.append(SmiSource(SmiProgram(program, directory)))
    if nvml := open_nvml():
        found.append(nvml)
    return found
