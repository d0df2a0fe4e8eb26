"""Readings from npu-smi: its table at every poll, one of the dearer queries where time is left."""

from __future__ import annotations

import time
from dataclasses import replace

from rank_worker.device_sensors.reading import NodeReading
from rank_worker.device_sensors.smi_program import SmiProgram
from rank_worker.device_sensors.smi_queries import SmiQueries
from rank_worker.device_sensors.smi_table import parse_info
from rank_worker.device_sensors.source import SensorError, taken_now

SLOW_S = 0.5  # a table that took longer leaves no time for another call in the same second


class SmiSource:
    """Chips by `npu-smi`; what the card's own limit is, it does not tell."""

    name = "npu-smi"

    def __init__(self, program: SmiProgram) -> None:
        self._program = program
        self._queries = SmiQueries(program)

    def read(self) -> NodeReading:
        start = time.monotonic()
        try:
            text = self._program.run("info")
        except SensorError as error:
            return taken_now(self.name, error=str(error))
        table = parse_info(text)
        if not table.chips:
            first = next((line for line in text.splitlines() if line.strip()), "nothing")
            return taken_now(
                self.name,
                error=f"`npu-smi info` printed no chip that nrank can read: {first[:120]!r}; run "
                f"it by hand and report its output",
            )
        taken = taken_now(self.name)  # before the other call: its time is not this table's
        if time.monotonic() - start < SLOW_S:
            self._queries.ask_one(table)
        chips, cards = self._queries.add_to(table)
        return replace(taken, chips=chips, cards=cards)

    def close(self) -> None:
        """Nothing runs between two calls of read()."""
