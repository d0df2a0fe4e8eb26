"""Every recorded layout of `npu-smi info`, and what is left of it when it is cut or garbled."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest

from rank_worker.device_sensors.reading import CardReading, ChipReading
from rank_worker.device_sensors.smi_table import parse_info

MIB = 1 << 20


@dataclass(frozen=True)
class Layout:
    """One recorded table: where it is from, its driver, its chips and cards.

    Chips: npu, chip, device, bus, health, Celsius, AICore %, used and total MiB, processes.
    """

    source: str
    driver: str
    chips: tuple[tuple[object, ...], ...]
    cards: tuple[tuple[int, str, float | None], ...]


DUO = ((2, "310P3", None), (5, "310P3", None))
SINGLE = tuple((npu, "310P3", None) for npu in (0, 32, 32768, 32896))
HBM_CHIPS = (
    (0, 0, None, "0000:66:00.0", "ok", 41, 0, 3411, 32768, ()),
    (1, 0, None, "0000:1A:00.0", "ok", 43, 0, 28677, 32768, ()),
)
HBM_CARDS = ((0, "910B4", 93.7), (1, "910B4", 95.2))
IDLE = (
    (2, 0, 0, "0000:03:00.0", "ok", 44, 0, 1497, 44278),
    (2, 1, 1, "0000:03:00.0", "ok", 42, 0, 1421, 43691),
    (5, 0, 2, "0000:83:00.0", "ok", 47, 0, 1503, 44278),
    (5, 1, 3, "0000:83:00.0", "ok", 46, 0, 1418, 43691),
)
SIX = (
    (1, 0, 0, "0000:01:00.0", 51, 1388, 38645),
    (1, 1, 1, "0000:01:00.0", 49, 1402, 38060),
    (2, 0, 2, "0000:02:00.0", 52, 1391, 38645),
    (2, 1, 3, "0000:02:00.0", 50, 1399, 38060),
    (4, 0, 4, "0000:81:00.0", 55, 1377, 38645),
    (4, 1, 5, "0000:81:00.0", 53, 1405, 38060),
)
LAYOUTS = {
    "info_300iduo_two_cards_idle": Layout(
        "capture, sparse card numbers, one bus id a card",
        "25.5.1",
        tuple((*chip, ()) for chip in IDLE),
        DUO,
    ),
    "info_300iduo_all_dash_separators": Layout(
        "capture, the same rule everywhere and no processes",
        "25.5.0",
        tuple((*chip, None) for chip in IDLE),
        DUO,
    ),
    "info_300iduo_busy_processes": Layout(
        "capture, five digits touch the slash, names cut at 15 characters",
        "25.5.1",
        (
            (2, 0, 0, "0000:03:00.0", "ok", 77, 83, 40511, 44278, ((481516, 38912),)),
            (2, 1, 1, "0000:03:00.0", "ok", 75, 81, 40377, 43691, ((481517, 38890),)),
            (5, 0, 2, "0000:83:00.0", "ok", 78, 84, 40498, 44278, ((481518, 38905),)),
            (5, 1, 3, "0000:83:00.0", "ok", 76, 0, 1420, 43691, ()),
        ),
        DUO,
    ),
    "info_300iduo_six_chips_ecc_on": Layout(
        "three cards, less memory with ECC",
        "25.5.2",
        tuple((n, c, d, bus, "ok", t, 0, used, total, ()) for n, c, d, bus, t, used, total in SIX),
        tuple((npu, "310P3", None) for npu in (1, 2, 4)),
    ),
    "info_310p_large_npu_ids": Layout(
        "capture, card numbers above 32767, one chip a card",
        "25.2.1",
        (
            (0, 0, 0, "0000:01:00.0", "ok", 49, 0, 19435, 21527, ()),
            (32, 0, 1, "0000:02:00.0", "ok", 50, 0, 1909, 21527, ()),
            (32768, 0, 2, "0000:81:00.0", "ok", 47, 0, 19560, 21527, ()),
            (32896, 0, 3, "0000:C2:00.0", "ok", 54, 0, 1904, 21527, ()),
        ),
        SINGLE,
    ),
    "info_300iduo_alarm_unknown": Layout(
        "all health words; chips that are gone print zeros, which are no readings",
        "25.5.1",
        (
            (2, 0, 0, "0000:03:00.0", "alarm", 97, 0, 1497, 44278, ()),
            (2, 1, 1, "0000:03:00.0", "warning", 91, 0, 1421, 43691, ()),
            (5, 0, 2, "0000:83:00.0", "critical", None, None, None, 44278, ()),
            (5, 1, 3, "0000:83:00.0", None, None, None, None, 43691, ()),
        ),
        DUO,
    ),
    "info_310p_driver_22_old_layout": Layout(
        "capture, other column widths and no processes",
        "22.0.4",
        ((7, 0, 0, "0000:00:07.0", "ok", 31, 0, 1803, 21527, None),),
        ((7, "310P3", None),),
    ),
    "info_910b_hbm_layout": Layout(
        "another family: HBM column, no device column", "25.5.2", HBM_CHIPS, HBM_CARDS
    ),
    "info_driver_incomplete_warning_tail": Layout(
        "the same with a warning below the table", "25.5.2", HBM_CHIPS, HBM_CARDS
    ),
}


def expected(layout: Layout) -> tuple[ChipReading, ...]:
    return tuple(_chip(*values) for values in layout.chips)


def _chip(  # type: ignore[no-untyped-def]
    npu, chip, device, bus, health, temperature, core, used, total, processes
) -> ChipReading:
    return ChipReading(
        npu,
        chip,
        device_index=device,
        bus_id=bus,
        health=health,
        temperature_celsius=temperature,
        core_utilisation_ratio=None if core is None else core / 100,
        memory_used_bytes=None if used is None else used * MIB,
        memory_total_bytes=total * MIB,
        processes=None if processes is None else tuple((p, mib * MIB) for p, mib in processes),
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_recorded_tables_give_their_values(name: str, recorded: Callable[[str], str]) -> None:
    table = parse_info(recorded(name))
    layout = LAYOUTS[name]
    assert table.chips == expected(layout)
    assert table.cards == tuple(CardReading(npu, watts, n) for npu, n, watts in layout.cards)
    assert table.driver_version == layout.driver


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_prefix_of_a_table_gives_a_wrong_number(
    name: str, recorded: Callable[[str], str]
) -> None:
    text = recorded(name)
    whole = {chip.key: chip for chip in parse_info(text).chips}
    seen = 0
    for length in range(len(text)):
        for chip in parse_info(text[:length]).chips:
            seen += 1
            assert exact_or_absent(chip, whole[chip.key]), length
    assert seen


@pytest.mark.parametrize("seed", range(20))
def test_lost_lines_lose_chips_only(seed: int, recorded: Callable[[str], str]) -> None:
    """As from a program whose output another one writes into."""
    text = recorded("info_300iduo_busy_processes")
    whole = {chip.key: chip for chip in parse_info(text).chips}
    random_ = random.Random(seed)
    lines = [line for line in text.splitlines(keepends=True) if random_.random() > 0.2]
    for chip in parse_info("".join(lines)).chips:
        kept = ChipReading(**{**_fields(chip), "processes": whole[chip.key].processes})
        assert exact_or_absent(kept, whole[chip.key])


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "310p" in name or "duo" in name])
def test_no_chip_gets_the_values_of_another_whatever_run_of_lines_is_lost(
    name: str, recorded: Callable[[str], str]
) -> None:
    lines = recorded(name).splitlines(keepends=True)
    whole = {chip.key: chip for chip in parse_info("".join(lines)).chips}
    for first in range(len(lines)):
        for end in range(first + 1, len(lines) + 1):
            for chip in parse_info("".join(lines[:first] + lines[end:])).chips:
                kept = ChipReading(**{**_fields(chip), "processes": whole[chip.key].processes})
                assert exact_or_absent(kept, whole[chip.key]), (first, end)


def test_a_lost_chip_costs_only_itself_and_the_next(recorded: Callable[[str], str]) -> None:
    lines = recorded("info_300iduo_six_chips_ecc_on").splitlines(keepends=True)
    (gone,) = [at for at, line in enumerate(lines) if line.startswith("| 1       1 ")]
    chips = parse_info("".join(lines[:gone] + lines[gone + 3 :])).chips
    assert [chip.device_index for chip in chips] == [0, 3, 4, 5]


@pytest.mark.parametrize("seed", range(20))
def test_garbage_never_raises(seed: int, recorded: Callable[[str], str]) -> None:
    random_ = random.Random(seed)
    text = list(recorded("info_300iduo_busy_processes"))
    for _ in range(200):
        text[random_.randrange(len(text))] = chr(random_.choice([0, 10, 32, 43, 48, 124, 0x2028]))
    parse_info("".join(text))


@pytest.mark.parametrize(
    ("printed", "number"), [("32767", None), ("0", None), ("-5", None), ("NA", None), ("150", 150)]
)
def test_error_words_are_no_temperatures(
    printed: str, number: float | None, recorded: Callable[[str], str]
) -> None:
    text = recorded("info_300iduo_two_cards_idle").replace("NA           44 ", f"NA {printed} ")
    assert parse_info(text).chips[0].temperature_celsius == number


def test_a_cell_with_a_value_too_many_is_not_read(recorded: Callable[[str], str]) -> None:
    text = recorded("info_300iduo_two_cards_idle").replace("1497 / 44278", "7 1497 / 44278")
    first, second, *_ = parse_info(text).chips
    assert (first.memory_total_bytes, first.core_utilisation_ratio) == (None, None)
    assert second.memory_total_bytes == 43691 * MIB


def exact_or_absent(found: ChipReading, true: ChipReading) -> bool:
    whole = _fields(true)
    return all(value is None or value == whole[name] for name, value in _fields(found).items())


def _fields(chip: ChipReading) -> dict[str, object]:
    return {field.name: getattr(chip, field.name) for field in fields(chip)}
