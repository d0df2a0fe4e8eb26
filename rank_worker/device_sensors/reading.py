"""What the sensors of a node's chips said at one moment.

Owns the fields and their units. Knows no source. Everything unknown is None: a value that could
not be read is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEALTH_WORDS = ("ok", "warning", "alarm", "critical")  # worse to the right
STALE_S = 5.0  # an older reading counts as none


def plausible_celsius(value: float | None) -> float | None:
    """0 is told where the query failed, and 32765 and up are error words of the sensor."""
    return value if value is not None and 0 < value <= 150 else None


def plausible_ratio(percent: float | None) -> float | None:
    """0..1; a value outside 0..100 is none."""
    return percent / 100 if percent is not None and 0 <= percent <= 100 else None


@dataclass(frozen=True, slots=True)
class ChipReading:
    """One chip. (`npu_id`, `chip_id`) is its only unique name: cards share a bus id.

    `npu_id` is the number of the card, sparse and maybe above 32767; `chip_id` counts in the card.
    `device_index` is the logic id, by which frameworks and Ray number chips. Ratios are 0..1. ECC
    counts are those since the driver started. `shutdown_celsius` is the card's own limit.
    `processes` are (pid, bytes); in a container the pids may be those of the host.
    """

    npu_id: int
    chip_id: int
    device_index: int | None = None
    bus_id: str | None = None
    temperature_celsius: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    core_utilisation_ratio: float | None = None
    bandwidth_utilisation_ratio: float | None = None
    health: str | None = None  # one of HEALTH_WORDS
    error_codes: tuple[str, ...] | None = None  # hexadecimal, without 0x
    ecc_enabled: bool | None = None
    ecc_single_bit: int | None = None
    ecc_double_bit: int | None = None
    shutdown_celsius: float | None = None
    processes: tuple[tuple[int, int], ...] | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.npu_id, self.chip_id


@dataclass(frozen=True, slots=True)
class CardReading:
    """One board. Power is the whole card's: it belongs to no chip."""

    npu_id: int
    power_watts: float | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class NodeReading:
    """All chips of a node. `error` is one line with its remedy, and then chips may be missing.

    `monotonic_s` is the clock that all processes of a node share; `wall_s` is seconds since 1970.
    """

    monotonic_s: float
    wall_s: float
    source: str | None = None  # "dcmi", "npu-smi" or "nvml"
    chips: tuple[ChipReading, ...] = ()
    cards: tuple[CardReading, ...] = ()
    error: str | None = None

    def age_s(self, now_monotonic_s: float) -> float:
        return now_monotonic_s - self.monotonic_s

    def is_fresh(self, now_monotonic_s: float) -> bool:
        """Not older than STALE_S. One from the future was taken before the node restarted."""
        return 0 <= self.age_s(now_monotonic_s) <= STALE_S

    def by_device(self) -> Mapping[int, ChipReading]:
        """Chips by their logic id; those whose id is unknown are left out."""
        return {c.device_index: c for c in self.chips if c.device_index is not None}

    def by_rank(self, devices: Sequence[int]) -> Mapping[int, ChipReading]:
        """Chips by rank. `devices[rank]` is the physical chip of a rank, as its identity tells.

        A rank whose chip has no reading is left out.
        """
        found = self.by_device()
        return {rank: found[chip] for rank, chip in enumerate(devices) if chip in found}
