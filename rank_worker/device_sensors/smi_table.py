"""The table of `npu-smi info`: two rows a chip, then the processes.

Rows are told apart by what is in their cells, columns by the words of the header. Rules between
rows say nothing about cards: some hosts print the same rule everywhere. Where lines are missing in
between, a card's row may stand above the row of another chip: the Device column, which counts chips
from 0 in every container, tells it. Tables without that column (other families) can't be checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rank_worker.device_sensors.reading import HEALTH_WORDS, CardReading, ChipReading
from rank_worker.device_sensors.smi_text import (
    MIB,
    NO_VALUE,
    celsius,
    decimal,
    finished_lines,
    percent,
    whole,
)

BUS_ID = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]+")
# Five digits touch the slash: `40511/ 44278`.
CELL_VALUE = re.compile(r"[^\s/]+\s*/\s*[^\s/]+|\S+")
VERSION = re.compile(r"\bVersion:\s*(\S+)")
NO_PROCESSES = re.compile(r"No running processes found in NPU (\d+)")


@dataclass(frozen=True, slots=True)
class SmiTable:
    """Chips in the order of their rows, one card for each card number, the driver's version."""

    chips: tuple[ChipReading, ...]
    cards: tuple[CardReading, ...]
    driver_version: str | None


def parse_info(text: str) -> SmiTable:
    """What `npu-smi info` printed; rows that are cut or unlike any known layout are left out."""
    table = _Table()
    for line in finished_lines(text):
        table.take(line.strip())
    return SmiTable(table.finished_chips(), tuple(table.cards.values()), table.version)


class _Table:
    """The state while rows go by."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.cards: dict[int, CardReading] = {}
        self._chips: dict[tuple[int, int], ChipReading] = {}
        self._columns: dict[str, list[str]] = {}
        self._card_row: list[str] | None = None  # waits for the chip's row below it
        self._next_device = 0  # of the next chip's row when none is missing
        self._in_processes = False
        self._listed: dict[int, dict[tuple[int, int], list[tuple[int, int]]]] = {}
        self._closed: set[int] = set()  # cards whose list of processes has ended

    def take(self, line: str) -> None:
        if line.startswith("+"):  # never between the two rows of a chip
            self._card_row = None
            self._closed |= self._listed.keys()
        if not (len(line) > 1 and line.startswith("|") and line.endswith("|")):
            return
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        if found := VERSION.search(line):
            self.version = found[1]
        elif len(cells) == 4 and cells[1] == "Process id":
            self._in_processes = True
        elif self._in_processes:
            self._take_process(cells)
        elif len(cells) == 3:
            self._take_row(cells)

    def finished_chips(self) -> tuple[ChipReading, ...]:
        """A list of processes counts once the rule below it was seen: it may be cut."""
        listed = {
            key: tuple(held)
            for npu_id in self._closed
            for key, held in self._listed[npu_id].items()
        }
        return tuple(
            replace(chip, processes=listed.get(chip.key, ()))
            if chip.npu_id in self._closed
            else chip
            for chip in self._chips.values()
        )

    def _take_row(self, cells: list[str]) -> None:
        first = cells[0].split()
        if cells[0].startswith(("NPU ", "Chip")):
            name = "chip" if first[0] == "Chip" else "card"
            self._columns[name] = cells[2].split()
            self._columns[f"{name} ids"] = first
        elif len(self._columns) < 4:
            return
        elif self._is_chip_row(cells):
            follows = self._follows(cells[0].split())
            if self._card_row is not None and follows:
                self._add(self._card_row, cells)
            self._card_row = None
        else:
            self._card_row = cells

    def _is_chip_row(self, cells: list[str]) -> bool:
        return bool(BUS_ID.fullmatch(cells[1])) or cells[1] in NO_VALUE

    def _follows(self, chip_ids: list[str]) -> bool:
        """Whether no chip is missing between this row and the one before."""
        if "Device" not in self._columns["chip ids"]:
            return True
        device = whole(chip_ids[1]) if len(chip_ids) == 2 else None
        follows = device == self._next_device
        if device is not None:
            self._next_device = device + 1
        return follows

    def _add(self, card_cells: list[str], chip_cells: list[str]) -> None:
        card_ids, chip_ids = card_cells[0].split(), chip_cells[0].split()
        npu_id, chip_id = _first(card_ids), _first(chip_ids)
        if npu_id is None or chip_id is None or min(npu_id, chip_id) < 0:
            return
        if len(chip_ids) != len(self._columns["chip ids"]) or (npu_id, chip_id) in self._chips:
            return
        card = self._values("card", card_cells[2])
        chip = _chip_of(npu_id, chip_id, chip_cells[1], card, self._values("chip", chip_cells[2]))
        if "Device" in self._columns["chip ids"]:
            chip = replace(chip, device_index=whole(chip_ids[1]))
        self._chips[npu_id, chip_id] = replace(chip, health=_health(card_cells[1]))
        name = " ".join(card_ids[1:]) or None
        power = decimal(card.get("Power(W)"))
        known = self.cards.get(npu_id)
        if known is None or known.power_watts is None:
            self.cards[npu_id] = CardReading(npu_id, power, name)

    def _values(self, row: str, cell: str) -> dict[str, str]:
        """Values of a cell by the words of the header; none when their numbers differ."""
        names, values = self._columns[row], CELL_VALUE.findall(cell)
        return dict(zip(names, values, strict=True)) if len(names) == len(values) else {}

    def _take_process(self, cells: list[str]) -> None:
        if found := NO_PROCESSES.fullmatch(cells[0]):
            self._listed.setdefault(int(found[1]), {})
            return
        ids = [whole(word) for word in cells[0].split()]
        pid, held = whole(cells[1] if len(cells) == 4 else None), whole(cells[-1])
        if len(ids) != 2 or ids[0] is None or ids[1] is None or pid is None or held is None:
            return
        of_card = self._listed.setdefault(ids[0], {})
        of_card.setdefault((ids[0], ids[1]), []).append((pid, held * MIB))


def _chip_of(
    npu_id: int, chip_id: int, bus_id: str, card: dict[str, str], chip: dict[str, str]
) -> ChipReading:
    """A chip that is gone prints zeros: no temperature and no memory in use mean no reading."""
    used, total = _memory(chip)
    temperature = celsius(card.get("Temp(C)"))
    measured = temperature is not None or bool(used)
    return ChipReading(
        npu_id,
        chip_id,
        bus_id=None if bus_id in NO_VALUE else bus_id,
        temperature_celsius=temperature,
        memory_used_bytes=used if measured else None,
        memory_total_bytes=total,
        core_utilisation_ratio=percent(chip.get("AICore(%)")) if measured else None,
    )


def _memory(chip: dict[str, str]) -> tuple[int | None, int | None]:
    """Used and total bytes: HBM where the chip has it (its Memory-Usage is then 0 / 0)."""
    for name in ("HBM-Usage(MB)", "Memory-Usage(MB)"):
        used, _, total = chip.get(name, "").partition("/")
        used_mib, total_mib = whole(used.strip()), whole(total.strip())
        if total_mib is not None and total_mib > 0:
            good = used_mib is not None and 0 <= used_mib <= total_mib
            return (used_mib * MIB if good and used_mib is not None else None), total_mib * MIB
    return None, None


def _health(word: str) -> str | None:
    return word.lower() if word.lower() in HEALTH_WORDS else None


def _first(words: list[str]) -> int | None:
    return whole(words[0]) if words else None
