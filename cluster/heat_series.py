"""Series of chips, cards and the heat guard, from the last reading and verdict.

Owns which chip belongs to which rank in labels. `cluster.metrics` has the table these families
belong to. A figure that isn't known has no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.holds import HAND
from cluster.thermal_guard import HEAT, SILENCE, HeatLimits, Verdict
from rank_worker.device_sensors.reading import HEALTH_WORDS, STALE_S, ChipReading, NodeReading
from rank_worker.guard_word import Order

_CHIP = ("rank", "card", "chip")  # rank is empty for a chip of the node that no rank runs on
_CHIP_GAUGES = {
    "nrank_chip_temperature_celsius": "temperature_celsius",
    "nrank_chip_shutdown_celsius": "shutdown_celsius",
    "nrank_chip_memory_used_bytes": "memory_used_bytes",
    "nrank_chip_memory_total_bytes": "memory_total_bytes",
    "nrank_chip_core_utilisation_ratio": "core_utilisation_ratio",
    "nrank_chip_bandwidth_utilisation_ratio": "bandwidth_utilisation_ratio",
    "nrank_chip_ecc_enabled": "ecc_enabled",
}
LIMITS = ("hold", "resume", "cut")
CAUSES = (HEAT, SILENCE, HAND)
_ECC = {"single_bit": "ecc_single_bit", "double_bit": "ecc_double_bit"}


class HeatSeries(Collector):
    """Nothing at all before the first verdict: sensors that are not asked have no series."""

    NAMES = frozenset(
        {
            *_CHIP_GAUGES,
            "nrank_chip_limit_celsius",
            "nrank_chip_health",
            "nrank_chip_error_codes",
            "nrank_chip_ecc_errors_total",
            "nrank_card_power_watts",
            "nrank_sensor_age_seconds",
            "nrank_sensor_silent_ranks",
            "nrank_heat_order",
            "nrank_hold_seconds_total",
        }
    )

    def __init__(self, clock: Callable[[], float], help_of: Callable[[str], str]) -> None:
        """`clock` is that of readings: `time.monotonic`."""
        self._clock, self._help_of = clock, help_of
        self._reading: NodeReading | None = None
        self._verdict: Verdict | None = None
        self._devices: Sequence[int] = ()
        self.held_s: Mapping[str, float] = {}  # cause -> seconds so far
        self.order = Order.RUN
        self.limits: HeatLimits | None = None  # of the guard; None where nothing guards

    def observe(
        self, reading: NodeReading | None, verdict: Verdict, devices: Sequence[int]
    ) -> None:
        """`devices[rank]` is the physical chip of a rank."""
        if reading is not None and reading.source is not None:
            self._reading = reading  # one that failed makes the last good one older, no more
        self._verdict, self._devices = verdict, devices

    def collect(self) -> Iterator[Metric]:
        order = self._gauge("nrank_heat_order", "order")
        for one in Order:
            order.add_metric([one.name.lower()], one is self.order)
        yield order
        held = CounterMetricFamily(
            "nrank_hold_seconds_total", self._help_of("nrank_hold_seconds_total"), labels=["cause"]
        )
        for cause in CAUSES:
            held.add_metric([cause], self.held_s.get(cause, 0.0))
        yield held
        silent = self._gauge("nrank_sensor_silent_ranks")
        if self._verdict is not None:
            silent.add_metric([], len(self._verdict.silent_ranks))
        yield silent
        yield from self._sensors()

    def _sensors(self) -> Iterator[Metric]:
        """An old reading tells its age and nothing else."""
        reading, now_s = self._reading, self._clock()
        age = self._gauge("nrank_sensor_age_seconds")
        if reading is not None:
            age.add_metric([], reading.age_s(now_s))
        yield age
        is_fresh = reading is not None and 0 <= reading.age_s(now_s) <= STALE_S
        chips = reading.chips if reading is not None and is_fresh else ()
        rank_of: dict[int | None, str] = {
            chip: str(rank) for rank, chip in enumerate(self._devices)
        }
        labels = [
            [rank_of.get(chip.device_index, ""), str(chip.npu_id), str(chip.chip_id)]
            for chip in chips
        ]
        for name, field in _CHIP_GAUGES.items():
            family = self._gauge(name, *_CHIP)
            for chip, label in zip(chips, labels, strict=True):
                value = attrgetter(field)(chip)
                if value is not None:
                    family.add_metric(label, float(value))
            yield family
        yield self._limits(chips, labels)
        yield from self._states(chips, labels)
        power = self._gauge("nrank_card_power_watts", "card")
        for card in reading.cards if reading is not None and is_fresh else ():
            if card.power_watts is not None:
                power.add_metric([str(card.npu_id)], card.power_watts)
        yield power

    def _limits(self, chips: Sequence[ChipReading], labels: list[list[str]]) -> Metric:
        family = self._gauge("nrank_chip_limit_celsius", *_CHIP, "kind")
        for chip, label in zip(chips, labels, strict=True):
            if self.limits is not None:
                limits = self.limits.of(chip)
                for kind in LIMITS:
                    family.add_metric([*label, kind], attrgetter(f"{kind}_celsius")(limits))
        return family

    def _states(self, chips: Sequence[ChipReading], labels: list[list[str]]) -> Iterator[Metric]:
        health = self._gauge("nrank_chip_health", *_CHIP, "state")
        codes = self._gauge("nrank_chip_error_codes", *_CHIP)
        ecc = CounterMetricFamily(
            "nrank_chip_ecc_errors_total",
            self._help_of("nrank_chip_ecc_errors_total"),
            labels=[*_CHIP, "kind"],
        )
        for chip, label in zip(chips, labels, strict=True):
            if chip.health is not None:
                for word in HEALTH_WORDS:
                    health.add_metric([*label, word], word == chip.health)
            if chip.error_codes is not None:
                codes.add_metric(label, len(chip.error_codes))
            for kind, field in _ECC.items():
                if (count := attrgetter(field)(chip)) is not None:
                    ecc.add_metric([*label, kind], count)
        yield from (health, codes, ecc)

    def _gauge(self, name: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, self._help_of(name), labels=labels)
