"""An `npu-smi` whose chips are as warm as a test says: npu-smi 25's table, two chips a card.

Other queries get recorded answers, the same for every card and chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SCRIPT = """#!/bin/sh
# A real npu-smi answers "info" with one table, and what it doesn't know with an error.
cd "$(dirname "$0")" || exit 1
if [ -f stuck ]; then exec sleep 60; fi
if [ -f broken ]; then echo "dcmi module initialize failed. ret is -8005"; exit 1; fi
if [ "$2" = "-t" ] && [ -f "$3" ]; then exec cat "$3"; fi
if [ "$*" = "info" ]; then cat table; else echo "Error parameter of $2"; exit 1; fi
"""
RECORDED = Path(__file__).parents[1] / "rank_worker/sensors/npu_smi"
ANSWERS = {
    "power": "power_300iduo_card",
    "usages": "usages_300iduo_card",
    "ecc": "ecc_300iduo_one_chip",
    "ecc-enable": "ecc_enable_300iduo_on",
    "health": "health_300iduo_one_chip_ok",
}
LINE = "+-------------------------------+-----------------+--------------------------------------+"
THICK = LINE.replace("-", "=")
HEAD = (
    "| npu-smi 25.5.1                                   Version: 25.5.1                       |",
    LINE,
    "| NPU     Name                  | Health          | Power(W)     Temp(C)           "
    "Hugepages-Usage(page) |",
    "| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)  |",
)


class ScriptedSensor:
    """Files of the fake are replaced whole: no call sees half a table."""

    def __init__(self, folder: Path, num_chips: int) -> None:
        self.folder, self.num_chips = folder, num_chips
        self.set([50] * num_chips)
        for query, recorded in ANSWERS.items():
            (folder / query).write_text((RECORDED / f"{recorded}.txt").read_text())
        program = folder / "npu-smi"
        program.write_text(SCRIPT)
        program.chmod(0o755)

    def set(self, celsius: Sequence[float]) -> None:
        """°C of each chip, by its logic id."""
        rows = [row for chip, value in enumerate(celsius) for row in self._rows(chip, value)]
        new = self.folder / "table.new"
        new.write_text("\n".join((LINE, *HEAD, THICK, *rows, "")))
        new.rename(self.folder / "table")

    def heat(self, chip: int, celsius: float) -> None:
        """One chip; the others are at 50 °C."""
        self.set([celsius if index == chip else 50 for index in range(self.num_chips)])

    def fail(self, how: str) -> None:
        """`stuck` or `broken`, until `heal`."""
        (self.folder / how).touch()

    def heal(self) -> None:
        for how in ("stuck", "broken"):
            (self.folder / how).unlink(missing_ok=True)

    def _rows(self, chip: int, celsius: float) -> tuple[str, ...]:
        card, place = 2 + chip // 2, chip % 2
        bus, memory = f"0000:{0x80 + card:02X}:00.0", f"{1400 + chip} / 44278"
        return (
            f"| {card:<7} 310P3                 | OK              "
            f"| NA           {celsius:<17g} 0     / 0 |",
            f"| {place:<7} {chip:<21} | {bus}    | {10 + chip:<12} {memory} |",
            THICK if place else LINE,
        )
