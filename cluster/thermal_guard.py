"""The heat guard: from what the sensors say to what a gang may do, with hysteresis.

Pure: told readings and times, it answers with an order and a reason. Owns the thresholds' meaning
and what a lost sensor means; polls nothing and stops nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rank_worker.device_sensors.reading import ChipReading, NodeReading
from rank_worker.guard_word import Order

HEAT, SILENCE = "heat", "silence"
LEAST_SHUTDOWN_CELSIUS = 70.0  # no accelerator shuts down below: the value was misread
SHUTDOWN_MARGIN_CELSIUS = 4.0  # below a card's own shutdown threshold we cut at the latest
HOLD_MARGIN_CELSIUS = 2.0  # and hold so far below the cut
RESUME_MARGIN_CELSIUS = 4.0  # and resume so far below the hold


@dataclass(frozen=True)
class HeatLimits:
    """In °C. The defaults are the reference box's own guard, not limits of the card.

    Resume lies below hold, hold below cut. A card that tells its shutdown threshold lowers what
    would lie too near to it.
    """

    hold_celsius: float = 94.0
    resume_celsius: float = 85.0
    cut_celsius: float = 96.0
    silence_s: float = 30.0  # so long without a chip's temperature is a hold
    hold_when_silent: bool = True
    stay_down_after_cut: bool = False

    def of(self, chip: ChipReading) -> HeatLimits:
        """The limits of one chip."""
        if chip.shutdown_celsius is None or chip.shutdown_celsius < LEAST_SHUTDOWN_CELSIUS:
            return self
        cut = min(self.cut_celsius, chip.shutdown_celsius - SHUTDOWN_MARGIN_CELSIUS)
        hold = min(self.hold_celsius, cut - HOLD_MARGIN_CELSIUS)
        resume = min(self.resume_celsius, hold - RESUME_MARGIN_CELSIUS)
        return HeatLimits(
            hold, resume, cut, self.silence_s, self.hold_when_silent, self.stay_down_after_cut
        )


@dataclass(frozen=True)
class Verdict:
    """What a gang may do. `silent_ranks` have had no temperature lately, which is an alarm."""

    order: Order = Order.RUN
    reason: str = ""  # of a HOLD or CUT: one line
    cause: str = ""  # of the same: HEAT or SILENCE
    silent_ranks: tuple[int, ...] = ()


@dataclass
class ThermalGuard:
    """`observe` once a second. Lives as long as the coordinator: a restart cools no chip."""

    limits: HeatLimits = field(default_factory=HeatLimits)
    _heat: Order = Order.RUN  # the latch: RUN, HOLD or CUT
    _heat_reason: str = ""
    _seen_s: dict[int, float] = field(default_factory=dict)  # rank -> last temperature
    _num_chips: int = 0  # most that were read of a node whose chips have no logic ids

    def observe(self, reading: NodeReading | None, devices: Sequence[int], now_s: float) -> Verdict:
        """`devices[rank]` is the physical chip of each rank; `now_s` a clock that only grows.

        Where no chip of the node has a logic id, all of its chips count for every rank.
        """
        chips, beside = self._chips_of(reading, devices)
        for rank in range(len(devices)):
            if rank in chips:
                self._seen_s[rank] = now_s
        silence = {
            rank: now_s - self._seen_s.setdefault(rank, now_s) for rank in range(len(devices))
        }
        self._judge(chips, beside, is_whole=len(chips) == len(devices))
        silent = tuple(rank for rank in silence if rank not in chips)
        longest = max((silence[rank] for rank in silent), default=0.0)
        order, reason, cause = self._heat, self._heat_reason, HEAT if self._heat else ""
        if self.limits.hold_when_silent and longest >= self.limits.silence_s and order < Order.HOLD:
            why = f": {reading.error}" if reading is not None and reading.error else ""
            names = ", ".join(map(str, silent))
            order, cause = Order.HOLD, SILENCE
            limit_s = self.limits.silence_s
            reason = f"no temperature of rank(s) {names} for more than {limit_s:g} s{why}"
        warm = any(_is_warm(chip, self.limits) for chip in (*chips.values(), *beside))
        if order is Order.RUN and warm:
            order = Order.PACE
        return Verdict(order, reason, cause, silent)

    def new_gang(self) -> None:
        """Nobody read the sensors since the last gang ended: that was no silence."""
        self._seen_s.clear()

    def release(self) -> None:
        """By hand: a cut that would stay ends as soon as all chips are cool."""
        if self._heat is Order.CUT:
            self._heat = Order.HOLD

    def _judge(
        self, chips: Mapping[int, ChipReading], beside: Sequence[ChipReading], is_whole: bool
    ) -> None:
        """Moves the latch. Up at once, down only when every chip is known to be cool."""
        named = [(f"rank {rank}", chip) for rank, chip in chips.items()]
        named += [("on the card of a rank", chip) for chip in beside]
        for name, chip in sorted(named, key=lambda item: -_celsius(item[1])):
            limits, celsius = self.limits.of(chip), _celsius(chip)
            text = f"chip {chip.npu_id}.{chip.chip_id} ({name}) reached {celsius:g} °C"
            if celsius >= limits.cut_celsius and self._heat < Order.CUT:
                self._heat = Order.CUT
                self._heat_reason = f"{text}, cut_celsius={limits.cut_celsius:g}"
            elif celsius >= limits.hold_celsius and self._heat < Order.HOLD:
                self._heat = Order.HOLD
                self._heat_reason = f"{text}, hold_celsius={limits.hold_celsius:g}"
        is_cool = is_whole and all(
            _celsius(chip) <= self.limits.of(chip).resume_celsius for _, chip in named
        )
        stays = self._heat is Order.CUT and self.limits.stay_down_after_cut
        if is_cool and not stays:
            self._heat, self._heat_reason = Order.RUN, ""

    def _chips_of(
        self, reading: NodeReading | None, devices: Sequence[int]
    ) -> tuple[dict[int, ChipReading], list[ChipReading]]:
        """The hottest chip that a rank may run on, by rank, and the other chips of their cards.

        Those of unknown temperature are left out.
        """
        if reading is None:
            return {}, []
        known = [chip for chip in reading.chips if chip.temperature_celsius is not None]
        if any(chip.device_index is not None for chip in reading.chips):
            found = {r: chip for r, chip in reading.by_rank(devices).items() if chip in known}
            cards = {chip.npu_id for chip in found.values()}
            ours = {chip.key for chip in found.values()}
            beside = [c for c in known if c.npu_id in cards and c.key not in ours]
            return found, beside
        self._num_chips = max(self._num_chips, len(reading.chips), len(set(devices)))
        if len(known) < self._num_chips:  # the missing one may be ours
            return {}, known
        return dict.fromkeys(range(len(devices)), max(known, key=_celsius)), []


def _celsius(chip: ChipReading) -> float:
    assert chip.temperature_celsius is not None, "chips without a temperature are left out"
    return chip.temperature_celsius


def _is_warm(chip: ChipReading, limits: HeatLimits) -> bool:
    return _celsius(chip) > limits.of(chip).resume_celsius
