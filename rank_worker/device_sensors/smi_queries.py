"""What `npu-smi info` doesn't print and costs a call of its own: asked now and then, one a poll.

Owns when each query is due and how long its answer counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rank_worker.device_sensors import smi_parser
from rank_worker.device_sensors.reading import CardReading, ChipReading
from rank_worker.device_sensors.smi_parser import is_unsupported
from rank_worker.device_sensors.smi_program import SmiProgram
from rank_worker.device_sensors.smi_table import SmiTable
from rank_worker.device_sensors.source import SensorError

INTERVAL_S = 30.0
UNSUPPORTED_S = 600.0  # until a query that the device refused is tried again
KEPT_S = 3 * INTERVAL_S  # an older answer is none

PARSERS: Mapping[str, Callable[[str], object]] = {
    "ecc-enable": smi_parser.parse_ecc_enabled,
    "power": smi_parser.parse_power,
    "usages": smi_parser.parse_bandwidth,
    "ecc": smi_parser.parse_ecc_counts,
    "health": smi_parser.parse_error_codes,
    "proc-mem": smi_parser.parse_process_memory,
    "map": smi_parser.parse_map,
}


@dataclass(frozen=True, slots=True)
class Query:
    """`kind` about a card or, with a chip's number, about one chip; the map about all."""

    kind: str
    npu_id: int | None = None
    chip_id: int | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        if self.npu_id is None:
            return "info", "-m"
        chip = () if self.chip_id is None else ("-c", str(self.chip_id))
        return "info", "-t", self.kind, "-i", str(self.npu_id), *chip


class SmiQueries:
    """ask_one() makes at most one call; add_to() adds the answers that count to a table."""

    def __init__(self, program: SmiProgram, clock: Callable[[], float] = time.monotonic) -> None:
        self._program = program
        self._clock = clock
        self._due: dict[Query, float] = {}
        self._answers: dict[Query, tuple[float, object]] = {}

    def ask_one(self, table: SmiTable) -> None:
        """The query that waits longest. One that fails has no answer until its next turn."""
        now = self._clock()
        query = min(_wanted(table), key=lambda wanted: self._due.get(wanted, 0), default=None)
        if query is None or self._due.get(query, 0) > now:
            return
        self._due[query] = now + INTERVAL_S
        self._answers.pop(query, None)
        try:
            text = self._program.run(*query.arguments)
        except SensorError:
            return  # the readings lack these fields; `info` tells when all is broken
        if is_unsupported(text):
            self._due[query] = now + UNSUPPORTED_S
        else:
            self._answers[query] = (now, PARSERS[query.kind](text))

    def add_to(self, table: SmiTable) -> tuple[tuple[ChipReading, ...], tuple[CardReading, ...]]:
        """Chips and cards of the table with what the queries told."""
        rows = self._answer(Query("map")) or ()
        indices = {(row.npu_id, row.chip_id): row.device_index for row in rows}
        chips = tuple(self._completed(chip, indices.get(chip.key)) for chip in table.chips)
        cards = tuple(
            card
            if card.power_watts is not None
            else replace(card, power_watts=self._answer(Query("power", card.npu_id)))
            for card in table.cards
        )
        return chips, cards

    def _completed(self, chip: ChipReading, index: int | None) -> ChipReading:
        single, double = self._answer(Query("ecc", *chip.key)) or (None, None)
        usages = self._answer(Query("usages", chip.npu_id)) or {}
        processes = chip.processes
        if processes is None:
            processes = self._answer(Query("proc-mem", *chip.key))
        return replace(
            chip,
            device_index=index if chip.device_index is None else chip.device_index,
            bandwidth_utilisation_ratio=usages.get(chip.chip_id),
            ecc_enabled=self._answer(Query("ecc-enable", chip.npu_id)),
            ecc_single_bit=single,
            ecc_double_bit=double,
            error_codes=self._answer(Query("health", *chip.key)),
            processes=processes,
        )

    def _answer(self, query: Query) -> Any:
        """What the query's parser returned, None when it is too old or there is none."""
        taken_s, answer = self._answers.get(query, (0.0, None))
        return answer if self._clock() - taken_s <= KEPT_S else None


def _wanted(table: SmiTable) -> Iterator[Query]:
    if any(chip.device_index is None for chip in table.chips):
        yield Query("map")
    for card in table.cards:
        yield Query("ecc-enable", card.npu_id)
        yield Query("usages", card.npu_id)
        if card.power_watts is None:
            yield Query("power", card.npu_id)
    for chip in table.chips:
        yield Query("health", *chip.key)
        yield Query("ecc", *chip.key)
        if chip.processes is None:
            yield Query("proc-mem", *chip.key)
