"""Orders of the heat guard for scripted temperatures, second by second."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.thermal_guard import HeatLimits, ThermalGuard, Verdict
from rank_worker.device_sensors.reading import ChipReading, NodeReading
from rank_worker.guard_word import Order

RUN, PACE, HOLD, CUT = Order
DEVICES = (0, 1, 2, 3)


def node(
    *celsius: float | None, shutdown: float | None = None, ids: bool = True, error: str = ""
) -> NodeReading:
    chips = tuple(
        ChipReading(
            1 + index // 2, index % 2, index if ids else None, temperature_celsius=value,
            shutdown_celsius=shutdown,
        )
        for index, value in enumerate(celsius)
    )  # fmt: skip
    return NodeReading(0.0, 0.0, "npu-smi", chips, error=error or None)


def orders(guard: ThermalGuard, script: Sequence[float]) -> list[Order]:
    """One chip of four as scripted, the others cool."""
    return [
        guard.observe(node(50, 51, celsius, 52), DEVICES, second).order
        for second, celsius in enumerate(script)
    ]


def test_heat_holds_and_resumes_with_hysteresis() -> None:
    script = (70, 88, 93.9, 94, 95, 90, 86, 85.1, 85, 90, 93)
    assert orders(ThermalGuard(), script) == [
        RUN, PACE, PACE, HOLD, HOLD, HOLD, HOLD, HOLD, RUN, PACE, PACE,
    ]  # fmt: skip


def test_a_hold_ends_only_when_every_chip_is_cool() -> None:
    guard = ThermalGuard()
    assert guard.observe(node(95, 84, 84, 84), DEVICES, 0).order is HOLD
    assert guard.observe(node(84, 86, 84, 84), DEVICES, 1).order is HOLD
    assert guard.observe(node(84, None, 84, 84), DEVICES, 2).order is HOLD, "one is unknown"
    assert guard.observe(node(85, 85, 85, 85), DEVICES, 3).order is RUN


def test_a_cut_ends_when_all_are_cool_unless_it_stays() -> None:
    script = (70, 95, 97, 95, 86, 84)
    assert orders(ThermalGuard(), script) == [RUN, HOLD, CUT, CUT, CUT, RUN]
    guard = ThermalGuard(HeatLimits(stay_down_after_cut=True))
    assert orders(guard, (*script, 60)) == [RUN, HOLD, CUT, CUT, CUT, CUT, CUT]
    guard.release()
    assert orders(guard, (86, 60)) == [HOLD, RUN]


def test_a_jump_past_both_limits_cuts_at_once() -> None:
    assert orders(ThermalGuard(), (70, 120)) == [RUN, CUT]


def test_the_reason_names_chip_rank_value_and_limit() -> None:
    guard = ThermalGuard()
    verdict = guard.observe(node(50, 94.5, 60, 60), (3, 2, 1, 0), 0)
    assert verdict.cause == "heat"
    assert verdict.reason == "chip 1.1 (rank 2) reached 94.5 °C, hold_celsius=94"
    assert guard.observe(node(97, 50, 50, 50), (3, 2, 1, 0), 1).reason == (
        "chip 1.0 (rank 3) reached 97 °C, cut_celsius=96"
    )


def test_only_cards_of_the_gang_count() -> None:
    hot_elsewhere = node(50, 50, 99, 99)
    assert ThermalGuard().observe(hot_elsewhere, (0, 1), 0) == Verdict()
    guard = ThermalGuard()
    verdict = guard.observe(hot_elsewhere, (0, 2), 0)
    assert verdict.order is CUT
    guard = ThermalGuard()
    verdict = guard.observe(node(50, 95, 50, 50), (0,), 0)
    assert verdict.reason == "chip 1.1 (on the card of a rank) reached 95 °C, hold_celsius=94"
    assert guard.observe(node(50, 86, 50, 50), (0,), 1).order is HOLD
    assert guard.observe(node(50, 85, 99, 99), (0,), 2).order is RUN


def test_a_chip_that_is_gone_is_missed_where_chips_have_no_logic_ids() -> None:
    guard = ThermalGuard()
    assert guard.observe(node(50, 50, 50, 50, ids=False), (0, 1), 0).silent_ranks == ()
    verdicts = [guard.observe(node(50, 50, 50, ids=False), (0, 1), s) for s in (1, 31)]
    assert [v.silent_ranks for v in verdicts] == [(0, 1)] * 2
    assert verdicts[-1].order is HOLD
    hot = guard.observe(node(97, 50, 50, ids=False), (0, 1), 32)
    assert hot.order is CUT, "those that are there still count"
    assert ThermalGuard().observe(node(50, ids=False), (0, 1), 0).silent_ranks == (0, 1)


def test_time_without_a_gang_is_no_silence() -> None:
    guard = ThermalGuard()
    guard.observe(node(50, 50), (0, 1), 0)
    guard.new_gang()
    assert guard.observe(None, (0, 1), 100) == Verdict(silent_ranks=(0, 1))
    assert guard.observe(None, (0, 1), 130).order is HOLD


def test_without_logic_ids_the_hottest_chip_of_the_node_counts_for_all() -> None:
    assert ThermalGuard().observe(node(50, 50, 95, 50, ids=False), (0, 1), 0).order is HOLD
    verdict = ThermalGuard().observe(node(50, None, ids=False), (0, 1), 0)
    assert verdict.silent_ranks == (0, 1), "the unknown one may be ours"


@pytest.mark.parametrize(
    "lost", [None, node(), node(50, None, 50, 50), node(50), node(error="npu-smi hangs")]
)
def test_thirty_seconds_without_a_temperature_hold(lost: NodeReading | None) -> None:
    guard = ThermalGuard()
    guard.observe(node(50, 50, 50, 50), DEVICES, 0)
    verdicts = [guard.observe(lost, DEVICES, second) for second in (1, 29, 30, 31)]
    assert [v.order for v in verdicts] == [RUN, RUN, HOLD, HOLD]
    assert all(1 in v.silent_ranks for v in verdicts), "the alarm comes at once"
    assert "no temperature of rank(s)" in verdicts[-1].reason
    assert "for more than 30 s" in verdicts[-1].reason
    assert verdicts[-1].reason == verdicts[-2].reason, "nothing new to tell each second"
    assert verdicts[-1].cause == "silence"
    if lost is not None and lost.error:
        assert lost.error in verdicts[-1].reason
    assert guard.observe(node(90, 90, 90, 90), DEVICES, 32) == Verdict(PACE)


def test_sensors_that_never_spoke_hold_after_the_same_time() -> None:
    guard = ThermalGuard()
    assert guard.observe(None, DEVICES, 100.0).order is RUN
    assert guard.observe(None, DEVICES, 130.0).order is HOLD


def test_silence_is_only_an_alarm_where_so_configured() -> None:
    guard = ThermalGuard(HeatLimits(hold_when_silent=False))
    guard.observe(None, DEVICES, 0)
    assert guard.observe(None, DEVICES, 99) == Verdict(silent_ranks=DEVICES)


def test_silence_neither_ends_a_cut_nor_softens_it() -> None:
    guard = ThermalGuard()
    guard.observe(node(97, 50, 50, 50), DEVICES, 0)
    assert guard.observe(None, DEVICES, 60).order is CUT
    assert guard.observe(node(86, 50, 50, 50), DEVICES, 61).order is CUT


def test_a_card_that_tells_its_shutdown_threshold_lowers_the_limits() -> None:
    chip = node(50, shutdown=90).chips[0]
    assert HeatLimits().of(chip) == HeatLimits(84, 80, 86)
    assert HeatLimits().of(node(50, shutdown=105).chips[0]) == HeatLimits()
    assert HeatLimits().of(node(50, shutdown=30).chips[0]) == HeatLimits(), "no such threshold"
    assert ThermalGuard().observe(node(86, shutdown=90), (0,), 0).order is CUT
